# The libraries beside LibTorch: the system's where they are found, else their own sources, pinned.
include_guard(GLOBAL)
include(FetchContent)

# find_package(NAME) whose imported targets the whole project sees; the keyword for it is new in CMake 3.24, and before
# it the targets that link them still do.
macro(_lockstep_find_package name)
  if(CMAKE_VERSION VERSION_LESS 3.24)
    find_package(${name} QUIET)
  else()
    find_package(${name} QUIET GLOBAL)
  endif()
endmacro()

# Fetches NAME with FetchContent, or sets OUT to the sentence that says why that cannot be done. FetchContent's own error
# would be git's output and a stack trace.
macro(_lockstep_fetch name out debian git tag)
  set(${out} "")
  string(TOLOWER ${name} _lower)
  string(TOUPPER ${name} _upper)
  # An enclosing project's declaration takes precedence over this one.
  get_property(_declared GLOBAL PROPERTY _FetchContent_${_lower}_savedDetails DEFINED)
  if(NOT _declared AND NOT FETCHCONTENT_SOURCE_DIR_${_upper} AND NOT FETCHCONTENT_FULLY_DISCONNECTED)
    find_program(_git git NO_CACHE)
    set(_result "git is not installed")
    if(_git)
      execute_process(COMMAND ${CMAKE_COMMAND} -E env GIT_TERMINAL_PROMPT=0 ${_git} ls-remote --exit-code ${git} ${tag}
        RESULT_VARIABLE _result OUTPUT_QUIET ERROR_QUIET TIMEOUT 30)
    endif()
    if(NOT _result EQUAL 0)
      set(${out} "${name} is not installed, and ${git} cannot be reached to fetch it: install it (on Debian: apt-get \
install ${debian}), or set FETCHCONTENT_SOURCE_DIR_${_upper} to a folder with the sources of ${name} ${tag}")
    endif()
    unset(_git)
  endif()
  if(NOT ${out})
    message(STATUS "lockstep: ${name} is not installed: fetching ${tag} from ${git}")
    set(_system SYSTEM)
    if(CMAKE_VERSION VERSION_LESS 3.25)
      set(_system "")
    endif()
    FetchContent_Declare(${name} GIT_REPOSITORY ${git} GIT_TAG ${tag} GIT_SHALLOW TRUE ${_system})
    FetchContent_MakeAvailable(${name})
  endif()
endmacro()

# lockstep_dependency(name TARGET t DEBIAN package GIT url TAG tag): find_package(name), else the sources. Either TARGET
# exists afterwards, or LOCKSTEP_MISSING is the sentence that says why not.
function(lockstep_dependency name)
  cmake_parse_arguments(arg "" "TARGET;DEBIAN;GIT;TAG" "" ${ARGN})
  set(LOCKSTEP_MISSING "" PARENT_SCOPE)
  if(TARGET ${arg_TARGET})
    return()
  endif()
  _lockstep_find_package(${name})
  if(TARGET ${arg_TARGET})
    message(STATUS "lockstep: ${name} ${${name}_VERSION} of the system")
    return()
  endif()
  _lockstep_fetch(${name} missing ${arg_DEBIAN} ${arg_GIT} ${arg_TAG})
  if(NOT missing AND NOT TARGET ${arg_TARGET})
    set(missing "the sources of ${name} made no target ${arg_TARGET}: install ${name} (on Debian: apt-get install \
${arg_DEBIAN}), or set FETCHCONTENT_SOURCE_DIR_${_upper} to a folder with the sources of ${name} ${arg_TAG}")
  endif()
  set(LOCKSTEP_MISSING "${missing}" PARENT_SCOPE)
endfunction()

# lockstep_optional(name TARGET t DEBIAN package FOR purpose): find_package(name), which a header on request needs; the
# target lockstep links it where it is found.
function(lockstep_optional name)
  cmake_parse_arguments(arg "" "TARGET;DEBIAN;FOR" "" ${ARGN})
  if(NOT TARGET ${arg_TARGET})
    _lockstep_find_package(${name})
  endif()
  if(TARGET ${arg_TARGET})
    message(STATUS "lockstep: ${name} of the system")
    target_link_libraries(lockstep INTERFACE $<BUILD_INTERFACE:${arg_TARGET}>)
  else()
    message(STATUS "lockstep: without ${name}, which ${arg_FOR} need (apt-get install ${arg_DEBIAN})")
  endif()
endfunction()

# The target lockstep::images, for programs that include lockstep/datasets/image_folder.hpp: lockstep, libjpeg and libpng. Where a
# library is missing there is no such target, and what links it is left out.
function(lockstep_images)
  _lockstep_find_package(JPEG)
  _lockstep_find_package(PNG)
  set(missing "")
  if(NOT TARGET JPEG::JPEG)
    list(APPEND missing libjpeg-dev)
  endif()
  if(NOT TARGET PNG::PNG)
    list(APPEND missing libpng-dev)
  endif()
  if(missing)
    list(JOIN missing " " missing)
    message(STATUS "lockstep: without lockstep::images, and the ImageNet example that needs it (apt-get install ${missing})")
    return()
  endif()
  message(STATUS "lockstep: libjpeg ${JPEG_VERSION} and libpng ${PNG_VERSION_STRING} of the system")
  add_library(lockstep_images INTERFACE)
  add_library(lockstep::images ALIAS lockstep_images)
  target_link_libraries(lockstep_images INTERFACE lockstep JPEG::JPEG PNG::PNG)
endfunction()
