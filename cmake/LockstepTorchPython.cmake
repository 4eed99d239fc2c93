# The Python package `torch` that tests and benchmarks compare with: it must load the very libtorch_cpu.so that is
# built against, else the bits differ for reasons of no interest.
include_guard(GLOBAL)

# The newest torchvision, whose networks and random images examples/imagenet is compared with. It works with any torch from 2.14
# on; without --no-deps pip might install another torch for it.
set(LOCKSTEP_TORCHVISION 0.29.2)

# Installs into the virtual environment TARGET what single comparisons need, where it cannot be imported. A comparison without
# its package prints that it is skipped.
function(_lockstep_install_compared target)
  foreach(package IN ITEMS safetensors torchvision)
    set(requirements ${package})
    if(package STREQUAL torchvision)
      set(requirements --no-deps torchvision==${LOCKSTEP_TORCHVISION} pillow)
    endif()
    execute_process(COMMAND ${target}/bin/python -c "import ${package}" RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
    if(NOT result EQUAL 0)
      execute_process(COMMAND ${target}/bin/python -m pip --disable-pip-version-check install --retries 0 ${requirements}
        RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
      if(NOT result EQUAL 0)
        message(STATUS "lockstep: the Python package ${package} could not be installed into ${target}: it is not compared with")
      endif()
    endif()
  endforeach()
endfunction()

# Sets OUT to the torch package in FOLDER/python-torch-<version>, a virtual environment with all of PyTorch. Where it
# is not there, it is installed if WANTED; OUT is empty where that cannot be done, with a warning that says why.
function(lockstep_torch_install_python folder wanted out)
  set(target ${folder}/python-torch-${LOCKSTEP_TORCH_NEWEST})
  set(${out} "" PARENT_SCOPE)
  if(NOT wanted AND NOT EXISTS ${target}/complete)
    return()
  endif()
  file(MAKE_DIRECTORY ${folder})
  file(LOCK ${target}.lock GUARD FUNCTION)
  # The paths of a virtual environment are fixed when it is made: no renaming here, but a mark when it is whole.
  if(NOT EXISTS ${target}/complete)
    file(REMOVE_RECURSE ${target})
    unset(python)
    find_program(python python3 PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
    if(python)
      execute_process(COMMAND ${python} -m venv ${target} RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
    endif()
    if(NOT python OR NOT result EQUAL 0)
      message(WARNING "lockstep: the Python package torch cannot be installed, so there are no comparisons with it and no CUDA: "
        "there is no python3 with venv (apt-get install python3-venv)")
      file(REMOVE_RECURSE ${target})
      return()
    endif()
    message(STATUS "lockstep: installing the Python package torch ${LOCKSTEP_TORCH_NEWEST}, for CUDA or for the comparisons "
      "with it, into ${target} (about 2.5 GB to download, 5 GB on disk)")
    string(TIMESTAMP start %s UTC)
    execute_process(COMMAND ${target}/bin/python -m pip --disable-pip-version-check install
      torch==${LOCKSTEP_TORCH_NEWEST} numpy RESULT_VARIABLE result)
    if(NOT result EQUAL 0)
      message(WARNING "lockstep: the Python package torch could not be installed (see above; is this machine online?), "
        "so there are no comparisons with it and no CUDA")
      file(REMOVE_RECURSE ${target})
      return()
    endif()
    _lockstep_install_compared(${target})
    string(TIMESTAMP end %s UTC)
    math(EXPR seconds "${end} - ${start}")
    execute_process(COMMAND du -sb ${target} OUTPUT_VARIABLE bytes)
    string(REGEX MATCH "^[0-9]+" bytes "${bytes}")
    _lockstep_thousands("${bytes}" bytes)
    message(STATUS "lockstep: installed the Python package torch ${LOCKSTEP_TORCH_NEWEST}: ${bytes} bytes on disk, "
      "${seconds} s")
    file(TOUCH ${target}/complete)
  elseif(wanted AND NOT LOCKSTEP_COMPARED_CHECKED STREQUAL LOCKSTEP_TORCHVISION)
    # An environment that an earlier version installed. Once for a build folder: each import takes seconds.
    _lockstep_install_compared(${target})
  endif()
  set(LOCKSTEP_COMPARED_CHECKED ${LOCKSTEP_TORCHVISION} CACHE INTERNAL "what was looked for in lockstep's own Python")
  file(GLOB package ${target}/lib/python3*/site-packages/torch)
  set(${out} "${package}" PARENT_SCOPE)
endfunction()

# The program that says which libtorch_cpu.so is loaded by `import torch`.
set(LOCKSTEP_WHICH_LIBTORCH [[
import os, torch
with open("/proc/self/maps") as maps:
    print(os.path.realpath({line.split()[-1] for line in maps if "/libtorch_cpu.so" in line}.pop()))
]])

# Sets LOCKSTEP_PYTHON to a python whose torch package loads LOCKSTEP_TORCH_LIBRARY, the given one if there is one, or
# to nothing with the reason in LOCKSTEP_PYTHON_MISSING. Importing torch takes seconds: done once for a pair of paths.
function(lockstep_find_python)
  set(candidates ${LOCKSTEP_PYTHON})
  if(NOT candidates)
    get_filename_component(prefix ${LOCKSTEP_TORCH_ROOT}/../../../.. ABSOLUTE)
    unset(python)
    find_program(python python3 PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
    cmake_path(APPEND prefix bin/python3 OUTPUT_VARIABLE beside)
    foreach(candidate IN ITEMS ${beside} ${python} /usr/bin/python3)
      if(EXISTS ${candidate})
        _lockstep_torch_of_python(${candidate} package)
        if(package)
          list(APPEND candidates ${candidate})
        endif()
      endif()
    endforeach()
    list(REMOVE_DUPLICATES candidates)
  endif()
  file(REAL_PATH ${LOCKSTEP_TORCH_LIBRARY} library)
  set(missing "no python3 here has the torch package of ${LOCKSTEP_TORCH_ROOT}")
  foreach(candidate IN LISTS candidates)
    if(LOCKSTEP_PYTHON_CHECKED STREQUAL "${candidate}|${library}")
      set(loaded ${library})
    else()
      execute_process(COMMAND ${candidate} -c "${LOCKSTEP_WHICH_LIBTORCH}"
        OUTPUT_VARIABLE loaded OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    if("${loaded}" STREQUAL "${library}")
      set(LOCKSTEP_PYTHON_CHECKED "${candidate}|${library}" CACHE INTERNAL "the python that was found to fit")
      set(LOCKSTEP_PYTHON ${candidate} PARENT_SCOPE)
      message(STATUS "lockstep: comparisons with Python run in ${candidate}")
      return()
    elseif("${loaded}" STREQUAL "")
      set(missing "the torch package of ${candidate} cannot be imported")
    else()
      set(missing "the torch package of ${candidate} loads ${loaded}, not ${library}")
    endif()
  endforeach()
  set(LOCKSTEP_PYTHON "" PARENT_SCOPE)
  set(LOCKSTEP_PYTHON_MISSING "${missing}" PARENT_SCOPE)
  message(WARNING "lockstep: the comparisons with Python are skipped: ${missing}. Configure with LOCKSTEP_WITH_PYTHON=ON "
    "and without another LibTorch to have one installed, or set LOCKSTEP_PYTHON to a python whose torch package is the "
    "LibTorch that is built against")
endfunction()
