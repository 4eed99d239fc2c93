#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"

namespace lockstep::inline v0_1 {

/// One bucket of gradients. Its address is stable from the launch of its reduction until the end of the wait.
struct GradientBucket {
  /// Zero-based position in launch order, and the number of buckets.
  std::int64_t index = 0, count = 1;
  std::int64_t iteration = 0;  ///< number of reductions completed before this one
  /// [n]: this rank's gradients, concatenated. Receives the average over the ranks.
  at::Tensor flat;
  /// One view of `flat` for each parameter, in bucket order. An element of a complex parameter is two
  /// elements of `flat`, which is real.
  std::vector<at::Tensor> gradients;
  /// Indices of the parameters in the model, the same on every rank.
  std::vector<std::size_t> parameters;
};

using HookState = std::vector<std::pair<std::string, at::Tensor>>;  ///< names and tensors

/// A reduction in flight: a communicator's Work, or a hook's own type. Exactly one call of `wait` or
/// `synchronize` completes it; the bucket then holds the average over the ranks. Both throw as the functions
/// of a Work do. Destroying a Reduction that was not waited for neither blocks nor throws.
template <class R>
concept Reduction = std::move_constructible<R> && requires(R& reduction, std::chrono::milliseconds timeout) {
  reduction.wait();
  reduction.synchronize(timeout);
};

/// The algorithm that averages the gradients of a bucket over the ranks.
///
/// 1. `predivides`: gradients are multiplied by 1 / size while they are copied into the bucket, so that a sum
///    is the average. Python's plain reduction does so; its hooks do not.
/// 2. `propagates_nan`: a NaN in flat[i] on any rank makes flat[i] NaN on every rank, which signals missing
///    gradients. Without this promise the ranks exchange it by one further 4-byte collective. With it, a wait
///    that throws on one rank aborts the communicator, since other ranks may hold valid averages.
/// 3. `start(comm, bucket)` launches the exchange and returns a Reduction. It is called in bucket order,
///    which is the same on every rank, and never for an empty bucket. The Reductions are waited for in the
///    same order, after all buckets have been started: a second phase of collectives belongs in the wait.
///    Neither hook nor bucket moves until then, so a Reduction may point to both.
/// 4. `name()` is the name in reports. `wire_bytes()` counts the bytes of the tensors that this rank has
///    passed to collectives so far, regardless of how often a collective sends them; none in a group of one.
/// 5. Optional: a static `ranks_diverge` of true declares that ranks get different gradients. A Trainer then
///    does not compare their parameters.
/// 6. Optional: `settings()` returns the options that must be equal on every rank; the constructor of
///    DistributedDataParallel compares them.
///
/// Counterpart: DistributedDataParallel.register_comm_hook.
template <class H, class Comm>
concept CommunicationHook = std::move_constructible<H> && Communicator<Comm> &&
    requires(H& hook, const H& counted, Comm& comm, const GradientBucket& bucket) {
  { H::predivides } -> std::convertible_to<bool>;
  { H::propagates_nan } -> std::convertible_to<bool>;
  { hook.start(comm, bucket) } -> Reduction;
  { counted.name() } -> std::convertible_to<std::string_view>;
  { counted.wire_bytes() } -> std::convertible_to<std::int64_t>;
};

/// A communication hook that keeps state between reductions.
///
/// 1. `state()` returns a copy of the state, and `load_state` restores it to the same bits. The state may differ
///    between ranks. An optional static `shared_state(state)` returns the part that is equal on every rank,
///    which a run resumed with another number of ranks loads.
/// 2. `rollback()` reverts the changes of the last reduction, for a skipped step or a backward that threw. A
///    second call without a reduction in between is a no-op. Never called with a Reduction in flight.
/// 3. `reset()` is called when the buckets change. It discards state kept by bucket; state kept by parameter
///    may remain.
template <class H>
concept StatefulHook = requires(H& hook, const H& saved, const HookState& state) {
  { saved.state() } -> std::same_as<HookState>;
  hook.load_state(state);
  hook.rollback();
  hook.reset();
};

namespace detail {
/// Returns the bytes that a collective over `tensor` adds to wire_bytes(): none in a group of one.
template <class Comm>
std::int64_t sent_bytes(const Comm& comm, const at::Tensor& tensor) {
  return comm.size() > 1 ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

/// Implements `wait` and `synchronize` for a Reduction of several collectives. `Derived::finish(wait)` calls
/// `wait(work)` for each Work in turn. The timeout of `synchronize` covers all of them together.
template <class Derived>
struct PhasedReduction {
  void wait() {
    static_cast<Derived*>(this)->finish([](auto& work) { work.wait(); });
  }
  void synchronize(std::chrono::milliseconds timeout) {
    using std::chrono::milliseconds;
    const auto until = std::chrono::steady_clock::now() + timeout;
    static_cast<Derived*>(this)->finish([until](auto& work) {
      const auto left = std::chrono::ceil<milliseconds>(until - std::chrono::steady_clock::now());
      work.synchronize(std::max(milliseconds(0), left));
    });
  }
};

}  // namespace detail

/// The default hook: sums predivided gradients. Bitwise equal to Python's DDP without a hook.
class AllReduceHook {
 public:
  static constexpr bool predivides = true;
  static constexpr bool propagates_nan = true;
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <Communicator Comm>
  typename Comm::Work start(Comm& comm, const GradientBucket& bucket) {
    wire_bytes_ += detail::sent_bytes(comm, bucket.flat);
    return comm.all_reduce(bucket.flat, ReduceOp::sum);
  }

