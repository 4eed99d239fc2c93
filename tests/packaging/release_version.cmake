# Run by ctest: every place that names the version of lockstep names that of CMakeLists.txt.
cmake_minimum_required(VERSION 3.25)
file(STRINGS ${SOURCE}/CMakeLists.txt line REGEX "^project\\(lockstep VERSION")
string(REGEX REPLACE ".*VERSION ([0-9.]+).*" "\\1" version "${line}")
string(REPLACE "." "\\." pattern "${version}")

# names(FILE REGEX): FILE has a line that matches REGEX, in which VERSION stands for the version.
function(names file regex)
  string(REPLACE VERSION ${pattern} regex "${regex}")
  file(STRINGS ${SOURCE}/${file} lines REGEX "${regex}")
  if(NOT lines)
    message(SEND_ERROR "${file} has no line ${regex}")
  endif()
endfunction()
names(CHANGELOG.md "^## VERSION( |$)")
names(packaging/vcpkg/lockstep/vcpkg.json "\"version\": \"VERSION\"")
names(docs/packaging.md "GIT_TAG vVERSION")
names(README.md "vVERSION")
names(packaging/tag.txt "^lockstep VERSION$")
