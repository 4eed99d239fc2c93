include_guard(GLOBAL)

# lockstep_add_compiled(source headers): the target lockstep::compiled from compiled.cpp and the header-only target `headers`.
# It is built only where a target links it. The target is global, unlike imported ones: a second folder that calls
# find_package(lockstep) has it already.
function(lockstep_add_compiled source headers)
  if(TARGET lockstep_compiled)
    return()
  endif()
  add_library(lockstep_compiled STATIC EXCLUDE_FROM_ALL ${source})
  add_library(lockstep::compiled ALIAS lockstep_compiled)
  target_link_libraries(lockstep_compiled PUBLIC ${headers})
  target_compile_definitions(lockstep_compiled PUBLIC LOCKSTEP_COMPILED)
  set_target_properties(lockstep_compiled PROPERTIES POSITION_INDEPENDENT_CODE ON
    INTERFACE_LOCKSTEP_COMPILED ON COMPATIBLE_INTERFACE_BOOL LOCKSTEP_COMPILED)
endfunction()
