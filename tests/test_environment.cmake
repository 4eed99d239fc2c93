# Read by ctest before it runs the tests (see CMakeLists.txt).
if(NOT DEFINED ENV{OMP_WAIT_POLICY})
  set(ENV{OMP_WAIT_POLICY} PASSIVE)
endif()
