# Run by the target compute_sanitizer: each of the PROGRAMS, on one rank, under memcheck, racecheck, synccheck and initcheck. Stops
# at the first that reports an error. Says so where there is no compute-sanitizer, or no GPU.
find_program(sanitizer compute-sanitizer PATHS /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer)
if(NOT sanitizer)
  message("SKIPPED compute_sanitizer: there is no compute-sanitizer on PATH or in /usr/local/cuda (it comes with the CUDA toolkit)")
  return()
endif()
string(REPLACE "|" ";" PROGRAMS "${PROGRAMS}")
foreach(program IN LISTS PROGRAMS)
  get_filename_component(name ${program} NAME)
  foreach(tool IN ITEMS memcheck racecheck synccheck initcheck)
    message("compute-sanitizer --tool ${tool} ${name}")
    # Ranks are processes of their own. LibTorch's caching allocator would hide accesses past a tensor's end;
    # without it nothing can be allocated while a graph is captured.
    execute_process(COMMAND ${CMAKE_COMMAND} -E env PYTORCH_NO_CUDA_MEMORY_CACHING=1 ${sanitizer} --tool ${tool}
      --target-processes all --error-exitcode 99 ${program} --nproc 1 "~[capture]" RESULT_VARIABLE result)
    if(result EQUAL 77)
      return()  # the program has said what is missing
    elseif(NOT result EQUAL 0)
      message(FATAL_ERROR "compute-sanitizer --tool ${tool} ${program} --nproc 1 ended with ${result}: 99 means that the tool "
        "has found an error, any other number is the program's")
    endif()
  endforeach()
endforeach()
