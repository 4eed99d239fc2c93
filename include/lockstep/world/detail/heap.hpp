#pragma once

#include <cstdlib>
#include <initializer_list>

#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

namespace lockstep::detail {

/// Lets the heap keep what a training step frees, since the next step asks for the same again. glibc gives
/// large blocks back to the system, whose pages must then be cleared and mapped anew: for the MNIST example's
/// network a thousand page faults a step, a tenth of its time. Does nothing where the user has set glibc's
/// own variables, or with another C library.
inline void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* name : {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"})
    if (std::getenv(name)) return;
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
#endif
}

}  // namespace lockstep::detail
