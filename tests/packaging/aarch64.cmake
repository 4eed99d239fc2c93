# Run by ctest under the label release: for aarch64, where a plain char is unsigned, parses all public headers, compiles the tests'
# program over MpiComm to an object, and builds the program of the README and the engine of the shared memory, which it runs under
# qemu-user. CACHE keeps the LibTorch for aarch64. mpi and nccl are the folders of this machine's headers, joined by colons, where the
# build has some.
# Without binfmt_misc a program under qemu-user cannot execute itself, so `launch` cannot start the ranks: this script does.
cmake_minimum_required(VERSION 3.25)
find_program(compiler NAMES aarch64-linux-gnu-g++)
find_program(qemu NAMES qemu-aarch64 qemu-aarch64-static)
if(NOT compiler OR NOT qemu)
  message("SKIPPED packaging_aarch64: no aarch64-linux-gnu-g++ or no qemu-aarch64 (Debian: g++-aarch64-linux-gnu qemu-user)")
  return()
endif()
set(CMAKE_HOST_SYSTEM_PROCESSOR aarch64)  # for which LibTorch is installed
include(${SOURCE}/cmake/LockstepTorch.cmake)
lockstep_torch_install(${CACHE} torch problem)
if(NOT torch)
  message("SKIPPED packaging_aarch64: no LibTorch for aarch64: ${problem}")
  return()
endif()

# run(COMMAND ... [COMMAND ...]): all at once; `output` is what the last one wrote to stdout, `errors` what all wrote to stderr.
function(run)
  execute_process(${ARGV} RESULTS_VARIABLE results OUTPUT_VARIABLE output ERROR_VARIABLE errors TIMEOUT 600)
  if(NOT results MATCHES "^0(;0)*$")
    list(JOIN ARGV " " line)
    message(FATAL_ERROR "${line}\n${output}\n${errors}\nended with ${results}")
  endif()
  set(output "${output}" PARENT_SCOPE)
  set(errors "${errors}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
set(compile ${compiler} -std=c++20 -DFMT_HEADER_ONLY -pthread -I${SOURCE}/include -I${SOURCE}/include/lockstep/detail/gloo_shim -isystem ${torch}/include
  -isystem ${torch}/include/torch/csrc/api/include)
# The headers of other libraries are this machine's, as far as they are not found for aarch64.
file(GLOB of_this_machine /usr/include /usr/include/*-linux-gnu)
list(TRANSFORM of_this_machine PREPEND -idirafter)

set(all_headers ${compile} ${of_this_machine} -fsyntax-only -Wall -Wextra -Wpedantic -Werror)
foreach(part IN ITEMS mpi nccl)
  if(${part})
    string(REPLACE ":" ";-isystem" folders "-isystem${${part}}")
    list(APPEND all_headers ${folders} -include lockstep/comm/${part}_comm.hpp)
  else()
    message("SKIPPED packaging_aarch64 in part: ${part}_comm.hpp: this build has no headers for it (Debian, for mpi: libopenmpi-dev)")
  endif()
endforeach()
if(nccl)
  list(APPEND all_headers -DLOCKSTEP_HAS_CUDA=1)
endif()
run(COMMAND ${all_headers} ${EVERYTHING})
message("all public headers are parsed without a warning; those of NCCL and images are not compiled to code")
if(mpi)
  # MpiComm and MpiBackend are code here; an MPI library for aarch64 to link would be more than 50 packages of another architecture.
  string(REPLACE ":" ";-isystem" folders "-isystem${mpi}")
  run(COMMAND ${compile} ${of_this_machine} ${folders} -O1 -Werror -c ${SOURCE}/tests/comm/programs/mpi_program.cpp -o ${SCRATCH}/mpi_program.o)
  message("mpi_program.cpp, over MpiComm, is compiled with this machine's mpi.h, and neither linked nor run")
endif()

# qemu opens the files of this folder in place of the machine's own. LibTorch's cpuinfo crashes where none is an ARM processor's.
file(WRITE ${SCRATCH}/root/proc/cpuinfo "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n")
file(CREATE_LINK /usr/aarch64-linux-gnu/lib ${SCRATCH}/root/lib SYMBOLIC)
set(emulator ${qemu} -L ${SCRATCH}/root)
if(EXISTS /usr/include/catch2/catch.hpp)
  run(COMMAND ${compile} ${of_this_machine} -O1 -I${SOURCE}/tests ${SOURCE}/tests/comm/shm_engine_test.cpp
    ${SOURCE}/tests/support/main.cpp -o ${SCRATCH}/shm_engine_test)
  # qemu-user ignores RLIMIT_AS.
  run(COMMAND ${emulator} ${SCRATCH}/shm_engine_test "~a limit of the process*")
  message("shm_engine_test: ${output}")
else()
  message("SKIPPED packaging_aarch64 in part: shm_engine_test needs Catch2 2, which is one header (Debian 12: catch2)")
endif()

file(READ ${SOURCE}/README.md readme)
string(REGEX MATCH "```cpp\n([^`]*)```" block "${readme}")
file(WRITE ${SCRATCH}/main.cpp "${CMAKE_MATCH_1}")
run(COMMAND ${compile} -O1 ${SCRATCH}/main.cpp -o ${SCRATCH}/program -L${torch}/lib -Wl,-rpath,${torch}/lib
  -Wl,--allow-shlib-undefined -ltorch_cpu -lc10)
string(RANDOM LENGTH 4 ALPHABET 0123456789 port)
set(rank ${CMAKE_COMMAND} -E env OMP_NUM_THREADS=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=2${port})
run(COMMAND ${rank} RANK=1 ${emulator} ${SCRATCH}/program COMMAND ${rank} RANK=0 ${emulator} ${SCRATCH}/program)
message("the program of the README: ${output}${errors}")
if(NOT output MATCHES "loss 0\\.0000 after 640 steps on 2 ranks" OR errors MATCHES "use Gloo")
  message(FATAL_ERROR "the program of the README did not train on two ranks that share memory")
endif()
