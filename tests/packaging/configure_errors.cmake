# Run by ctest: configures lockstep where something that it needs is missing or too old. Each error is one sentence that names
# it and the remedies, and comes without a stack trace of FetchContent. Without any LibTorch a project configures, and its build
# ends with the sentence. TORCH: a LibTorch that can be used.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH}/user ${SCRATCH}/finds)
file(WRITE ${SCRATCH}/user/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(user LANGUAGES CXX)
add_subdirectory(${SOURCE} lockstep)
")
file(WRITE ${SCRATCH}/finds/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(user LANGUAGES CXX)
find_package(lockstep REQUIRED)
")

# No network: every connection is refused.
set(offline ${CMAKE_COMMAND} -E env http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 ALL_PROXY=http://127.0.0.1:9)
set(common -G ${GENERATOR} -DLOCKSTEP_FETCH_TORCH=OFF)
set(usable -DCMAKE_CXX_COMPILER=${COMPILER} -DTorch_ROOT=${TORCH})

# expect(SENTENCE FOLDER ARGS): configuring FOLDER fails and says SENTENCE, line breaks aside.
function(expect sentence folder)
  file(REMOVE_RECURSE ${SCRATCH}/build)
  execute_process(COMMAND ${offline} ${CMAKE_COMMAND} ${common} -S ${folder} -B ${SCRATCH}/build ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " text "${output}")
  string(FIND "${text}" "${sentence}" position)
  if(result EQUAL 0 OR position EQUAL -1)
    message(FATAL_ERROR "configuring ${folder} with ${ARGN} ended with ${result} and did not say '${sentence}':\n${output}")
  endif()
  if(output MATCHES "FetchContent.cmake|Traceback")
    message(FATAL_ERROR "configuring ${folder} with ${ARGN} shows a stack trace:\n${output}")
  endif()
  string(REGEX MATCHALL "CMake Error" errors "${output}")
  list(LENGTH errors count)
  if(NOT count EQUAL 1)
    message(FATAL_ERROR "configuring ${folder} with ${ARGN} ended with ${count} errors:\n${output}")
  endif()
endfunction()

# The installed package, which needs no LibTorch to be installed.
execute_process(COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${SCRATCH}/lockstep -DCMAKE_CXX_COMPILER=${COMPILER}
  -DLOCKSTEP_BUILD_TESTS=OFF -DLOCKSTEP_BUILD_EXAMPLES=OFF -DCMAKE_INSTALL_PREFIX=${SCRATCH}/prefix
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${SCRATCH}/lockstep OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
set(installed ${SCRATCH}/finds -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)

# Two folders of one project that each find it.
file(WRITE ${SCRATCH}/folders/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(folders LANGUAGES CXX)
add_subdirectory(first)
add_subdirectory(second)
")
foreach(folder IN ITEMS first second)
  file(WRITE ${SCRATCH}/folders/${folder}/CMakeLists.txt "find_package(lockstep REQUIRED OPTIONAL_COMPONENTS images)
add_executable(${folder} ../main.cpp)
target_link_libraries(${folder} PRIVATE lockstep::compiled)
add_executable(${folder}_headers ../main.cpp)
target_link_libraries(${folder}_headers PRIVATE lockstep::lockstep)
")
endforeach()
file(WRITE ${SCRATCH}/folders/main.cpp "int main() {}\n")
execute_process(COMMAND ${CMAKE_COMMAND} ${common} ${usable} -S ${SCRATCH}/folders -B ${SCRATCH}/folders/build
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "two folders that call find_package(lockstep) do not configure:\n${output}")
endif()

set(fmt_url https://github.com/fmtlib/fmt.git)
expect("lockstep: fmt is not installed, and ${fmt_url} cannot be reached to fetch it: install it (on Debian: apt-get install \
libfmt-dev), or set FETCHCONTENT_SOURCE_DIR_FMT to a folder with the sources of fmt 10.2.1"
  ${SCRATCH}/user ${usable} -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON)
expect("lockstep: the tests need ZLIB::ZLIB (apt-get install zlib1g-dev nlohmann-json3-dev), or set LOCKSTEP_BUILD_TESTS=OFF"
  ${SOURCE} ${usable} -DCMAKE_DISABLE_FIND_PACKAGE_ZLIB=ON)
expect("lockstep: Catch2 is not installed, and https://github.com/catchorg/Catch2.git cannot be reached to fetch it: install it \
(on Debian: apt-get install catch2), or set FETCHCONTENT_SOURCE_DIR_CATCH2 to a folder"
  ${SOURCE} ${usable} -DCMAKE_DISABLE_FIND_PACKAGE_Catch2=ON)
expect("lockstep: CLI11 is not installed, and https://github.com/CLIUtils/CLI11.git cannot be reached to fetch it: install it \
(on Debian: apt-get install libcli11-dev), or set FETCHCONTENT_SOURCE_DIR_CLI11 to a folder"
  ${SOURCE} ${usable} -DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON -DLOCKSTEP_BUILD_TESTS=OFF)
expect("lockstep: fmt is not installed: install it (on Debian: apt-get install libfmt-dev), or set fmt_DIR to the folder of its \
fmt-config.cmake" ${installed} ${usable} -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON)

# A LibTorch that is too old, and a folder without one.
file(WRITE ${SCRATCH}/old/include/torch/csrc/api/include/torch/version.h "#define TORCH_VERSION_MAJOR 2
#define TORCH_VERSION_MINOR 5
#define TORCH_VERSION_PATCH 1
")
foreach(way IN ITEMS user installed)
  set(project ${SCRATCH}/user)
  if(way STREQUAL "installed")
    set(project ${installed})
  endif()
  expect("lockstep: the given LibTorch cannot be used: LibTorch 2.5.1 in ${SCRATCH}/old is too old, lockstep needs 2.6 or newer: \
set Torch_ROOT to another one, or leave it to lockstep to find or install one (LOCKSTEP_FETCH_TORCH=ON)"
    ${project} -DCMAKE_CXX_COMPILER=${COMPILER} -DTorch_ROOT=${SCRATCH}/old)
  expect("lockstep: Torch_ROOT is ${SCRATCH}/user, but there is no LibTorch: set it to the folder that holds LibTorch's include/ and \
lib/, or leave it to lockstep" ${project} -DCMAKE_CXX_COMPILER=${COMPILER} -DTorch_ROOT=${SCRATCH}/user)
endforeach()

# The Torch_ROOT of the environment at the first configure is that of the later ones.
file(REMOVE_RECURSE ${SCRATCH}/build)
foreach(environment IN ITEMS Torch_ROOT=${TORCH} --unset=Torch_ROOT Torch_ROOT=${SCRATCH}/old)
  execute_process(COMMAND ${offline} --unset=CMAKE_PREFIX_PATH --unset=Torch_DIR ${environment} ${CMAKE_COMMAND} ${common}
    -DCMAKE_CXX_COMPILER=${COMPILER} -S ${SCRATCH}/user -B ${SCRATCH}/build
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(FIND "${output}" "of CMAKE_PREFIX_PATH, Torch_DIR or Torch_ROOT: ${TORCH}\n" position)
  if(NOT result EQUAL 0 OR position EQUAL -1)
    message(FATAL_ERROR "configuring with ${environment} after Torch_ROOT=${TORCH} ended with ${result}:\n${output}")
  endif()
endforeach()

# A LibTorch that is too old without CMake.
file(WRITE ${SCRATCH}/old.cpp "#include \"lockstep/detail/libtorch_version.hpp\"\n")
execute_process(COMMAND ${COMPILER} -std=c++20 -E -I${SOURCE}/include -I${SCRATCH}/old/include/torch/csrc/api/include
  ${SCRATCH}/old.cpp -o ${SCRATCH}/old.i RESULT_VARIABLE result ERROR_VARIABLE output)
if(result EQUAL 0 OR NOT output MATCHES "lockstep: this LibTorch is too old, lockstep needs 2.6 or newer: put a newer one on")
  message(FATAL_ERROR "the headers accept LibTorch 2.5.1: ${output}")
endif()
file(WRITE ${SCRATCH}/none.cpp "#include \"lockstep/lockstep.hpp\"\n")
if(NOT EXISTS /usr/include/torch)
  execute_process(COMMAND ${COMPILER} -std=c++20 -fsyntax-only -I${SOURCE}/include -I${SOURCE}/include/lockstep/detail/gloo_shim ${SCRATCH}/none.cpp
    RESULT_VARIABLE result ERROR_VARIABLE output)
  string(REGEX MATCHALL "error: " errors "${output}")
  list(LENGTH errors count)
  # The sentence, and the first include of LibTorch, at which the compiler stops.
  if(result EQUAL 0 OR NOT count EQUAL 2 OR NOT output MATCHES "lockstep: there is no LibTorch on the include path: add the folders")
    message(FATAL_ERROR "the headers without LibTorch ended with ${result} and ${count} errors:\n${output}")
  endif()
endif()

# A forgotten -std=c++20 and a compiler that is too old, without CMake: the first error says so. The versions are macros that only
# pretend to be those of another compiler.
foreach(case IN ITEMS
  "g++|-std=c++17|the C++ standard is too old, lockstep needs C++20: compile with -std=c++20"
  "clang++|-std=c++17|the C++ standard is too old, lockstep needs C++20: compile with -std=c++20"
  "g++|-std=c++20 -U__GNUC__ -D__GNUC__=10|this g++ is too old, lockstep needs g++ 11 or clang++ 14, or newer"
  "clang++|-std=c++20 -U__clang_major__ -D__clang_major__=13|this clang++ is too old, lockstep needs clang++ 14 or g++ 11, or newer")
  string(REPLACE "|" ";" case "${case}")
  list(GET case 0 name)
  list(GET case 1 flags)
  list(GET case 2 sentence)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  unset(program)
  find_program(program ${name} NO_CACHE)
  if(NOT program)
    message("SKIPPED configure_errors in part: there is no ${name}")
    continue()
  endif()
  foreach(header IN ITEMS lockstep ddp)
    file(WRITE ${SCRATCH}/first_error.cpp "#include \"lockstep/${header}.hpp\"\n")
    execute_process(COMMAND ${program} ${flags} -fsyntax-only -I${SOURCE}/include -I${SOURCE}/include/lockstep/detail/gloo_shim ${SCRATCH}/first_error.cpp
      RESULT_VARIABLE result ERROR_VARIABLE output)
    string(REGEX MATCH "error: [^\n]*" first "${output}")
    string(FIND "${first}" "lockstep: ${sentence}" position)
    if(result EQUAL 0 OR position EQUAL -1)
      message(FATAL_ERROR "${name} ${flags} and ${header}.hpp ended with ${result}, and did not first say '${sentence}':\n${output}")
    endif()
  endforeach()
endforeach()

# A compiler that is too old: one that says so.
foreach(pair IN ITEMS "__GNUC__:10:g++" "__clang_major__:13:clang++")
  string(REPLACE ":" ";" pair ${pair})
  list(GET pair 0 macro)
  list(GET pair 1 version)
  list(GET pair 2 name)
  unset(program)
  find_program(program ${name} NO_CACHE)
  if(NOT program)
    message("SKIPPED configure_errors in part: there is no ${name}")
    continue()
  endif()
  set(old ${SCRATCH}/old_${name})
  file(WRITE ${old} "#!/bin/sh\nexec ${program} -U${macro} -D${macro}=${version} \"$@\"\n")
  file(CHMOD ${old} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  set(sentence "and lockstep needs g++ 11 or clang++ 14, or newer: install one, and name it with -DCMAKE_CXX_COMPILER")
  expect(${sentence} ${SCRATCH}/user -DCMAKE_CXX_COMPILER=${old} -DTorch_ROOT=${TORCH})
  expect(${sentence} ${installed} -DCMAKE_CXX_COMPILER=${old} -DTorch_ROOT=${TORCH})
endforeach()

# No LibTorch at all: none in /usr, and a python3 without torch and pip.
file(WRITE ${SCRATCH}/no_torch/python3 "#!/bin/sh\nexit 1\n")
file(CHMOD ${SCRATCH}/no_torch/python3 PERMISSIONS OWNER_READ OWNER_EXECUTE)
file(WRITE ${SCRATCH}/program/main.cpp "#include \"lockstep/ddp.hpp\"\nint main() {}\n")

# without_torch(NAME SENTENCE LINES ARGS): a program of a project that has lockstep by LINES configures with a warning, and its
# build ends before a file is compiled. Both say SENTENCE.
function(without_torch name sentence lines)
  file(REMOVE_RECURSE ${SCRATCH}/build)
  file(WRITE ${SCRATCH}/program/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(program LANGUAGES CXX)
${lines}
foreach(library IN ITEMS lockstep compiled)
  add_executable(with_\${library} main.cpp)
  target_link_libraries(with_\${library} PRIVATE lockstep::\${library})
endforeach()
")
  set(hidden ${offline} --unset=CMAKE_PREFIX_PATH --unset=Torch_ROOT --unset=Torch_DIR PATH=${SCRATCH}/no_torch:$ENV{PATH})
  execute_process(COMMAND ${hidden} ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SCRATCH}/program -B ${SCRATCH}/build
    -DCMAKE_CXX_COMPILER=${COMPILER} ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  execute_process(COMMAND ${hidden} ${CMAKE_COMMAND} --build ${SCRATCH}/build
    RESULT_VARIABLE build_result OUTPUT_VARIABLE build_output ERROR_VARIABLE build_output)
  foreach(text IN ITEMS output build_output)
    string(REGEX REPLACE "[ \n]+" " " words "${${text}}")
    string(FIND "${words}" "lockstep: no LibTorch 2.6 or newer was found (looked in" position)
    string(FIND "${words}" "${sentence}" remedies)
    if(position EQUAL -1 OR remedies EQUAL -1)
      message(FATAL_ERROR "${name} without LibTorch does not say '${sentence}':\n${${text}}")
    endif()
  endforeach()
  string(REGEX MATCHALL "[Ee]rror[: ]" errors "${build_output}")
  list(FILTER errors EXCLUDE REGEX "Error $")
  if(NOT result EQUAL 0 OR build_result EQUAL 0 OR errors OR output MATCHES "CMake Error")
    message(FATAL_ERROR "${name} without LibTorch: configuring ended with ${result}, building with ${build_result}:\n${output}\n\
${build_output}")
  endif()
endfunction()
if(EXISTS /usr/include/torch)
  message("SKIPPED configure_errors in part: there is a LibTorch in /usr")
else()
  set(remedies "set Torch_ROOT to one, or install one (apt-get install libtorch-dev, or pip install torch)")
  set(fetch ", or set LOCKSTEP_FETCH_TORCH=ON to let CMake install one with pip")
  without_torch(find_package "${remedies}${fetch}" "find_package(lockstep REQUIRED)" -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
  without_torch(add_subdirectory "no_torch/python3 has neither pip nor venv to install one with (apt-get install python3-venv)): \
${remedies}" "add_subdirectory(${SOURCE} lockstep)")
  without_torch(FetchContent "${remedies}${fetch}" "include(FetchContent)
FetchContent_Declare(lockstep SOURCE_DIR ${SOURCE})
FetchContent_MakeAvailable(lockstep)" -DLOCKSTEP_FETCH_TORCH=OFF)
endif()

# A CMake that is too old reads the first lines of CMakeLists.txt, and the installed package.
file(WRITE ${SCRATCH}/old_finds/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(user LANGUAGES CXX)
set(CMAKE_VERSION 3.18.4)
find_package(lockstep REQUIRED)
")
expect("lockstep: CMake 3.18.4 is too old, lockstep needs 3.22 or newer: install a newer one (pip install cmake), or compile with"
  ${SCRATCH}/old_finds ${usable} -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
file(WRITE ${SCRATCH}/old_cmake.cmake "set(CMAKE_VERSION 3.18.4)\ninclude(${SOURCE}/CMakeLists.txt)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -P ${SCRATCH}/old_cmake.cmake RESULT_VARIABLE result ERROR_VARIABLE output)
string(REGEX REPLACE "[ \n]+" " " output "${output}")
if(result EQUAL 0 OR NOT output MATCHES "lockstep: CMake 3.18.4 is too old, lockstep needs 3.22 or newer: install a newer one")
  message(FATAL_ERROR "an old CMake is not refused: ${output}")
endif()
