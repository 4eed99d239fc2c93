# Installs the headers and a package for find_package(lockstep). Nothing of it needs a LibTorch: that is looked for
# where the package is used, by the same code, which is installed along.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package ${CMAKE_INSTALL_DATADIR}/cmake/lockstep)
install(TARGETS lockstep EXPORT lockstepTargets FILE_SET HEADERS)
install(FILES include/lockstep/compiled.cpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/lockstep)
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
  cmake/LockstepTorch.cmake
  cmake/LockstepTorchInspect.cmake
  cmake/LockstepTorchInstall.cmake
  cmake/LockstepTorchPython.cmake
  cmake/unpack_libtorch.py
  cmake/libtorch-x86_64.txt
  cmake/libtorch-aarch64.txt
  DESTINATION ${package})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR TGZ)
  set(CPACK_PACKAGE_NAME lockstep)
  set(CPACK_PACKAGE_FILE_NAME lockstep-${PROJECT_VERSION})
  set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_CURRENT_SOURCE_DIR}/LICENSE)
  include(CPack)
endif()
