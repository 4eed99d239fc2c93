# Run by ctest: uses lockstep as a user of the way WAY would, with the LibTorch in TORCH. Builds a program and runs it on two
# ranks. The way plain_include leaves the program in SCRATCH as main.i, preprocessed, and main.o, compiled. COMPILED: that folder.
# With it another way preprocesses the program, which finds all headers and must give the same tokens, links that main.o, which
# finds all libraries, and runs it: to compile the same tokens once more would show nothing.
# Whatever does not compile a user's code is done by run_without_torch.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGV " " line)
    message(FATAL_ERROR "${line}\n${output}\nended with ${result}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${SCRATCH})

# run_without_torch(COMMAND ...): run where no LibTorch can be found or fetched: no variable names one, the python3 on PATH has
# neither torch nor pip, and every connection is refused. A LibTorch in /usr, which cannot be hidden, stays.
file(WRITE ${SCRATCH}/no_torch/python3 "#!/bin/sh\nexit 1\n")
file(CHMOD ${SCRATCH}/no_torch/python3 PERMISSIONS OWNER_READ OWNER_EXECUTE)
function(run_without_torch)
  run(${CMAKE_COMMAND} -E env --unset=CMAKE_PREFIX_PATH --unset=Torch_ROOT --unset=Torch_DIR --unset=PYTHONPATH
    http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 ALL_PROXY=http://127.0.0.1:9
    PATH=${SCRATCH}/no_torch:$ENV{PATH} ${ARGV})
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(run_on_two_ranks program sentence)
  run(${program} --nproc 2)
  message("${output}")
  if(NOT output MATCHES "${sentence}")
    message(FATAL_ERROR "${program} ran, but did not say ${sentence}")
  endif()
endfunction()

set(equal_gradients "2 ranks, their gradients are equal")

# check_same_tokens(PREPROCESSED): the program as this way's headers give it is the one that plain_include compiled.
function(check_same_tokens preprocessed)
  run(${python3} ${SOURCE}/tests/packaging/same_tokens.py ${COMPILED}/main.i ${preprocessed})
  message("${output}")
endfunction()

# configure_and_build(FOLDER ARGS): a project with the targets program, headers and libraries.
function(configure_and_build folder)
  set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -S ${folder} -B ${SCRATCH}/build -DCMAKE_CXX_COMPILER=${COMPILER}
    -DLOCKSTEP_FETCH_TORCH=OFF ${ARGN})
  if(COMPILED)
    # -std=c++20, as main.o was compiled, and not gnu++20.
    run(${CMAKE_COMMAND} -E env LOCKSTEP_COMPILED_PROGRAM=${COMPILED}/main.o ${configure} -DCMAKE_CXX_EXTENSIONS=OFF)
    run(${CMAKE_COMMAND} --build ${SCRATCH}/build --target headers libraries)
    check_same_tokens(${SCRATCH}/build/CMakeFiles/headers.dir/main.cpp.o)
    run_on_two_ranks(${SCRATCH}/build/libraries ${equal_gradients})
  else()
    run(${configure})
    run(${CMAKE_COMMAND} --build ${SCRATCH}/build --target program)
    run_on_two_ranks(${SCRATCH}/build/program ${equal_gradients})
  endif()
endfunction()

# compile(FLAGS LINK): main.cpp without CMake.
function(compile flags link)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  separate_arguments(link UNIX_COMMAND "${link}")
  set(compiler ${COMPILER} -std=c++20 ${flags} ${SCRATCH}/project/main.cpp)
  run(${compiler} -E -o ${SCRATCH}/main.i)
  if(COMPILED)
    check_same_tokens(${SCRATCH}/main.i)
    set(object ${COMPILED}/main.o)
  else()
    set(object ${SCRATCH}/main.o)
    run(${compiler} -c -o ${object})
  endif()
  run(${COMPILER} ${object} -o ${SCRATCH}/program ${link})
  run_on_two_ranks(${SCRATCH}/program ${equal_gradients})
endfunction()

function(install_lockstep)
  run_without_torch(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${SCRATCH}/lockstep -DCMAKE_CXX_COMPILER=${COMPILER}
    -DLOCKSTEP_BUILD_TESTS=OFF -DLOCKSTEP_BUILD_EXAMPLES=OFF -DCMAKE_INSTALL_PREFIX=${SCRATCH}/prefix)
  run_without_torch(${CMAKE_COMMAND} --install ${SCRATCH}/lockstep)
