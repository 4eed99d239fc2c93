# The functions of vcpkg that the portfile of lockstep calls, for a machine without vcpkg. Run with -P: PORTFILE, PACKAGES
# (the folder to install into), BUILDTREE, GENERATOR and COMPILER.
cmake_minimum_required(VERSION 3.22)
set(PORT lockstep)
set(CURRENT_PACKAGES_DIR ${PACKAGES})

function(vcpkg_run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(arg "" "SOURCE_PATH" "OPTIONS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS OR NOT VCPKG_BUILD_TYPE STREQUAL "release")
    message(FATAL_ERROR "vcpkg_cmake_configure: unknown arguments ${arg_UNPARSED_ARGUMENTS}, or a debug build")
  endif()
  vcpkg_run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${arg_SOURCE_PATH} -B ${BUILDTREE} -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_INSTALL_PREFIX=${PACKAGES} ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
  vcpkg_run(${CMAKE_COMMAND} --build ${BUILDTREE} --target install)
endfunction()

# Without arguments these two rewrite files that already lie in share/PORT and share/pkgconfig.
function(vcpkg_cmake_config_fixup)
  if(ARGN OR NOT EXISTS ${PACKAGES}/share/${PORT}/lockstepConfig.cmake)
    message(FATAL_ERROR "vcpkg_cmake_config_fixup: there is no share/${PORT}/lockstepConfig.cmake")
  endif()
endfunction()

function(vcpkg_fixup_pkgconfig)
  if(ARGN OR NOT EXISTS ${PACKAGES}/share/pkgconfig/lockstep.pc)
    message(FATAL_ERROR "vcpkg_fixup_pkgconfig: there is no share/pkgconfig/lockstep.pc")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(arg "" "" "FILE_LIST" ${ARGN})
  file(INSTALL ${arg_FILE_LIST} DESTINATION ${PACKAGES}/share/${PORT} RENAME copyright)
endfunction()

include(${PORTFILE})
