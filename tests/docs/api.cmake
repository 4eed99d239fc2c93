# Run by ctest: builds the API reference with DOXYGEN and the Doxyfile in FOLDER, which fails at any warning, and lists what has no
# comment. Members of classes may do without one; classes, concepts, enums and functions at namespace scope may not. A deduction
# guide is no function, nor is a macro of LibTorch.
execute_process(COMMAND ${DOXYGEN} ${FOLDER}/Doxyfile RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0 OR output MATCHES "warning:|error:")
  message("${output}")
  message(FATAL_ERROR "the API reference has faults, listed above")
endif()
file(GLOB pages ${FOLDER}/html/*lockstep*.html)
list(LENGTH pages count)
if(count LESS 200)
  message(FATAL_ERROR "the reference has ${count} pages only: Doxygen has not found the headers")
endif()

file(READ ${FOLDER}/Doxyfile settings)
file(WRITE ${FOLDER}/Doxyfile.undocumented "${settings}
EXTRACT_ALL = NO
WARN_IF_UNDOCUMENTED = YES
WARN_AS_ERROR = NO
OUTPUT_DIRECTORY = ${FOLDER}/undocumented
")
execute_process(COMMAND ${DOXYGEN} ${FOLDER}/Doxyfile.undocumented OUTPUT_VARIABLE output ERROR_VARIABLE output)
string(REPLACE ";" "," output "${output}")
string(REPLACE "\n" ";" lines "${output}")
set(members 0)
set(faults 0)
foreach(line IN LISTS lines)
  if(line MATCHES "\\) of (class|struct|concept) ")
    math(EXPR members "${members} + 1")
  elseif(line MATCHES "is not documented" AND NOT line MATCHES " -> |TORCH_MODULE_IMPL")
    message("${line}")
    math(EXPR faults "${faults} + 1")
  endif()
endforeach()
message("${count} pages; ${members} members of classes have no comment of their own")
if(faults GREATER 0)
  message(FATAL_ERROR "${faults} public names, listed above, have no comment")
endif()
