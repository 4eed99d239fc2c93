# Run by ctest: runs PROGRAM once for each of RUNS, "number|arguments|place", in the empty folder SCRATCH, and compares what it
# prints with FOLDER/output_NUMBER.txt, the text that the page shows at `place`. Numbers with a decimal point depend on the
# processor: any number stands for any other.
file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
foreach(run IN LISTS RUNS)
  string(REPLACE "|" ";" run "${run}")
  list(GET run 0 number)
  list(GET run 1 arguments)
  list(GET run 2 place)
  separate_arguments(arguments UNIX_COMMAND "${arguments}")
  execute_process(COMMAND ${PROGRAM} ${arguments} WORKING_DIRECTORY ${SCRATCH} RESULT_VARIABLE result OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  file(READ ${FOLDER}/output_${number}.txt expected)
  message("${output}")
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "the program of ${place} ended with ${result}")
  endif()
  string(REGEX REPLACE "[0-9]+\\.[0-9]+" "#.#" shape "${output}")
  string(REGEX REPLACE "[0-9]+\\.[0-9]+" "#.#" expected_shape "${expected}")
  if(NOT shape STREQUAL expected_shape)
    message(FATAL_ERROR "${place} shows another output:\n${expected}")
  endif()
endforeach()
