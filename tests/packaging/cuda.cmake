# Run by ctest: configures a user's project against lockstep with and without CUDA, with the LibTorch in TORCH and with
# a folder that holds its CPU parts alone, and looks at what it is told and at the targets that it gets. With a LibTorch
# that has CUDA, a program is built with the installed package and run as well.
file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH}/project ${SCRATCH}/program ${SCRATCH}/cpu/lib ${SCRATCH}/zip/lib ${SCRATCH}/empty)
get_filename_component(libraries ${TORCH_LIBRARY} DIRECTORY)

# Folders as an unpacked zip has them, of symbolic links.
foreach(kind IN ITEMS cpu zip)
  file(CREATE_LINK ${TORCH}/include ${SCRATCH}/${kind}/include SYMBOLIC)
  set(files libtorch_cpu.so libc10.so)
  if(kind STREQUAL "zip")
    list(APPEND files libtorch_cuda.so libc10_cuda.so)
  endif()
  foreach(file IN LISTS files)
    file(CREATE_LINK ${libraries}/${file} ${SCRATCH}/${kind}/lib/${file} SYMBOLIC)
  endforeach()
endforeach()
file(WRITE ${SCRATCH}/project/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
add_subdirectory(${SOURCE} lockstep)
if(TARGET lockstep::cuda)
  message(STATUS \"user: has lockstep::cuda\")
else()
  message(STATUS \"user: has no lockstep::cuda\")
endif()
")

# expect(GOOD|BAD SAYS "sentence"... NEVER "sentence"... ARGS ...): configures the user's project; its output holds or
# does not hold each sentence, line breaks aside.
function(expect result)
  cmake_parse_arguments(arg "" "" "SAYS;NEVER;ARGS" ${ARGN})
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=CUDAToolkit_ROOT --unset=NCCL_ROOT --unset=CMAKE_PREFIX_PATH
    ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SCRATCH}/project -B ${SCRATCH}/build -DCMAKE_CXX_COMPILER=${COMPILER}
    -ULOCKSTEP_CUDA -UCUDAToolkit_ROOT -UNCCL_ROOT -DLOCKSTEP_FETCH_TORCH=OFF ${arg_ARGS}
    RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if((result STREQUAL "GOOD" AND NOT code EQUAL 0) OR (result STREQUAL "BAD" AND code EQUAL 0))
    message(FATAL_ERROR "configuring with ${arg_ARGS} ended with ${code}, not ${result}:\n${output}")
  endif()
  string(REGEX REPLACE "[ \n]+" " " text "${output}")
  foreach(sentence IN LISTS arg_SAYS)
    string(FIND "${text}" "${sentence}" position)
    if(position EQUAL -1)
      message(FATAL_ERROR "configuring with ${arg_ARGS} did not say '${sentence}':\n${output}")
    endif()
  endforeach()
  foreach(sentence IN LISTS arg_NEVER)
    string(FIND "${text}" "${sentence}" position)
    if(NOT position EQUAL -1)
      message(FATAL_ERROR "configuring with ${arg_ARGS} said '${sentence}':\n${output}")
    endif()
  endforeach()
endfunction()

set(has "user: has lockstep::cuda")
set(has_not "user: has no lockstep::cuda")
expect(GOOD SAYS ${has_not} NEVER "without CUDA" "NCCL" ARGS -DTorch_ROOT=${TORCH} -DLOCKSTEP_CUDA=OFF)
expect(GOOD SAYS ${has_not} "without CUDA: the LibTorch in" "has no CUDA part" ARGS -DTorch_ROOT=${SCRATCH}/cpu)
expect(BAD SAYS "the given LibTorch cannot be used" "has no CUDA part (libtorch_cuda.so)" "pip install torch"
  ARGS -DTorch_ROOT=${SCRATCH}/cpu -DLOCKSTEP_CUDA=ON)
expect(BAD SAYS "LOCKSTEP_CUDA is maybe, it must be AUTO, ON or OFF" ARGS -DTorch_ROOT=${TORCH} -DLOCKSTEP_CUDA=maybe)
if(NOT EXISTS ${libraries}/libtorch_cuda.so)
  expect(GOOD SAYS ${has_not} "without CUDA" ARGS -DTorch_ROOT=${TORCH})
  message("SKIPPED packaging_cuda in part: the LibTorch in ${TORCH} has no CUDA part")
  return()
endif()
if(NOT WITH_CUDA)
  message("SKIPPED packaging_cuda in part: CUDA is off in this build, or was not found")
  return()
endif()
expect(GOOD SAYS ${has} "lockstep: CUDA " "NCCL 2." ARGS -DTorch_ROOT=${TORCH})
expect(GOOD SAYS ${has} ARGS -DTorch_ROOT=${TORCH} -DLOCKSTEP_CUDA=ON)
expect(BAD SAYS "LOCKSTEP_CUDA is ON, but CUDA cannot be had" "NCCL_ROOT is ${SCRATCH}/empty, but there is neither"
  ARGS -DTorch_ROOT=${TORCH} -DLOCKSTEP_CUDA=ON -DNCCL_ROOT=${SCRATCH}/empty)
expect(GOOD SAYS ${has_not} "without CUDA" "NCCL_ROOT is ${SCRATCH}/empty"
  ARGS -DTorch_ROOT=${TORCH} -DNCCL_ROOT=${SCRATCH}/empty)

# A toolkit and a NCCL, named by the user of a LibTorch with nothing beside it: of what a pip torch brings. Its packages
# may lack the folder crt/ that a toolkit has; triton's then has it.
file(GLOB cuda_root ${TORCH}/../nvidia/cu[0-9]*)
file(GLOB crt ${cuda_root}/include/crt ${TORCH}/../triton/backends/nvidia/include/crt)
get_filename_component(nccl_root ${TORCH}/../nvidia/nccl ABSOLUTE)
if(cuda_root AND crt AND EXISTS ${nccl_root}/include/nccl.h)
  set(toolkit ${SCRATCH}/toolkit)
  list(GET crt 0 crt)
  file(MAKE_DIRECTORY ${toolkit}/include)
  file(GLOB headers ${cuda_root}/include/*)
  list(FILTER headers EXCLUDE REGEX "/crt$")
  foreach(header IN LISTS headers ITEMS ${crt})
    get_filename_component(name ${header} NAME)
    file(CREATE_LINK ${header} ${toolkit}/include/${name} SYMBOLIC)
  endforeach()
  file(CREATE_LINK ${cuda_root}/lib ${toolkit}/lib SYMBOLIC)
  expect(GOOD SAYS ${has} "(${toolkit}/lib/libcudart.so" "headers ${toolkit}/include)" "(${nccl_root}/lib/libnccl.so"
    ARGS -DTorch_ROOT=${SCRATCH}/zip -DCUDAToolkit_ROOT=${toolkit} -DNCCL_ROOT=${nccl_root})
  # Another NCCL takes the place of LibTorch's library; nccl.h stays that of the version LibTorch was built with.
  file(MAKE_DIRECTORY ${SCRATCH}/other/include)
  file(CREATE_LINK ${nccl_root}/lib ${SCRATCH}/other/lib SYMBOLIC)
  file(WRITE ${SCRATCH}/other/include/nccl.h "#define NCCL_MAJOR 2\n#define NCCL_MINOR 1\n#define NCCL_PATCH 0\n")
  expect(GOOD SAYS ${has} "(${SCRATCH}/other/lib/libnccl.so" "in ${nccl_root}/include)"
    ARGS -DTorch_ROOT=${TORCH} -DNCCL_ROOT=${SCRATCH}/other)
else()
  message("SKIPPED packaging_cuda in part: beside the LibTorch in ${TORCH} lies no whole CUDA to name")
endif()

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " line)
    message(FATAL_ERROR "${line}\n${output}\nended with ${result}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()
file(WRITE ${SCRATCH}/program/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(program LANGUAGES CXX)
find_package(lockstep 0.1 REQUIRED)
find_package(lockstep 0.1 REQUIRED COMPONENTS cuda)
add_executable(program main.cpp)
target_link_libraries(program PRIVATE lockstep::cuda)
")
file(WRITE ${SCRATCH}/program/main.cpp "#include <c10/cuda/CUDAFunctions.h>
#include <nccl.h>

#include <cstdio>

int main() {
  static_assert(LOCKSTEP_HAS_CUDA == 1);
  int version = 0;
  ncclGetVersion(&version);
  std::printf(\"NCCL %d, %d devices\\n\", version, static_cast<int>(c10::cuda::device_count()));
}
")
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${SCRATCH}/lockstep -DCMAKE_CXX_COMPILER=${COMPILER}
  -DLOCKSTEP_BUILD_TESTS=OFF -DLOCKSTEP_BUILD_EXAMPLES=OFF -DCMAKE_INSTALL_PREFIX=${SCRATCH}/prefix)
run(${CMAKE_COMMAND} --install ${SCRATCH}/lockstep)
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SCRATCH}/program -B ${SCRATCH}/program -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix -DTorch_ROOT=${TORCH} -DLOCKSTEP_FETCH_TORCH=OFF)
run(${CMAKE_COMMAND} --build ${SCRATCH}/program)
run(${SCRATCH}/program/program)
message("${output}")
if(NOT output MATCHES "NCCL 2[0-9]+, [0-9]+ devices")
  message(FATAL_ERROR "the program built with lockstep::cuda did not find NCCL")
endif()
