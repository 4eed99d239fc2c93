# Makes the target `lockstep_mpi` (lockstep::mpi): lockstep with the MPI library that CMake's FindMPI finds. That is the one of the
# mpicxx in MPI_HOME or in PATH. Used by the build (LOCKSTEP_MPI) and, installed beside it, by find_package(lockstep COMPONENTS mpi).
include_guard(GLOBAL)

# Makes lockstep_mpi, or sets LOCKSTEP_MPI_MISSING to what is not there.
function(lockstep_find_mpi)
  set(LOCKSTEP_MPI_MISSING "" PARENT_SCOPE)
  if(TARGET lockstep_mpi)
    return()
  endif()
  set(MPI_CXX_SKIP_MPICXX TRUE)  # the former bindings of C++
  find_package(MPI QUIET COMPONENTS CXX)
  if(NOT MPI_CXX_FOUND)
    set(LOCKSTEP_MPI_MISSING "there is no MPI library: install one (on Debian: apt-get install libopenmpi-dev), or set MPI_HOME to it"
      PARENT_SCOPE)
    return()
  endif()
  # Not FindMPI's own target, which other folders of a project do not see.
  add_library(lockstep_mpi INTERFACE IMPORTED GLOBAL)
  add_library(lockstep::mpi ALIAS lockstep_mpi)
  separate_arguments(flags NATIVE_COMMAND "${MPI_CXX_LINK_FLAGS}")
  target_include_directories(lockstep_mpi SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
  target_compile_options(lockstep_mpi INTERFACE ${MPI_CXX_COMPILE_OPTIONS})
  target_link_libraries(lockstep_mpi INTERFACE lockstep::lockstep ${MPI_CXX_LIBRARIES} ${flags})
  set_property(GLOBAL PROPERTY LOCKSTEP_MPIEXEC ${MPIEXEC_EXECUTABLE})  # of that library, for the tests
  list(GET MPI_CXX_LIBRARIES -1 library)
  message(STATUS "lockstep: MPI ${MPI_CXX_VERSION} (${library})")
endfunction()

# Makes lockstep_mpi as LOCKSTEP_MPI says.
macro(lockstep_mpi_as_chosen)
  string(TOUPPER "${LOCKSTEP_MPI}" LOCKSTEP_MPI_CHOICE)
  if(NOT LOCKSTEP_MPI_CHOICE MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "lockstep: LOCKSTEP_MPI is ${LOCKSTEP_MPI}, it must be AUTO, ON or OFF")
  endif()
  if(NOT LOCKSTEP_MPI_CHOICE STREQUAL "OFF")
    lockstep_find_mpi()
    if(NOT TARGET lockstep_mpi AND LOCKSTEP_MPI_CHOICE STREQUAL "ON")
      message(FATAL_ERROR "lockstep: LOCKSTEP_MPI is ON, but ${LOCKSTEP_MPI_MISSING}")
    elseif(NOT TARGET lockstep_mpi)
      message(STATUS "lockstep: without MPI: ${LOCKSTEP_MPI_MISSING}")
    endif()
  endif()
endmacro()
