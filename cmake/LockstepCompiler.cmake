# How this project compiles its own tests, examples and benchmarks; nothing here reaches those who use the headers.
include_guard(GLOBAL)

# ccache, where it is installed. It looks through precompiled headers only when told that they may be trusted.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(LOCKSTEP_CCACHE ccache)
  if(LOCKSTEP_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${LOCKSTEP_CCACHE})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      add_compile_options(-fpch-preprocess)
    else()
      add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
    endif()
  endif()
endif()

# A program of the tests takes GNU ld seconds, of which there are many.
find_program(LOCKSTEP_MOLD mold)
if(LOCKSTEP_MOLD AND NOT LOCKSTEP_SANITIZE)
  add_link_options(-fuse-ld=mold)
endif()

# "address,undefined" or "thread"
if(LOCKSTEP_SANITIZE)
  add_compile_options(-fsanitize=${LOCKSTEP_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${LOCKSTEP_SANITIZE})
endif()

# Called after the dependencies that may be built from source, which are not held to this.
macro(lockstep_strict_warnings)
  add_compile_options(-Wall -Wextra -Wpedantic)
  # gcc's optimizer sees these in LibTorch's data loader and (gcc 14) in its autograd functions, inlined into our files,
  # where nothing is wrong.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-maybe-uninitialized -Wno-array-bounds)
  endif()
  if(LOCKSTEP_WERROR)
    add_compile_options(-Werror)
  endif()
endmacro()
