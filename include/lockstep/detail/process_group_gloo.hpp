#pragma once

// The one place that includes LibTorch's ProcessGroupGloo.hpp. It is exported by every LibTorch for Linux, but its
// header includes Gloo's, which none of them ships; the folder gloo_shim declares the names it mentions.

#ifdef GLOO_ERROR_MSG
#error \
    "lockstep: Gloo's own headers were included before lockstep's: a file that includes \
lockstep/comm/gloo_comm.hpp must not include <gloo/...>"
#endif

#if !__has_include(<gloo/context.h>)
#error \
    "lockstep: the folder lockstep/detail/gloo_shim is not on the include path: link the CMake target \
lockstep::lockstep, or add -I<lockstep's include folder>/lockstep/detail/gloo_shim"
#endif

#include <gloo/context.h>

#ifndef LOCKSTEP_DETAIL_GLOO_SHIM_CONTEXT
#error \
    "lockstep: <gloo/context.h> is Gloo's own here: put -I<lockstep's include \
folder>/lockstep/detail/gloo_shim before Gloo's include folder"
#endif

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#define LOCKSTEP_DETAIL_DEFINED_USE_C10D_GLOO
#endif

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#ifdef LOCKSTEP_DETAIL_DEFINED_USE_C10D_GLOO
#undef LOCKSTEP_DETAIL_DEFINED_USE_C10D_GLOO
#undef USE_C10D_GLOO
#endif

#ifndef LOCKSTEP_DETAIL_GLOO_SHIM_DEVICE
#error \
    "lockstep: ProcessGroupGloo.hpp was included earlier without USE_C10D_GLOO: include \
lockstep/comm/gloo_comm.hpp first, or define USE_C10D_GLOO on the command line"
#endif
