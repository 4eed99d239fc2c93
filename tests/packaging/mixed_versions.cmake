# Run by ctest: objects that were compiled with two versions of lockstep, and pass a type of it, do not link.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
file(WRITE ${SCRATCH}/callee.cpp "#include \"lockstep/log/log.hpp\"\nvoid greet(const lockstep::Log&) {}\n")
file(WRITE ${SCRATCH}/caller.cpp
  "#include \"lockstep/log/log.hpp\"\nvoid greet(const lockstep::Log&);\nint main() { greet(lockstep::Log(0)); }\n")
set(compile ${COMPILER} -std=c++20 -DFMT_HEADER_ONLY -I${SOURCE}/include)
foreach(version IN ITEMS v0_1 v0_0)
  execute_process(COMMAND ${compile} -Dv0_1=${version} -c ${SCRATCH}/caller.cpp -o ${SCRATCH}/caller.o COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${compile} ${SCRATCH}/callee.cpp ${SCRATCH}/caller.o -o ${SCRATCH}/program RESULT_VARIABLE result
    ERROR_VARIABLE output)
  if(version STREQUAL "v0_1" AND NOT result EQUAL 0)
    message(FATAL_ERROR "objects of one version do not link: ${output}")
  elseif(version STREQUAL "v0_0" AND (result EQUAL 0 OR NOT output MATCHES "greet"))
    message(FATAL_ERROR "objects of two versions link, or fail for another reason: ${output}")
  endif()
endforeach()
