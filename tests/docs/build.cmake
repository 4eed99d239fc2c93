# Run by ctest: builds the TARGETS made of the pages in BUILD, and prints which blocks are LEFT_OUT. The build has made them
# already, unless a page has changed since.
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BUILD} --target ${TARGETS} RESULT_VARIABLE result OUTPUT_VARIABLE output
  ERROR_VARIABLE output)
file(READ ${LEFT_OUT} left_out)
message("${left_out}")
if(NOT result EQUAL 0)
  message("${output}")
  message(FATAL_ERROR "a C++ block of a page does not compile: the lines above name the page and its line")
endif()