  [[nodiscard]] std::string_view name() const { return "all_reduce"; }
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

 private:
  std::int64_t wire_bytes_ = 0;
};

namespace detail {

/// A Reduction that is complete already.
struct FinishedReduction {
  void wait() const noexcept {}
  void synchronize(std::chrono::milliseconds) const noexcept {}
};

}  // namespace detail

/// Leaves each rank its own, undivided gradients, to measure a step without gradient communication. Not for
/// training. The ranks still exchange a few bytes that report a failed rank. Counterpart: noop_hook.
struct NoOpHook {
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;
  static constexpr bool ranks_diverge = true;
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <Communicator Comm>
  detail::FinishedReduction start(Comm&, const GradientBucket&) {
    return {};
  }
  [[nodiscard]] std::string_view name() const { return "no_op"; }
  [[nodiscard]] std::int64_t wire_bytes() const { return 0; }
};

/// See `hook_of`.
template <class Function>
class FunctionHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;

  explicit FunctionHook(Function function, std::string name = "function")
      : function_(std::move(function)), name_(std::move(name)) {}

  template <Communicator Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    static_assert(std::invocable<Function&, Comm&, const GradientBucket&>,
                  "lockstep: a hook function takes (auto& comm, const GradientBucket& bucket)");
    wire_bytes_ += detail::sent_bytes(comm, bucket.flat);
    using Result = std::invoke_result_t<Function&, Comm&, const GradientBucket&>;
    if constexpr (std::is_void_v<Result>) {
      function_(comm, bucket);
      return detail::FinishedReduction{};
    } else {
      static_assert(Reduction<Result>, "lockstep: a hook function returns a Work to wait for, or nothing");
      return function_(comm, bucket);
    }
  }

  [[nodiscard]] std::string_view name() const { return name_; }
  /// Returns the bytes of all elements of all buckets, whatever the function sends.
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

  [[nodiscard]] Function& function() { return function_; }

  [[nodiscard]] HookState state() const requires StatefulHook<Function> { return function_.state(); }
  void load_state(const HookState& state) requires StatefulHook<Function> { function_.load_state(state); }
  void rollback() requires StatefulHook<Function> { function_.rollback(); }
  void reset() requires StatefulHook<Function> { function_.reset(); }
  [[nodiscard]] static HookState shared_state(HookState state) requires requires {
    Function::shared_state(std::move(state));
  }
  { return Function::shared_state(std::move(state)); }

 private:
  Function function_;
  std::string name_;
  std::int64_t wire_bytes_ = 0;
};

/// Makes a CommunicationHook of a function `function(auto& comm, const GradientBucket& bucket)`. The function
/// either writes the average over the ranks to `bucket.flat` and returns nothing, or returns a Work (or
/// another Reduction) upon whose completion `bucket.flat` holds it.
///
///     auto hook = hook_of([](auto& comm, const GradientBucket& bucket) {
///       bucket.flat.div_(comm.size());
///       return comm.all_reduce(bucket.flat);
///     });
///
/// Gradients are not predivided, as in Python. An exception that the function throws must be thrown on every
/// rank. The hook of a function object that models StatefulHook models StatefulHook. For collectives in several
/// phases, write a class that models CommunicationHook.
///
/// Counterpart: DistributedDataParallel.register_comm_hook.
template <class Function>
[[nodiscard]] FunctionHook<Function> hook_of(Function function, std::string name = "function") {
  return FunctionHook<Function>(std::move(function), std::move(name));
}

}  // namespace lockstep::inline v0_1
