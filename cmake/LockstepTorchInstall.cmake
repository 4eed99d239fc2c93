# Installs the CPU parts of the newest supported LibTorch with pip: the headers and libraries of the `torch` package,
# without its Python and CUDA parts, and the two small libraries that its libtorch_cpu.so is linked to.
include_guard(GLOBAL)

set(LOCKSTEP_TORCH_INSTALLER_FOLDER ${CMAKE_CURRENT_LIST_DIR})

# Sets OUT to a command that is pip: that of PYTHON, or of a virtual environment made in FOLDER (a Debian without
# python3-pip); to nothing where neither is to be had.
function(_lockstep_pip python folder out)
  set(${out} "" PARENT_SCOPE)
  execute_process(COMMAND ${python} -m pip --version RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
  if(result EQUAL 0)
    set(${out} ${python} -m pip PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${python} -m venv ${folder} RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
  if(result EQUAL 0)
    set(${out} ${folder}/bin/python -m pip PARENT_SCOPE)
  endif()
endfunction()

# The python3 on PATH and a pip for it, or an error that says what to install.
function(_lockstep_python_and_pip folder out_python out_pip)
  set(otherwise "or set CMAKE_PREFIX_PATH to a LibTorch of ${LOCKSTEP_TORCH_OLDEST} or newer")
  unset(python)
  find_program(python python3 PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  if(NOT python)
    message(FATAL_ERROR "lockstep: there is no LibTorch here, and no python3 to install one with. "
      "Install python3 and python3-venv (apt-get install python3-venv), ${otherwise}")
  endif()
  _lockstep_pip(${python} ${folder} pip)
  if(NOT pip)
    message(FATAL_ERROR "lockstep: there is no LibTorch here, and ${python} has neither pip nor venv to install one "
      "with. Install either (apt-get install python3-venv), ${otherwise}")
  endif()
  set(${out_python} ${python} PARENT_SCOPE)
  set(${out_pip} ${pip} PARENT_SCOPE)
endfunction()

# "1,234,567"
function(_lockstep_thousands number out)
  string(REGEX REPLACE "^([0-9][0-9]?[0-9]?)(([0-9][0-9][0-9])*)$" "\\1" head "${number}")
  string(REGEX REPLACE "^[0-9][0-9]?[0-9]?(([0-9][0-9][0-9])*)$" "\\1" tail "${number}")
  string(REGEX REPLACE "([0-9][0-9][0-9])" ",\\1" tail "${tail}")
  set(${out} "${head}${tail}" PARENT_SCOPE)
endfunction()

# Sets OUT to the folder of LibTorch in FOLDER/libtorch-<version>, installing it where it is not there yet. It is put
# together beside that folder and renamed when whole, so that an interrupted one is never taken.
function(lockstep_torch_install folder out)
  set(target ${folder}/libtorch-${LOCKSTEP_TORCH_NEWEST})
  set(${out} ${target}/torch PARENT_SCOPE)
  file(MAKE_DIRECTORY ${folder})
  file(LOCK ${target}.lock GUARD FUNCTION)
  if(EXISTS ${target}/torch)
    return()
  endif()
  set(requirements ${LOCKSTEP_TORCH_INSTALLER_FOLDER}/libtorch-${CMAKE_HOST_SYSTEM_PROCESSOR}.txt)
  if(NOT EXISTS ${requirements})
    message(FATAL_ERROR "lockstep: no LibTorch can be installed for ${CMAKE_HOST_SYSTEM_PROCESSOR} (only for x86_64 and "
      "aarch64): set CMAKE_PREFIX_PATH to one")
  endif()

  set(work ${target}.part)
  file(REMOVE_RECURSE ${work})
  file(MAKE_DIRECTORY ${work})
  _lockstep_python_and_pip(${work}/pip python pip)
  message(STATUS "lockstep: no LibTorch here: installing the CPU parts of ${LOCKSTEP_TORCH_NEWEST} into ${target} "
    "(about 550 MB to download, 505 MB on disk)")
  string(TIMESTAMP start %s UTC)
  # Always the wheel of one Python version, whichever runs here: only its C++ parts are used.
  set(platforms)
  foreach(tag IN ITEMS manylinux_2_28 manylinux_2_25 manylinux_2_17 manylinux2014)
    list(APPEND platforms --platform ${tag}_${CMAKE_HOST_SYSTEM_PROCESSOR})
  endforeach()
  execute_process(COMMAND ${pip} --disable-pip-version-check download --no-deps --only-binary=:all: --require-hashes
    --implementation cp --python-version 3.11 ${platforms} --dest ${work}/wheels --requirement ${requirements}
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "lockstep: LibTorch could not be downloaded by pip (see above). Is this machine online? Run the "
      "same command again when it is, or set CMAKE_PREFIX_PATH to a LibTorch of ${LOCKSTEP_TORCH_OLDEST} or newer")
  endif()
  file(GLOB wheels ${work}/wheels/*)
  set(bytes 0)
  foreach(wheel IN LISTS wheels)
    file(SIZE ${wheel} size)
    math(EXPR bytes "${bytes} + ${size}")
  endforeach()
  message(STATUS "lockstep: unpacking the headers and CPU libraries")
  execute_process(COMMAND ${python} ${LOCKSTEP_TORCH_INSTALLER_FOLDER}/unpack_libtorch.py ${work}/libtorch ${wheels}
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    file(REMOVE_RECURSE ${work})
    message(FATAL_ERROR "lockstep: LibTorch could not be unpacked (see above); is the disk full?")
  endif()
  file(RENAME ${work}/libtorch ${target})
  file(REMOVE_RECURSE ${work})
  string(TIMESTAMP end %s UTC)
  math(EXPR seconds "${end} - ${start}")
  _lockstep_thousands(${bytes} bytes)
  message(STATUS "lockstep: installed LibTorch ${LOCKSTEP_TORCH_NEWEST}: ${bytes} bytes downloaded, ${seconds} s")
endfunction()
