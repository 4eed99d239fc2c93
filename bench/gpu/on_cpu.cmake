# Runs run.py on CPUs and looks at what it has written.
file(REMOVE_RECURSE ${OUT})
file(MAKE_DIRECTORY ${OUT})
execute_process(COMMAND ${PYTHON} ${DRIVER} ${CONFIG} --device cpu --models gpt --precisions fp32 --rounds 1 --steps 3
  --write ${OUT}/gpu.md --picture ${OUT}/step.svg RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "run.py ended with ${result}")
endif()
file(READ ${OUT}/gpu.md page)
foreach(line IN ITEMS "| gpt \\| fp32 \\| 2 \\| lockstep \\| [0-9.]+ " "| gpt \\| fp32 \\| 2 \\| Python DDP \\| [0-9.]+ "
    "| gpt \\| fp32 \\| 2 \\| lockstep over ProcessGroupComm \\| [0-9.]+ "
    "| gpt \\| [0-9.]+ \\([0-9.]+-[0-9.]+\\) \\| [0-9.]+ " "| all_reduce \\| 1,048,576 \\| [0-9.]+ \\| [0-9.]+ \\|"
    "| lockstep \\| [0-9.]+ \\| [0-9.]+ \\| [0-9]+% \\| [0-9.]+" "captured: a captured step needs a GPU" "One step")
  if(NOT page MATCHES "${line}")
    message(FATAL_ERROR "the page has no line that matches ${line}:\n${page}")
  endif()
endforeach()
file(READ ${OUT}/step.svg picture)
string(REGEX MATCHALL "<title>" spans "${picture}")
list(LENGTH spans count)
if(count LESS 50)
  message(FATAL_ERROR "the picture has ${count} spans")
endif()
