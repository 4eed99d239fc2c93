# The target `docs` builds the API reference with Doxygen, where that is installed (Debian: doxygen), into build/docs/html.
find_program(LOCKSTEP_DOXYGEN doxygen)
set(LOCKSTEP_DOCS_FOLDER ${CMAKE_CURRENT_BINARY_DIR}/docs)
configure_file(docs/Doxyfile.in ${LOCKSTEP_DOCS_FOLDER}/Doxyfile @ONLY)
if(LOCKSTEP_DOXYGEN)
  add_custom_target(docs COMMAND ${LOCKSTEP_DOXYGEN} ${LOCKSTEP_DOCS_FOLDER}/Doxyfile VERBATIM)
endif()
