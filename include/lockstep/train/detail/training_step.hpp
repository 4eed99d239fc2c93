#pragma once

#include "lockstep/train/detail/epoch_partition.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/extras.hpp"

namespace lockstep::inline v0_1::detail {

template <class PrecisionType, class Comm>
concept AgreeingPrecision = requires(PrecisionType& precision, torch::optim::Optimizer& optimizer,
                                     Comm& comm) {
  precision.agree(optimizer, comm);
};

/// Counts the steps that a precision skipped, without synchronizing with the device that holds the outcome.
class SkippedSteps {
 public:
  SkippedSteps() = default;
  explicit SkippedSteps(std::int64_t before) : known_(before) {}

  void add(bool stepped) { known_ += stepped ? 0 : 1; }
  void add(const StepOutcome& outcome) {
    if (outcome.known()) return add(static_cast<bool>(outcome));
    const at::Tensor& one = outcome.found_inf();
    there_ = there_.defined() ? there_ + one.to(there_.device()) : one;
  }

  /// Returns the count. Synchronizes with the device if an outcome is known only there.
  [[nodiscard]] std::int64_t count() const {
    return known_ + (there_.defined() ? static_cast<std::int64_t>(there_.item<float>()) : 0);
  }

 private:
  std::int64_t known_ = 0;
  at::Tensor there_;
};

/// The position of a step in its run.
struct StepPosition {
  /// Zero-based, over the lifetime of the run.
  std::int64_t epoch, step;
  /// The learning rates of the optimizer's groups before any Schedule, of which a Schedule follows as many.
  std::span<const double> base_rates = {};
};

/// How a step clears the gradients of the step before it: by `zero_grad()`, also for parameters that the
/// optimizer does not hold, or by zeros at the same address, which a captured step needs.
enum class ClearGradients { set_to_none, fill_with_zeros };

/// Returns `sum` * 0, for a micro-batch whose count is 0: its backward adds zeros and runs the collectives
/// that match those of the forward (SyncBatchNorm). Returns an undefined tensor if `sum` has no graph or is
/// not finite, since 0 times NaN is NaN.
inline at::Tensor empty_contribution(const at::Tensor& sum) {
  return sum.defined() && sum.requires_grad() && std::isfinite(host_value(sum)) ? sum * 0 : at::Tensor();
}

/// One optimizer step of data-parallel training, the same for Trainer and CapturedStep. Keeps the state of the
/// last step. Model, DistributedDataParallel, communicator, optimizer and precision must outlive it.
template <class M, class Comm, class Optimizer, class PrecisionType, class Hook>
class TrainingStep {
 public:
  using Ddp = DistributedDataParallel<M, Comm, Hook>;

  /// `options` are those of `ddp`.
  TrainingStep(M& model, Ddp& ddp, Comm& comm, Optimizer& optimizer, PrecisionType& precision,
               const DdpOptions& options, ClearGradients clear)
      : model_(model),
        ddp_(ddp),
        comm_(comm),
        optimizer_(optimizer),
        precision_(precision),
        agrees_(!Hook::propagates_nan || !options.ignored.empty()),
        clear_(clear),
        parameters_(ddp.parameters()) {
    if (clear_ != ClearGradients::set_to_none) return;
    std::unordered_set<const at::TensorImpl*> held;
    for (const auto& group : optimizer_.param_groups())
      for (const at::Tensor& parameter : group.params()) held.insert(parameter.unsafeGetTensorImpl());
    for (const at::Tensor& parameter : parameters_)
      if (!held.contains(parameter.unsafeGetTensorImpl())) unheld_.push_back(parameter);
  }

