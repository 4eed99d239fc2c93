# Run by ctest: builds TARGET, which must not compile, and looks for the sentences EXPECT (with @@ between them) in what
# the compiler said.
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BUILD} --target ${TARGET}
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "${TARGET} compiled, and must not: it should say \"${EXPECT}\"")
endif()
string(REPLACE "@@" ";" sentences "${EXPECT}")
foreach(sentence IN LISTS sentences)
  string(FIND "${output}" "${sentence}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "${TARGET} fails to compile, but without the sentence \"${sentence}\":\n${output}")
  endif()
  message("${TARGET} does not compile, and says: ${sentence}")
endforeach()
