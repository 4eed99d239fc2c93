# Finds a LibTorch and makes the imported target `lockstep_torch` of its CPU parts. In this order:
#   1. what CMAKE_PREFIX_PATH, Torch_DIR or Torch_ROOT name (an unpacked zip, a `torch` package, a prefix);
#   2. Debian's libtorch-dev;
#   3. the `torch` package of the python3 on PATH;
#   4. with LOCKSTEP_FETCH_TORCH: one that pip installs into LOCKSTEP_TORCH_FOLDER, kept for later builds.
# Not by find_package(Torch): that of a CUDA build needs nvcc and links all of CUDA. Used by the build and, installed
# beside it, by lockstepConfig.cmake.
#
# Sets LOCKSTEP_TORCH_ROOT, LOCKSTEP_TORCH_VERSION, LOCKSTEP_TORCH_LIBRARY (libtorch_cpu.so) and, where there is none,
# LOCKSTEP_TORCH_MISSING to the sentence that says so. A project configures without LibTorch; its targets do not build then.

# Before the guard: a variable is of one folder, and each folder that calls find_package(lockstep) reads this file.
set(LOCKSTEP_TORCH_OLDEST 2.6)
set(LOCKSTEP_TORCH_NEWEST 2.15.0)
include_guard(GLOBAL)
include(${CMAKE_CURRENT_LIST_DIR}/LockstepTorchInspect.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/LockstepTorchInstall.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/LockstepTorchPython.cmake)

# Takes ROOT if it holds a usable LibTorch: makes the target and says so. A LibTorch that cannot serve is named with
# its reason: at once an error where the user gave it, else a note before the search goes on.
macro(_lockstep_torch_try root from given)
  if(NOT TARGET lockstep_torch)
    lockstep_torch_inspect("${root}" _torch)
    if(_torch_FOUND AND NOT _torch_PROBLEM)
      _lockstep_torch_target(_torch)
      set(LOCKSTEP_TORCH_ROOT ${_torch_ROOT})
      set(LOCKSTEP_TORCH_VERSION ${_torch_VERSION})
      set(LOCKSTEP_TORCH_LIBRARY ${_torch_LIBRARY})
      message(STATUS "lockstep: LibTorch ${_torch_VERSION} of ${from}: ${_torch_ROOT}")
      if(_torch_VERSION VERSION_GREATER LOCKSTEP_TORCH_NEWEST)
        message(STATUS "lockstep: LibTorch ${_torch_VERSION} is newer than ${LOCKSTEP_TORCH_NEWEST}, the newest tried")
      endif()
    elseif(_torch_FOUND AND ${given})
      message(FATAL_ERROR "lockstep: the given LibTorch cannot be used: ${_torch_PROBLEM}: set Torch_ROOT to another one, or "
        "leave it to lockstep to find or install one (LOCKSTEP_FETCH_TORCH=ON)")
    elseif(_torch_FOUND)
      message(STATUS "lockstep: passed over ${from}: ${_torch_PROBLEM}")
      list(APPEND _passed_over "${from}: ${_torch_PROBLEM}")
    endif()
  endif()
endmacro()

# The folders that the user's variables may mean: a prefix, the package itself, its cmake folder, or a virtual
# environment with the package in it.
function(_lockstep_torch_given out)
  set(roots)
  foreach(variable IN ITEMS Torch_DIR Torch_ROOT)
    set(value "${${variable}}")
    if(value AND NOT value MATCHES "NOTFOUND$")
      get_filename_component(above ${value}/../../.. ABSOLUTE)
      list(APPEND roots ${above} ${value})
    endif()
  endforeach()
  string(REPLACE ":" ";" environment "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH environment)
    get_filename_component(above ${prefix}/../.. ABSOLUTE)
    file(GLOB packages ${prefix}/lib/python3*/site-packages/torch)
    list(APPEND roots ${prefix} ${prefix}/torch ${packages})
    if(prefix MATCHES "/share/cmake/*$")
      list(APPEND roots ${above})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES roots)
  set(${out} ${roots} PARENT_SCOPE)
endfunction()

