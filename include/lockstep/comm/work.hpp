#pragma once

#include <chrono>
#include <concepts>
#include <exception>

namespace lockstep {

/// The handle of an asynchronous collective, as a communicator returns it.
///
/// 1. It is move-only and owns the tensors that take part until it is destroyed or waited for.
/// 2. `join_stream()` makes the results visible to whatever the caller issues next here: on a CPU it blocks
///    until they are there (under the communicator's deadline), on a GPU it makes the current stream wait,
///    without blocking the host.
/// 3. `wait_host()` blocks this thread until the collective is complete, `wait_host(d)` at most `d`. It
///    throws TimeoutError naming the collective and the ranks that are late, PeerError where another rank
///    failed.
/// 4. `error()` never blocks: null while it runs or where it succeeded.
/// 5. Destroying it without waiting neither blocks nor throws; the collective goes on.
template <class W>
concept AsyncWork = std::movable<W> && !std::copyable<W> &&
                    requires(W work, const W done, std::chrono::milliseconds deadline) {
  work.join_stream();
  work.wait_host();
  work.wait_host(deadline);
  { done.error() } -> std::same_as<std::exception_ptr>;
};

}  // namespace lockstep
