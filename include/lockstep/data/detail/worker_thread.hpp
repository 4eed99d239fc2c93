#pragma once

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace lockstep::detail {

/// Lets tensor operations on this thread run on it alone, for threads that load data while others train.
///
/// `at::set_num_threads` would do it for the whole process: it stores a number that threads started later
/// take up. OpenMP's own setting holds for the calling thread only; its runtime is the one that LibTorch
/// brought along.
inline void keep_math_on_this_thread() {
  at::get_num_threads();  // LibTorch sets a thread up at its first such call, and would undo what follows
  using SetThreads = void (*)(int);
  static const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads) set_threads(1);
}

}  // namespace lockstep::detail
