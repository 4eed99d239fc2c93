#pragma once

#include <cstdlib>
#include <initializer_list>

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace lockstep::detail {

/// Makes the heap keep memory that a training step frees, since the next step allocates the same blocks
/// again. glibc returns large blocks to the system, whose pages must then be cleared and mapped again: for
/// the MNIST example's network a thousand page faults per step, a tenth of its time. No-op if the user has
/// set glibc's own variables, or with another C library.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"})
    if (std::getenv(name)) return;
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the maximum in glibc
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

}  // namespace lockstep::detail
