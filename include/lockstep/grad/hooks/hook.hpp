#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/same_options.hpp"

namespace lockstep {

/// One bucket of gradients on its way over the ranks. It stays where it is from the start of its reduction
/// until that was waited for.
struct GradientBucket {
  /// Its place in the order of the reductions, from 0, and the number of buckets in use: those of the first
  /// reduction are others than those of the later ones.
  std::size_t index = 0, count = 1;
  /// Reductions of all gradients that were begun before this one.
  std::size_t iteration = 0;
  /// [n]: this rank's gradients, one after the other. The average over the ranks goes here.
  at::Tensor flat;
  /// The same memory as one tensor for each parameter, in the bucket's order. Of a complex one each element
  /// is two of `flat`, which is real.
  std::vector<at::Tensor> gradients;
  /// The indices of these parameters in the model, the same on every rank.
  std::vector<std::size_t> parameters;
};

/// What a hook was made with, by name, in words.
using HookSettings = detail::NamedOptions;

/// What a hook keeps from step to step, by name.
using HookState = std::vector<std::pair<std::string, at::Tensor>>;

/// A reduction under way: the Work of a communicator, or a hook's own. It is waited for once, by either call;
/// then the average over the ranks lies in the bucket. It throws as Work does. Destroyed without being waited
/// for, it neither blocks nor throws.
template <class R>
concept Reduction = std::move_constructible<R> && requires(R& reduction, std::chrono::milliseconds timeout) {
  reduction.wait();
  reduction.synchronize(timeout);
};

/// How the gradients of a bucket become their average over the ranks.
///
/// 1. `predivides`: gradients are multiplied by 1 / size while they are copied into the bucket, so that a
///    sum is the average. Python's plain reduction does so, and its hooks do not.
/// 2. `propagates_nan`: a not-a-number in flat[i] of any rank makes flat[i] not-a-number on every rank; that is
///    how a rank tells the others that a gradient is missing. Where a hook cannot promise it, the ranks ask
///    one another with one more collective of four bytes. Where it does, and a wait throws on one rank, the
///    communicator is aborted, since the others may have sound averages.
/// 3. `start(comm, bucket)` begins the exchange and returns a Reduction. It is called in bucket order, the
///    same on every rank, each time with a bucket that has elements. The Reductions are waited for in that
///    order too, and only when every bucket was started: a second phase of collectives belongs into the
///    wait. The hook does not move in the meantime, nor does the bucket, so a Reduction may point to both.
/// 4. `name()` is what reports call it. `wire_bytes()` counts the bytes that this rank has given to
///    collectives for reductions so far: its tensors' own, however often a collective sends them; none in a
///    group of one.
/// 5. Where ranks are meant to get other gradients than one another, a static `ranks_diverge` that is true says
///    so: a Trainer does not compare their parameters then.
/// 6. Where it has options that must be equal on every rank, `settings()` gives them by name, in words, and
///    DistributedDataParallel compares them when it is made.
template <class H, class Comm>
concept CommunicationHook = std::move_constructible<H> && Communicator<Comm> &&
    requires(H& hook, const H& counted, Comm& comm, const GradientBucket& bucket) {
  { H::predivides } -> std::convertible_to<bool>;
  { H::propagates_nan } -> std::convertible_to<bool>;
  { hook.start(comm, bucket) } -> Reduction;
  { counted.name() } -> std::convertible_to<std::string_view>;
  { counted.wire_bytes() } -> std::convertible_to<std::uint64_t>;
};

/// A hook that remembers something from one reduction of all gradients to the next.
///
/// 1. `state()` is what it remembers, in tensors of its own; `load_state` takes that back, and the
///    reductions after it have the same bits. It is this rank's state: others may hold another, so that a
///    checkpoint must keep every rank's. What of it is the same on every rank, a static
///    `shared_state(state)` may tell: a run that goes on with another number of ranks loads that.
/// 2. `rollback()` forgets what the last reduction has changed, for a step that is skipped, or a backward
///    that threw; a second call without a reduction between them does nothing. Never with a Reduction
///    under way.
/// 3. `reset()` is called when the buckets change: what is kept by bucket is forgotten, what is kept by
///    parameter may stay.
template <class H>
concept StatefulHook = requires(H& hook, const H& saved, const HookState& state) {
  { saved.state() } -> std::same_as<HookState>;
  hook.load_state(state);
  hook.rollback();
  hook.reset();
};

}  // namespace lockstep

namespace lockstep::detail {
/// What a tensor adds to wire_bytes() when it is given to a collective of this group.
template <class Comm>
std::uint64_t sent_bytes(const Comm& comm, const at::Tensor& tensor) {
  return comm.size() > 1 ? static_cast<std::uint64_t>(tensor.numel()) * tensor.element_size() : 0;
}
}  // namespace lockstep::detail

namespace lockstep {

/// The default: the sum over the ranks of gradients that were divided first, with the bits of Python's DDP
/// without a hook. It adds nothing to the communicator's own all_reduce.
class AllReduceHook {
 public:
  static constexpr bool predivides = true;
  static constexpr bool propagates_nan = true;
  /// A graph can hold it; see CapturedStep.
  static constexpr bool capturable = true;

  template <Reducing Comm>
  typename Comm::Work start(Comm& comm, const GradientBucket& bucket) {
    wire_bytes_ += detail::sent_bytes(comm, bucket.flat);
    return comm.all_reduce(bucket.flat, ReduceOp::sum);
  }

  [[nodiscard]] std::string_view name() const { return "all_reduce"; }
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 private:
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep
