# Run by ctest: builds TARGET, which must not compile, and looks for the sentence EXPECT in what the compiler said.
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BUILD} --target ${TARGET}
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "${TARGET} compiled, and must not: it should say \"${EXPECT}\"")
endif()
string(FIND "${output}" "${EXPECT}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "${TARGET} fails to compile, but without the sentence \"${EXPECT}\":\n${output}")
endif()
message("${TARGET} does not compile, and says: ${EXPECT}")