  /// Runs one step with this rank's micro-batches, which `source` yields (see micro_batch_source.hpp), and returns the
  /// total count of samples, or of counted items, of all ranks. If it is 0, the optimizer did not step. Collective.
  ///
  /// The reduced gradients are those of the mean over all samples of all ranks. A rank without data contributes
  /// zeros. If all counts are known beforehand, each mean is weighted before its backward; for equal batches
  /// this is Python's arithmetic. Otherwise sums are reduced and divided by the total count.
  ///
  /// An error of the data or the loss on this rank is reported to the other ranks, whose step throws too. The
  /// communicator stays usable after a loss that threw, unless the model itself is collective, the other ranks
  /// take more than two seconds to reach their backward, or they learn of a failed backward late. It is aborted
  /// after other failures.
  template <class Source, class Loss, class... Extras, class... Callbacks>
  double run(Source& source, Loss& loss, const StepPosition& position, std::tuple<Extras...>& extras,
             Callbacks&... callbacks) try {
    running_ = true;
    losses_.clear();
    stepped_ = true;
    total_norm_.reset();
    aborting(comm_, [&] {
      source.begin_step();
      end_phase(StepPhase::data, callbacks...);
      set_rates(position, extras);
      clear_gradients();
      each(extras, [&]<class E>([[maybe_unused]] E& extra) {
        if constexpr (GradientCheck<E> && requires { extra.begin_step(); }) extra.begin_step();
      });
    });
    end_phase(StepPhase::optimizer, callbacks...);
    const double counted = compute_gradients(source, loss, callbacks...);
    if (counted != 0) update(position, extras, callbacks...);
    end_phase(StepPhase::optimizer, callbacks...);
    running_ = false;
    return counted;
  } catch (...) {
    running_ = false;
    if constexpr (requires { precision_.forget(); }) precision_.forget();
    throw;
  }

  [[nodiscard]] bool running() const { return running_; }
  [[nodiscard]] const std::vector<LocalLoss>& losses() const { return losses_; }
  [[nodiscard]] const StepOutcome& stepped() const { return stepped_; }
  /// Returns the norm that a GradientCallback set in the last step; undefined if none did.
  [[nodiscard]] const at::Tensor& total_norm() const { return total_norm_; }

 private:
  template <class Parts, class Function>
  static void each(Parts& parts, Function&& function) {
    std::apply([&](auto&... part) { (function(part), ...); }, parts);
  }

  void clear_gradients() {
    optimizer_.zero_grad(/*set_to_none=*/clear_ == ClearGradients::set_to_none);
    for (const at::Tensor& parameter : unheld_) parameter.mutable_grad().reset();
  }

  template <class Extras>
  void set_rates(const StepPosition& position, Extras& extras) {
    each(extras, [&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (Schedule<E>) {
        const double factor = extra.rate_factor(position.epoch, position.step);
        auto rate = position.base_rates.begin();
        // A group that was added since keeps its own rate until the next epoch.
        for (auto& group : optimizer_.param_groups())
          if (rate != position.base_rates.end()) group.options().set_lr(*rate++ * factor);
      }
    });
  }

  // The module whose forward and backward are collective, or an empty string.
  [[nodiscard]] std::string collective_module() const {
    if constexpr (Model<M>)
      return detail::collective_module(module_of(model_));
    else
      return {};
  }

  // Throws DataError if an empty sum is not finite and the model is collective in its backward, so that the
  // other ranks would wait for it.
  void require_finite_empty_sum(const at::Tensor& sum) const {
    if (!sum.defined() || !sum.requires_grad() || std::isfinite(host_value(sum))) return;
    if (const std::string module = collective_module(); !module.empty())
      throw DataError(detail::formatted(
          "the loss is {} over a count of 0, and {} is collective in its backward: return a sum of zeros for "
          "an empty batch, as cross_entropy with reduction sum does",
          host_value(sum), module));
  }

  // Aborts the communicator with the error that is being handled if the other ranks learn of it only in their
  // next step: this rank leaves the Trainer, and takes part in no step.
  void abort_if_checked_late() {
    if (ddp_.checks_late() && !every_rank_throws(comm_)) abort_for_others(comm_);
  }

