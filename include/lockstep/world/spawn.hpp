#pragma once

#include <functional>
#include <utility>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {
/// Does what spawn() does.
void spawn_processes(int nproc, const std::function<void(int rank, int nproc)>& fn, Prefix prefix);
}  // namespace lockstep::detail

namespace lockstep {

/// Starts `nproc` processes of this program, runs `fn(rank, nproc)` in each, and blocks until all have ended.
/// There is no rendezvous; `fn` may call `World::join` or `World::from_environment`. Output lines, signals
/// and exits are handled as by `launch`. Throws UsageError if `nproc` is not positive, ProcessError if a
/// process failed. An uncaught ProcessError is printed on one line and ends the program with the failed
/// process's exit code.
/// Counterpart: torch.multiprocessing.spawn.
///
/// Each process starts this program again with the same arguments, so main runs up to this call there too.
/// With several calls, each process skips the calls before its own, runs its own and ends with it.
template <class Fn>
void spawn(int nproc, Fn&& fn, Prefix prefix = Prefix::automatic) {
  detail::spawn_processes(
      nproc, [&](int rank, int size) { fn(rank, size); }, prefix);
}

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/spawn-inl.hpp"
#endif
