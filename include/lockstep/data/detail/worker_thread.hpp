#pragma once

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace lockstep::detail {

/// Makes tensor operations that this thread calls single-threaded, for threads that load data during
/// training.
///
/// `at::set_num_threads` would affect the whole process: it stores a number that threads started later use.
/// OpenMP's own setting affects the calling thread only; its runtime is the one that LibTorch loaded.
inline void keep_math_on_this_thread() {
  at::get_num_threads();  // LibTorch initializes a thread at its first such call, and would undo the setting
  using SetThreads = void (*)(int);
  static const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads) set_threads(1);
}

}  // namespace lockstep::detail