  // Runs forward and backward of the micro-batches and reduces the gradients with the last one. Returns the
  // total count.
  template <class Source, class Loss, class... Callbacks>
  double compute_gradients(Source& source, Loss& loss, [[maybe_unused]] Callbacks&... callbacks) {
    constexpr bool weighed = Source::counts_beforehand && !CountedLoss<Loss, M, typename Source::Batch>;
    ddp_.forget();  // the previous step may have been abandoned
    double all = 0;
    // After an error in this rank's forward, the other ranks wait in their backward, so it is reported there.
    // A collective forward waits earlier, and a capture cannot report: abort then.
    const auto tell_in_backward = [&] {
      if (CaptureScope::active() || !collective_module().empty()) return abort_for_others(comm_);
      ddp_.fail_backward(std::current_exception(), !weighed);
      abort_if_checked_late();
    };
    // Under no_sync, gradients and counts are only accumulated, so that an error of this rank's backward is told in
    // the reduction that the other ranks reach with their last micro-batch.
    const auto backward = [&](const LocalLoss& local) {
      if (local.count == 0) aborting(comm_, [&] { require_finite_empty_sum(local.value); });
      const auto reduce = [&] {
        if constexpr (weighed)
          ddp_.backward(precision_.scale(local.value));
        else if (local.count == 0)
          all = ddp_.backward_sum(empty_contribution(local.value), 0);
        else
          all = ddp_.backward_sum(precision_.scale(local.value), local.count);
      };
      telling_own_error(comm_.size(), reduce,
                        [&] { source.last() ? abort_if_checked_late() : tell_in_backward(); });
      end_phase(StepPhase::backward, callbacks...);
    };
    while (auto* batch = aborting(comm_, [&] { return source.next(); })) {
      end_phase(StepPhase::data, callbacks...);
      if constexpr (has_step_timer<Callbacks...> && Countable<typename Source::Batch>)
        with_step_timer([&](auto& timer) { timer.count(samples_in(*batch)); }, callbacks...);
      const auto accumulating = ddp_.no_sync(!source.last());
      ddp_.before_forward();
      end_phase(StepPhase::communication, callbacks...);
      LocalLoss& local = losses_.emplace_back(telling_own_error(
          comm_.size(),
          [&] {
            return precision_.forward(
                [&] { return source.weigh(std::invoke(loss, model_, *batch), *batch); });
          },
          tell_in_backward));
      end_phase(StepPhase::forward, callbacks...);
      backward(local);
      local.value.reset();  // frees the graph
    }
    if (losses_.empty()) {
      ddp_.before_forward();  // joins the other ranks' buffer synchronization
      end_phase(StepPhase::communication, callbacks...);
      if constexpr (weighed)
        ddp_.backward_empty();
      else
        backward({{}, {}, 1, 0});
      end_phase(StepPhase::backward, callbacks...);
    }
    return weighed ? source.samples(1) : all;
  }

  template <class Extras, class... Callbacks>
  void update(const StepPosition& position, Extras& extras, Callbacks&... callbacks) try {
    if constexpr (AgreeingPrecision<PrecisionType, Comm>)
      if (agrees_) precision_.agree(optimizer_, comm_);
    show_gradients(position, extras, callbacks...);
    aborting(comm_, [&] { stepped_ = precision_.step(optimizer_); });
    if constexpr (StatefulHook<Hook>)  // reading the outcome may synchronize
      if (!stepped_) ddp_.rollback();
  } catch (...) {
    ddp_.rollback();  // the hook's state must match the parameters, which are those of the last step
    throw;
  }

  template <class... Extras, class... Callbacks>
  void show_gradients(const StepPosition& position, std::tuple<Extras...>& extras, Callbacks&... callbacks) {
    constexpr bool checked = (GradientCheck<Extras> || ...);
    constexpr bool used = (GradientCallback<Callbacks> || ...);
    if constexpr (checked || used) {
      const Gradients gradients{position.epoch,          position.step, parameters_,
                                ddp_.named_parameters(), total_norm_,   Hook::propagates_nan};
      each(extras, [&]<class E>([[maybe_unused]] E& extra) {
        if constexpr (GradientCheck<E>) extra.check(gradients, comm_);
      });
      if constexpr (used) {
        if constexpr (ScalingPrecision<PrecisionType>) precision_.unscale(optimizer_);
        const CallScope program{ServedCall{}};
        aborting(comm_, [&] { (notify(callbacks, gradients), ...); });
      }
    }
  }

  M& model_;
  Ddp& ddp_;
  Comm& comm_;
  Optimizer& optimizer_;
  PrecisionType& precision_;
  bool agrees_;  // the reduction does not propagate every NaN, so the ranks agree on the steps to skip
  ClearGradients clear_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> unheld_;  // not held by the optimizer, whose zero_grad() does not reach them
  std::vector<LocalLoss> losses_;
  StepOutcome stepped_ = true;
  at::Tensor total_norm_;
  bool running_ = false;
};

}  // namespace lockstep::inline v0_1::detail
