# The oldest compilers and the oldest CMake that lockstep works with. Used by the build and, installed beside it, by
# lockstepConfig.cmake.
include_guard(GLOBAL)

# Sets OUT to the sentence that says why the C++ compiler is too old, or to nothing.
function(lockstep_compiler_problem out)
  set(${out} "" PARENT_SCOPE)
  foreach(pair IN ITEMS "GNU:11:g++" "Clang:14:clang++")
    string(REPLACE ":" ";" pair ${pair})
    list(GET pair 0 id)
    list(GET pair 1 oldest)
    list(GET pair 2 program)
    if(CMAKE_CXX_COMPILER_ID STREQUAL id AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS oldest)
      set(${out} "${CMAKE_CXX_COMPILER} is ${program} ${CMAKE_CXX_COMPILER_VERSION}, and lockstep needs g++ 11 or clang++ 14, \
or newer: install one, and name it with -DCMAKE_CXX_COMPILER in an empty build folder" PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# The same for CMake and the compiler, for projects that find lockstep installed.
function(lockstep_toolchain_problem out)
  if(CMAKE_VERSION VERSION_LESS 3.22)
    set(problem "CMake ${CMAKE_VERSION} is too old, lockstep needs 3.22 or newer: install a newer one (pip install cmake), \
or compile with the flags of pkg-config lockstep and without CMake")
  else()
    lockstep_compiler_problem(problem)
  endif()
  set(${out} "${problem}" PARENT_SCOPE)
endfunction()