endfunction()

# check_links(FOLDER): every relative link of a page in FOLDER leads to a file.
function(check_links folder)
  set(count 0)
  file(GLOB_RECURSE pages ${folder}/*.md)
  foreach(page IN LISTS pages)
    get_filename_component(beside ${page} DIRECTORY)
    file(READ ${page} text)
    # CMake's lists do not take a "]" alone. A lambda of a C++ block, such as [&](auto& net), has a space.
    string(REPLACE "](" "\nlink " text "${text}")
    string(REGEX MATCHALL "\nlink [^ \n#);]+[#)]" links "${text}")
    foreach(link IN LISTS links)
      string(REGEX REPLACE "\nlink |[#)]" "" link "${link}")
      if(NOT link MATCHES "^https?:")
        math(EXPR count "${count} + 1")
        if(NOT EXISTS ${beside}/${link})
          message(SEND_ERROR "${page} has a link to ${link}, which is not there")
        endif()
      endif()
    endforeach()
  endforeach()
  message("${count} links of the pages in ${folder} lead to files")
  if(count LESS 200)
    message(FATAL_ERROR "too few links were found: the pattern is wrong, or pages are missing")
  endif()
endfunction()

find_program(python3 python3)
if(NOT python3)
  set(COMPILED "")  # to compile it here is the same, and takes longer
endif()
file(MAKE_DIRECTORY ${SCRATCH}/project)
set(test_package ${SOURCE}/packaging/conan/test_package)
file(COPY ${test_package}/main.cpp ${test_package}/foreign_errors.cpp ${test_package}/CMakeLists.txt DESTINATION ${SCRATCH}/project)
file(READ ${test_package}/CMakeLists.txt project)

# The folder of an unpacked official zip: libraries beside each other in lib/, all that libtorch_cpu.so needs among them.
if(NOT TORCH STREQUAL "/usr")
  file(MAKE_DIRECTORY ${SCRATCH}/libtorch/lib)
  file(CREATE_LINK ${TORCH}/include ${SCRATCH}/libtorch/include SYMBOLIC)
  file(CREATE_LINK ${TORCH}/share ${SCRATCH}/libtorch/share SYMBOLIC)
  file(GLOB libraries ${TORCH}/lib/*.so* ${TORCH}/../nvidia/*/lib/libcudart.so* ${TORCH}/../nvidia/*/lib/libcupti.so*)
  foreach(library IN LISTS libraries)
    get_filename_component(name ${library} NAME)
    file(CREATE_LINK ${library} ${SCRATCH}/libtorch/lib/${name} SYMBOLIC)
  endforeach()
  set(zip ${SCRATCH}/libtorch)
else()
  set(zip /usr)
endif()

set(torch_flags "")
foreach(folder IN LISTS TORCH_INCLUDES)
  if(NOT folder STREQUAL "/usr/include")
    string(APPEND torch_flags " -isystem ${folder}")
  endif()
endforeach()
get_filename_component(libraries ${TORCH_LIBRARY} DIRECTORY)
set(torch_link "-L${libraries} -Wl,-rpath,${libraries} -Wl,--allow-shlib-undefined -ltorch_cpu -lc10 -lz -pthread")

if(WAY STREQUAL "plain_include")
  compile("-I${SOURCE}/include -I${SOURCE}/include/lockstep/detail/gloo_shim -DFMT_HEADER_ONLY ${torch_flags}" "${torch_link}")

elseif(WAY STREQUAL "single_header")
  if(NOT python3)
    message("SKIPPED consumer_${WAY}: there is no python3")
    return()
  endif()
  file(READ ${SCRATCH}/project/main.cpp text)
  string(REPLACE "lockstep/ddp.hpp" "lockstep.hpp" text "${text}")
  file(WRITE ${SCRATCH}/project/main.cpp "${text}")
  # Equal to lockstep.hpp with all that it includes: as one file beside the folder gloo/, and as one file for one LibTorch.
  set(flags "-std=c++20 -DFMT_HEADER_ONLY ${torch_flags}")
  separate_arguments(flags UNIX_COMMAND "${flags}")
  file(WRITE ${SCRATCH}/many.cpp "#include \"lockstep/lockstep.hpp\"\n")
  file(WRITE ${SCRATCH}/one.cpp "#include \"lockstep.hpp\"\n")
  run(${COMPILER} ${flags} -I${SOURCE}/include -I${SOURCE}/include/lockstep/detail/gloo_shim -E ${SCRATCH}/many.cpp -o ${SCRATCH}/many.i)
  foreach(kind IN ITEMS "" "--torch;${zip}")
    file(REMOVE_RECURSE ${SCRATCH}/all)
    # -S: without the site-packages, and with them torch.
    run_without_torch(${python3} -S ${SOURCE}/packaging/amalgamate.py ${kind} ${SCRATCH}/all)
    run(${COMPILER} ${flags} -I${SCRATCH}/all -E ${SCRATCH}/one.cpp -o ${SCRATCH}/one.i)
    run(${python3} ${SOURCE}/tests/packaging/same_tokens.py ${SCRATCH}/many.i ${SCRATCH}/one.i)
    message("${output}")
    if(NOT COMPILED)
      compile("-I${SCRATCH}/all -DFMT_HEADER_ONLY ${torch_flags}" "${torch_link}")
    endif()
  endforeach()
  if(COMPILED)
    # The program was compiled with the part of lockstep that it uses.
    run(${python3} ${SOURCE}/packaging/amalgamate.py --torch ${zip} ${SCRATCH}/ddp lockstep/ddp.hpp)
    compile("-I${SCRATCH}/ddp -DFMT_HEADER_ONLY ${torch_flags}" "${torch_link}")
  endif()

elseif(WAY STREQUAL "add_subdirectory")
  string(REPLACE "find_package(lockstep REQUIRED)" "add_subdirectory(${SOURCE} lockstep)" project "${project}")
  file(WRITE ${SCRATCH}/project/CMakeLists.txt "${project}")
  configure_and_build(${SCRATCH}/project -DTorch_ROOT=${zip})

elseif(WAY STREQUAL "fetch_content")
  find_program(git git)
  if(NOT git)
    message("SKIPPED consumer_${WAY}: there is no git")
    return()
  endif()
  # A repository with a tag, of the files as they are here.
  foreach(part IN ITEMS CMakeLists.txt cmake include docs examples packaging README.md CHANGELOG.md LICENSE)
    file(COPY ${SOURCE}/${part} DESTINATION ${SCRATCH}/repository)
  endforeach()
  set(git ${git} -C ${SCRATCH}/repository -c user.name=lockstep -c user.email=lockstep@localhost -c init.defaultBranch=main)
  run(${git} init --quiet)
  run(${git} add --all)
  run(${git} commit --quiet -m "The files of the release")
  run(${git} tag v0.1.0)
  # The lines of the page, with the path of that repository.
  file(READ ${SOURCE}/docs/packaging.md page)
  string(REGEX MATCH "include\\(FetchContent\\)\n[^`]*FetchContent_MakeAvailable\\(lockstep\\)\n" lines "${page}")
  string(REGEX REPLACE "GIT_REPOSITORY [^ )\n]+" "GIT_REPOSITORY ${SCRATCH}/repository" with_path "${lines}")
  if(NOT lines OR with_path STREQUAL lines)
    message(FATAL_ERROR "docs/packaging.md shows no FetchContent with a GIT_REPOSITORY")
  endif()
  string(REPLACE "find_package(lockstep REQUIRED)\n" "${with_path}" project "${project}")
  file(WRITE ${SCRATCH}/project/CMakeLists.txt "${project}")
  configure_and_build(${SCRATCH}/project -DTorch_ROOT=${TORCH})

elseif(WAY STREQUAL "find_package")
  install_lockstep()
  run_without_torch(${CMAKE_COMMAND} -E chdir ${SCRATCH}/lockstep cpack)
  file(GLOB package ${SCRATCH}/lockstep/lockstep-*.tar.gz)
  if(NOT package)
    message(FATAL_ERROR "cpack made no package")
  endif()
  # The pages as they are installed, staged for another prefix, and packed.
  run_without_torch(${CMAKE_COMMAND} -E env DESTDIR=${SCRATCH}/stage ${CMAKE_COMMAND} --install ${SCRATCH}/lockstep --prefix /opt/lockstep)
  file(ARCHIVE_EXTRACT INPUT ${package} DESTINATION ${SCRATCH}/packed)
  get_filename_component(packed ${package} NAME)
  string(REPLACE ".tar.gz" "" packed ${packed})
  foreach(folder IN ITEMS prefix stage/opt/lockstep packed/${packed})
    check_links(${SCRATCH}/${folder}/share/doc/lockstep)
  endforeach()
  file(GLOB_RECURSE installed ${SCRATCH}/prefix/*.cmake ${SCRATCH}/prefix/*.pc)
  foreach(file IN LISTS installed)
    file(READ ${file} text)
    foreach(path IN ITEMS ${SOURCE} ${SCRATCH} ${TORCH})
      string(FIND "${text}" "${path}" position)
      if(NOT position EQUAL -1 AND NOT path STREQUAL "/usr")
        message(FATAL_ERROR "${file} names ${path}, which is of this machine alone")
      endif()
    endforeach()
  endforeach()
  foreach(file IN ITEMS README.md CHANGELOG.md LICENSE docs/packaging.md docs/headers.md examples/five_lines.cpp)
    if(NOT EXISTS ${SCRATCH}/prefix/share/doc/lockstep/${file})
      message(FATAL_ERROR "${file} was not installed")
    endif()
  endforeach()
  # What was compiled with the headers here was compiled with those that are installed.
  run(diff -r ${SOURCE}/include/lockstep ${SCRATCH}/prefix/include/lockstep)
  if(COMPILED)
    configure_and_build(${SCRATCH}/project -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix -DTorch_ROOT=${TORCH})
    return()
  endif()
  # The program of the README, header-only and with the functions of lockstep in an object of their own.
  file(READ ${SOURCE}/README.md readme)
  string(REGEX MATCH "```cpp\n([^`]*)```" block "${readme}")
  if(NOT block)
    message(FATAL_ERROR "README.md shows no program")
  endif()
  file(WRITE ${SCRATCH}/project/main.cpp "${CMAKE_MATCH_1}")
  file(WRITE ${SCRATCH}/project/CMakeLists.txt "cmake_minimum_required(VERSION 3.22)
project(program LANGUAGES CXX)
find_package(lockstep 0.1 REQUIRED)
add_executable(program main.cpp)
target_link_libraries(program PRIVATE lockstep::lockstep)
file(WRITE without_gloo.cpp \"#if __has_include(<gloo/context.h>)\\n#error Gloo\\n#endif\\n\")
add_executable(compiled main.cpp without_gloo.cpp)
target_link_libraries(compiled PRIVATE lockstep::compiled)
")
  run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SCRATCH}/project -B ${SCRATCH}/build -DCMAKE_CXX_COMPILER=${COMPILER}
    -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix -DTorch_ROOT=${TORCH} -DLOCKSTEP_FETCH_TORCH=OFF)
  run(${CMAKE_COMMAND} --build ${SCRATCH}/build)
  run_on_two_ranks(${SCRATCH}/build/program "loss 0\\.0000 after 640 steps on 2 ranks")
  run_on_two_ranks(${SCRATCH}/build/compiled "loss 0\\.0000 after 640 steps on 2 ranks")

elseif(WAY STREQUAL "pkg_config")
  find_program(pkg_config NAMES pkg-config pkgconf)
  if(NOT pkg_config)
    message("SKIPPED consumer_${WAY}: there is no pkg-config")
    return()
  endif()
  install_lockstep()
  file(RENAME ${SCRATCH}/prefix ${SCRATCH}/moved)
  set(pkg_config ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${SCRATCH}/moved/share/pkgconfig ${pkg_config}
    --define-variable=torch=${zip} lockstep)
  file(STRINGS ${SOURCE}/CMakeLists.txt version REGEX "^project\\(lockstep VERSION")
  string(REGEX REPLACE ".*VERSION ([0-9.]+).*" "\\1" version "${version}")
  run_without_torch(${pkg_config} --modversion)
  string(STRIP "${output}" output)
  if(NOT output STREQUAL version)
    message(FATAL_ERROR "pkg-config says version ${output}, not ${version}")
  endif()
  run_without_torch(${pkg_config} --cflags)
  string(STRIP "${output}" flags)
  run_without_torch(${pkg_config} --libs)
  string(STRIP "${output}" link)
  compile("${flags}" "${link}")

elseif(WAY STREQUAL "conan")
  if(NOT EXISTS ${CONAN}/bin/conan AND python3)
    execute_process(COMMAND ${python3} -m venv ${CONAN} OUTPUT_QUIET ERROR_QUIET)
    execute_process(COMMAND ${CONAN}/bin/python -m pip --disable-pip-version-check --quiet install "conan>=2.1,<3" TIMEOUT 200
      OUTPUT_QUIET ERROR_QUIET)
  endif()
  if(NOT EXISTS ${CONAN}/bin/conan)
    message("SKIPPED consumer_${WAY}: there is no python3 with venv, or pip cannot install Conan (is this machine online?)")
    return()
  endif()
  # No remote: fmt and zlib are the system's.
  set(conan ${CMAKE_COMMAND} -E env CONAN_HOME=${SCRATCH}/home CXX=${COMPILER} Torch_ROOT=${TORCH} ${CONAN}/bin/conan)
  run(${conan} profile detect)
  file(WRITE ${SCRATCH}/profile "include(default)
[settings]
compiler.cppstd=20
[platform_requires]
fmt/9.1.0
zlib/1.2.13
[conf]
tools.cmake.cmaketoolchain:generator=${GENERATOR}
tools.cmake.cmake_layout:test_folder=${SCRATCH}/test_package
")
  set(arguments --no-remote --profile:all ${SCRATCH}/profile)
  # Packed without a LibTorch; its test_package needs one.
  set(without_torch ${conan})
  list(FILTER without_torch EXCLUDE REGEX "Torch_ROOT=")
  run_without_torch(${without_torch} create ${SOURCE} ${arguments} --test-folder=)
  if(COMPILED)
    # Debug: a Release defines NDEBUG, and main.o was compiled without.
    run(${CMAKE_COMMAND} -E env LOCKSTEP_COMPILED_PROGRAM=${COMPILED}/main.o ${conan} create ${SOURCE} ${arguments}
      --settings:all build_type=Debug --conf:all "user.lockstep:targets=['headers', 'libraries']")
    message("${output}")
    file(GLOB_RECURSE preprocessed ${SCRATCH}/test_package/main.cpp.o)
    check_same_tokens(${preprocessed})
    file(GLOB_RECURSE program ${SCRATCH}/test_package/libraries)
    run_on_two_ranks(${program} ${equal_gradients})
  else()
    run(${conan} create ${SOURCE} ${arguments})
    message("${output}")
    if(NOT output MATCHES ${equal_gradients})
      message(FATAL_ERROR "the test_package did not run on two ranks")
    endif()
    # With a libtorch of Conan's: a package of the LibTorch here. Its headers and libraries are found, and none other.
    file(WRITE ${SCRATCH}/libtorch_recipe/conanfile.py "from conan import ConanFile
import os
class Libtorch(ConanFile):
    name = 'libtorch'
    version = '2.6.0'
    def package(self):
        os.symlink('${TORCH}/include', os.path.join(self.package_folder, 'include'))
        os.symlink('${libraries}', os.path.join(self.package_folder, 'lib'))
")
    list(TRANSFORM conan REPLACE "Torch_ROOT=.*" "PATH=${SCRATCH}/no_python:$ENV{PATH}")
    file(WRITE ${SCRATCH}/no_python/python3 "#!/bin/sh\nexit 1\n")
    file(CHMOD ${SCRATCH}/no_python/python3 PERMISSIONS OWNER_READ OWNER_EXECUTE)
    run(${conan} create ${SCRATCH}/libtorch_recipe ${arguments})
    run(${conan} create ${SOURCE} ${arguments} --options:all "lockstep/*:libtorch=True"
      --conf:all "user.lockstep:targets=['headers', 'libraries']")
    message("${output}")
    if(NOT output MATCHES "LibTorch [0-9.]+ of CMAKE_PREFIX_PATH, Torch_DIR or Torch_ROOT")
      message(FATAL_ERROR "the libtorch of Conan was not found")
    endif()
  endif()

elseif(WAY STREQUAL "vcpkg")
  run_without_torch(${CMAKE_COMMAND} -DPORTFILE=${SOURCE}/packaging/vcpkg/lockstep/portfile.cmake -DPACKAGES=${SCRATCH}/packages
    -DBUILDTREE=${SCRATCH}/lockstep -DGENERATOR=${GENERATOR} -DCOMPILER=${COMPILER} -P ${SOURCE}/tests/packaging/vcpkg_stub.cmake)
  foreach(file IN ITEMS usage copyright)
    if(NOT EXISTS ${SCRATCH}/packages/share/lockstep/${file})
      message(FATAL_ERROR "the port installs no share/lockstep/${file}")
    endif()
  endforeach()
  configure_and_build(${SCRATCH}/project -DCMAKE_PREFIX_PATH=${SCRATCH}/packages -DTorch_ROOT=${TORCH})

else()
  message(FATAL_ERROR "there is no way ${WAY}")
endif()
