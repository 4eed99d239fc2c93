#pragma once

#include <ATen/ops/tensor.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::inline v0_1 {

/// Options of PostLocalSgdHook, with the names of Python's PostLocalSGDState, which has no default for
/// `start_iteration`.
struct PostLocalSgdOptions {
  std::int64_t start_iteration = 100;  ///< reductions over all ranks before local SGD
  /// Average gradients over the subgroup once local SGD has started. False leaves each rank its own gradients.
  bool reduce_in_subgroup = true;
};

/// Averages gradients over all ranks at first, and from `start_iteration` on over a subgroup, such as the
/// ranks of a host, with the arithmetic of Python's hook (Lin et al., arXiv 1808.07217).
///
/// The parameters of the subgroups diverge; PeriodicModelAverager averages them every few steps. This loads a
/// slow network less than the average of each gradient. Each backward still exchanges a few bytes over all
/// ranks and waits for them, to detect a failed rank.
///
///
/// Counterpart: post_localSGD_hook.
template <Communicator Group>
class PostLocalSgdHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;
  static constexpr bool ranks_diverge = true;

  /// `subgroup` must outlive the hook. Throws UsageError if `start_iteration` is negative.
  explicit PostLocalSgdHook(Group& subgroup, const PostLocalSgdOptions& options = {})
      : subgroup_(&subgroup), options_(options) {
    if (options.start_iteration < 0)
      throw UsageError(detail::formatted("PostLocalSgdHook: start_iteration is {}: give 0 or more",
                                         options.start_iteration));
  }

  auto start(Group& comm, const GradientBucket& bucket) {
    if (!before_ || before_->iteration != bucket.iteration) before_ = Before{bucket.iteration, reductions_++};
    if (reductions_ <= options_.start_iteration) return average(comm, bucket);
    if (options_.reduce_in_subgroup) return average(*subgroup_, bucket);
    return Average{};
  }

  [[nodiscard]] std::string_view name() const { return "post_local_sgd"; }
  [[nodiscard]] NamedValues settings() const {
    return {{"start_iteration", detail::formatted("{}", options_.start_iteration)},
            {"reduce_in_subgroup", detail::formatted("{}", options_.reduce_in_subgroup)}};
  }
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

  /// Returns "counters": the number of reductions so far, the same on every rank.
  [[nodiscard]] HookState state() const { return {{"counters", at::tensor({reductions_})}}; }
  /// Throws CheckpointError if the state is another hook's or damaged.
  void load_state(const HookState& state) {
    if (state.size() != 1 || state[0].first != "counters" || !state[0].second.defined() ||
        state[0].second.scalar_type() != at::kLong || state[0].second.numel() != 1)
      throw CheckpointError("the state of a PostLocalSgdHook is one counter: it was saved by another hook");
    const auto reductions = state[0].second.item<std::int64_t>();
    if (reductions < 0 || reductions > std::numeric_limits<std::uint32_t>::max())
      throw CheckpointError(
          "the counter of a PostLocalSgdHook is no number of 32 bits: its state is damaged");
    reductions_ = reductions;
    before_.reset();
  }
  [[nodiscard]] static HookState shared_state(HookState state) { return state; }
  void rollback() {
    if (before_) reductions_ = before_->reductions;
    before_.reset();
  }
  void reset() {}

 private:
  // The last reduction, and the number of reductions before it.
  struct Before {
    std::int64_t iteration;
    std::int64_t reductions;
  };

  class Average {
   public:
    Average() = default;
    explicit Average(typename Group::Work work) : work_(std::move(work)) {}
    void wait() {
      if (work_) work_->wait();
    }
    void synchronize(std::chrono::milliseconds timeout) {
      if (work_) work_->synchronize(timeout);
    }

   private:
    std::optional<typename Group::Work> work_;
  };

  Average average(Group& group, const GradientBucket& bucket) {
    wire_bytes_ += detail::sent_bytes(group, bucket.flat);
    bucket.flat.div_(group.size());
    return Average(group.all_reduce(bucket.flat, ReduceOp::sum));
  }

  Group* subgroup_;
  PostLocalSgdOptions options_;
  std::int64_t reductions_ = 0;
  std::optional<Before> before_;
  std::int64_t wire_bytes_ = 0;
};

}  // namespace lockstep::inline v0_1
