#pragma once

// The first include of lockstep.hpp and ddp.hpp: an old compiler, an older C++ standard and a missing or old
// LibTorch are one sentence each, before the errors of templates.

#if defined(__clang__)
#if __clang_major__ < 14
#error \
    "lockstep: this clang++ is too old, lockstep needs clang++ 14 or g++ 11, or newer: compile with a newer \
one"
#endif
#elif defined(__GNUC__) && __GNUC__ < 11
#error \
    "lockstep: this g++ is too old, lockstep needs g++ 11 or clang++ 14, or newer: compile with a newer one"
#endif
#if __cplusplus < 202002L && (defined(__clang__) || __GNUC__ >= 11)
#error \
    "lockstep: the C++ standard is too old, lockstep needs C++20: compile with -std=c++20, or with CMake \
link lockstep::lockstep, which sets it"
#endif

#if !__has_include(<torch/version.h>)
#error \
    "lockstep: there is no LibTorch on the include path: add the folders include and \
include/torch/csrc/api/include of pip's torch package, Debian's libtorch-dev or an official zip, or with \
CMake set Torch_ROOT to it"
#else
#include <torch/version.h>
#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 6)
#error \
    "lockstep: this LibTorch is too old, lockstep needs 2.6 or newer: put a newer one on the include path, \
or with CMake set Torch_ROOT to it"
#endif
#endif
