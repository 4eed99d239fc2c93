# Run by ctest: PROGRAM with two ranks on one GPU, of which one is killed or stopped (FAULT). Checks the survivor's exception.
# The launcher continues no stopped process: `timeout` ends the group of processes once the survivor has spoken.
execute_process(COMMAND ${CMAKE_COMMAND} -E env NCCL_MULTI_RANK_GPU_ENABLE=1 LOCKSTEP_HEARTBEAT_TIMEOUT=10
  timeout --kill-after=10 90 ${PROGRAM} ${FAULT} --nproc 2 RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
message("${output}${error}")
if(output MATCHES "SKIPPED: ([^\n]*)")
  message("SKIPPED gpu_failure_${FAULT}: ${CMAKE_MATCH_1}")
  return()
endif()
if(NOT output MATCHES "survivor: PeerError after ([0-9]+) ms: [^\n]*rank 1")
  message(FATAL_ERROR "the survivor did not throw a PeerError that names rank 1")
endif()
if(CMAKE_MATCH_1 GREATER 20000)
  message(FATAL_ERROR "the survivor waited for ${CMAKE_MATCH_1} ms, longer than the timeout of its operations")
endif()
