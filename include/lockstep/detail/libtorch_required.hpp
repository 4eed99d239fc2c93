#pragma once

// The first include of lockstep.hpp and ddp.hpp: a missing or old LibTorch is one sentence.

#if !__has_include(<torch/version.h>)
#error \
    "lockstep: there is no LibTorch on the include path: add the folders include and include/torch/csrc/api/include of pip's torch package, Debian's libtorch-dev or an official zip, or with CMake set Torch_ROOT to it"
#else
#include <torch/version.h>
#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 6)
#error \
    "lockstep: this LibTorch is too old, lockstep needs 2.6 or newer: put a newer one on the include path, or with CMake set Torch_ROOT to it"
#endif
#endif