# The folder of the torch package of PYTHON, without importing it: that would take seconds.
function(_lockstep_torch_of_python python out)
  execute_process(COMMAND ${python} -c
    "import importlib.util as u; s = u.find_spec('torch'); print(list(s.submodule_search_locations or [''])[0] if s else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    set(folder "")
  endif()
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

macro(lockstep_find_torch)
  set(LOCKSTEP_TORCH_MISSING "")
  set(_passed_over)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "lockstep runs on Linux; this build is for ${CMAKE_SYSTEM_NAME}")
  endif()
  # Kept, as CXX is: a later configure, such as one that the build starts, may run without the variable.
  foreach(_variable IN ITEMS Torch_DIR Torch_ROOT)
    if(NOT ${_variable} AND NOT "$ENV{${_variable}}" STREQUAL "")
      set(${_variable} "$ENV{${_variable}}" CACHE PATH "The LibTorch to use; set by the environment at first" FORCE)
    endif()
  endforeach()
  _lockstep_torch_given(_roots)
  foreach(_root IN LISTS _roots)
    _lockstep_torch_try("${_root}" "CMAKE_PREFIX_PATH, Torch_DIR or Torch_ROOT" TRUE)
  endforeach()
  foreach(_variable IN ITEMS Torch_DIR Torch_ROOT)
    if(NOT TARGET lockstep_torch AND ${_variable} AND NOT ${_variable} MATCHES "NOTFOUND$")
      message(FATAL_ERROR "lockstep: ${_variable} is ${${_variable}}, but there is no LibTorch: set it to the folder that holds \
LibTorch's include/ and lib/, or leave it to lockstep to find or install one (LOCKSTEP_FETCH_TORCH=ON)")
    endif()
  endforeach()
  _lockstep_torch_try(/usr "Debian's libtorch-dev" FALSE)
  if(NOT TARGET lockstep_torch)
    unset(_python3)
    find_program(_python3 python3 PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
    if(_python3)
      _lockstep_torch_of_python(${_python3} _root)
      if(_root)
        _lockstep_torch_try("${_root}" "the torch package of ${_python3}" FALSE)
      endif()
    endif()
  endif()
  if(NOT TARGET lockstep_torch AND LOCKSTEP_FETCH_TORCH)
    # A whole Python package, where CUDA or the tests' comparisons want one or had one, else the CPU parts.
    set(_whole FALSE)
    if(LOCKSTEP_WITH_PYTHON OR LOCKSTEP_CUDA_WANTED)
      set(_whole TRUE)
    endif()
    lockstep_torch_install_python(${LOCKSTEP_TORCH_FOLDER} ${_whole} _root)
    if(NOT _root AND NOT LOCKSTEP_CUDA_WANTED)
      lockstep_torch_install(${LOCKSTEP_TORCH_FOLDER} _root _problem)
      if(_problem)
        list(APPEND _passed_over "${_problem}")
      endif()
    endif()
    if(_root)
      _lockstep_torch_try("${_root}" "the folder that pip installs into" TRUE)
    endif()
  endif()
  if(NOT TARGET lockstep_torch)
    list(PREPEND _passed_over "looked in CMAKE_PREFIX_PATH, Torch_DIR and Torch_ROOT, in /usr and in the python3 on PATH")
    list(JOIN _passed_over "; " _passed_over)
    set(_remedies "set Torch_ROOT to one, or install one (apt-get install libtorch-dev, or pip install torch)")
    if(NOT LOCKSTEP_FETCH_TORCH)
      string(APPEND _remedies ", or set LOCKSTEP_FETCH_TORCH=ON to let CMake install one with pip")
    endif()
    set(LOCKSTEP_TORCH_MISSING "no LibTorch ${LOCKSTEP_TORCH_OLDEST} or newer was found (${_passed_over}): ${_remedies}")
  endif()
endmacro()

# lockstep_without_torch(target): what links TARGET configures, and does not build: LOCKSTEP_TORCH_MISSING is a warning now and the
# error of the build, before any file is compiled.
function(lockstep_without_torch target)
  if(NOT TARGET lockstep_no_libtorch)
    message(WARNING "lockstep: ${LOCKSTEP_TORCH_MISSING}; what links lockstep does not build until then")
    set(script ${CMAKE_BINARY_DIR}/lockstep_no_libtorch.cmake)
    file(WRITE ${script} "message(FATAL_ERROR [==[lockstep: ${LOCKSTEP_TORCH_MISSING}, and configure again]==])\n")
    add_custom_target(lockstep_no_libtorch COMMAND ${CMAKE_COMMAND} -P ${script} COMMENT "Looking for LibTorch" VERBATIM)
  endif()
  add_dependencies(${target} lockstep_no_libtorch)
endfunction()
