# Installs the headers and a package for find_package(lockstep). Nothing of it needs a LibTorch: that is looked for
# where the package is used, by the same code, which is installed along.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

set(LOCKSTEP_INSTALL_CMAKEDIR ${CMAKE_INSTALL_DATADIR}/cmake/lockstep CACHE STRING "Where the package of CMake is installed")
mark_as_advanced(LOCKSTEP_INSTALL_CMAKEDIR)
set(package ${LOCKSTEP_INSTALL_CMAKEDIR})
install(TARGETS lockstep EXPORT lockstepTargets)
install(DIRECTORY include/lockstep DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${package})
configure_package_config_file(cmake/lockstepConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake
  INSTALL_DESTINATION ${package} PATH_VARS CMAKE_INSTALL_INCLUDEDIR NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
  cmake/LockstepCompiled.cmake
  cmake/LockstepCuda.cmake
  cmake/LockstepMpi.cmake
  cmake/LockstepToolchain.cmake
  cmake/LockstepTorch.cmake
  cmake/LockstepTorchInspect.cmake
  cmake/LockstepTorchInstall.cmake
  cmake/LockstepTorchPython.cmake
  cmake/unpack_libtorch.py
  cmake/libtorch-x86_64.txt
  cmake/libtorch-aarch64.txt
  DESTINATION ${package})

# The file of pkg-config finds its prefix from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH LOCKSTEP_PC_PREFIX /${CMAKE_INSTALL_DATADIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" LOCKSTEP_PC_PREFIX ${LOCKSTEP_PC_PREFIX})
configure_file(cmake/lockstep.pc.in ${CMAKE_CURRENT_BINARY_DIR}/lockstep.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/lockstep.pc DESTINATION ${CMAKE_INSTALL_DATADIR}/pkgconfig)

install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(PROJECT_IS_TOP_LEVEL)
  install(FILES README.md CHANGELOG.md CONTRIBUTING.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
  install(DIRECTORY docs examples DESTINATION ${CMAKE_INSTALL_DOCDIR})
  # The prefix is that of `cmake --install --prefix`, which may be another than the one configured.
  install(CODE "
    set(SOURCE \"${CMAKE_CURRENT_SOURCE_DIR}\")
    get_filename_component(DOCS \"${CMAKE_INSTALL_DOCDIR}\" ABSOLUTE BASE_DIR \"\${CMAKE_INSTALL_PREFIX}\")
    get_filename_component(HEADERS \"${CMAKE_INSTALL_INCLUDEDIR}\" ABSOLUTE BASE_DIR \"\${CMAKE_INSTALL_PREFIX}\")
    get_filename_component(DOCS \"\$ENV{DESTDIR}\${DOCS}\" ABSOLUTE)
    get_filename_component(HEADERS \"\$ENV{DESTDIR}\${HEADERS}\" ABSOLUTE)
    include(\"${CMAKE_CURRENT_SOURCE_DIR}/cmake/LockstepInstallPages.cmake\")")
  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_NAME lockstep)
  set(CPACK_PACKAGE_FILE_NAME lockstep-${PROJECT_VERSION})
  set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_CURRENT_SOURCE_DIR}/LICENSE)
  include(CPack)
endif()
