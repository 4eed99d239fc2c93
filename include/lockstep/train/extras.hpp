#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/grad/named_tensors.hpp"
#include "lockstep/optim/optimizer_maker.hpp"
#include "lockstep/precision/scaled_step.hpp"
#include "lockstep/train/gradient_hooks.hpp"
#include "lockstep/train/loss.hpp"

namespace lockstep {

/// One optimizer step, as this rank saw it.
struct StepReport {
  /// Counted from 0, over all that the trainer did so far.
  std::int64_t epoch, step;
  /// -1 for the steps of a stream, which nobody knows.
  std::int64_t step_in_epoch, steps_in_epoch;
  /// Of this rank's micro-batches; none where this rank had run out of data.
  std::span<const LocalLoss> local;
  /// False where the precision left it out, since its gradients were not finite: nothing has changed then.
  /// To ask waits for the device where that alone knows.
  StepOutcome stepped = true;
  /// The norm of the gradients before GradientClip scaled them, one element on their device, whose `item()`
  /// waits for that; undefined where no GradientHook has set Gradients::total_norm.
  at::Tensor total_norm = {};

  /// The mean loss over this rank's part of the step, NaN where it had none; waits for the device.
  [[nodiscard]] double loss() const {
    Total total;
    for (const LocalLoss& micro : local)
      if (micro.count != 0) total += micro.total();
    return total.mean();
  }
};

/// A pass over the dataset that is about to begin: the how-manieth, from 0, of how many, in how many
/// optimizer steps (-1 for a stream, which nobody knows).
struct EpochPlan {
  std::int64_t epoch, epochs;
  std::int64_t steps;
};

/// One pass over the dataset, over all ranks.
struct EpochReport {
  /// Counted from 0, over all that the trainer did so far; `step` counts the steps done by now.
  std::int64_t epoch, step;
  /// The mean loss of the epoch over every sample of every rank: the same number everywhere.
  double loss;
  double seconds;
  /// Steps that the precision left out, since their gradients were not finite.
  std::int64_t skipped = 0;
  /// Of this rank, in bytes, since it began: see peak_memory().
  std::int64_t peak_memory = 0;
};

/// Makes the optimizer: `make_optimizer(parameters)`, with each trained parameter once, tied ones too, in the
/// model's order, as a std::vector of tensors or of NamedTensors. Called once, before the first step, on
/// every rank.
template <class E>
concept OptimizerFactory = requires(E& extra, std::vector<NamedTensor> parameters) {
  { extra.make_optimizer(parameters) } -> std::convertible_to<std::unique_ptr<torch::optim::Optimizer>>;
}
|| requires(E& extra, std::vector<at::Tensor> parameters) {
  { extra.make_optimizer(parameters) } -> std::convertible_to<std::unique_ptr<torch::optim::Optimizer>>;
};

/// How gradients travel: a CommunicationHook of the trainer's communicator, such as Fp16Hook. Known here by
/// the constants that each of those has.
template <class E>
concept ReductionPolicy = requires(const E& extra) {
  { E::divides_first } -> std::convertible_to<bool>;
  { E::spreads_nan } -> std::convertible_to<bool>;
  extra.wire_bytes();
};

/// Sets the learning rate: every step of the optimizer runs at its own rate times `rate_factor(epoch, step)`,
/// both counted from 0. A function of these two alone, so that all ranks agree.
template <class E>
concept Schedule = requires(E& extra, std::int64_t epoch, std::int64_t step) {
  { extra.rate_factor(epoch, step) } -> std::convertible_to<double>;
};

/// Work of the user's own after each optimizer step, on every rank: `on_step(report)`.
template <class E>
concept StepHook = requires(E& extra, [[maybe_unused]] const StepReport& report) {
  extra.on_step(report);
};

/// Work of the user's own before each epoch, on every rank: `on_epoch_start(plan)`.
template <class E>
concept EpochStartHook = requires(E& extra, [[maybe_unused]] const EpochPlan& plan) {
  extra.on_epoch_start(plan);
};

/// Work of the user's own after each epoch, on every rank: `on_epoch(report)`. It may evaluate, save and log.
template <class E>
concept EpochHook = requires(E& extra, const EpochReport& report) {
  extra.on_epoch(report);
};

/// An OptimizerFactory of a function that returns an optimizer, or a std::unique_ptr to one. The function
/// takes a std::vector<at::Tensor>, or, for groups by name, a std::vector<NamedTensor>:
///
/// ```cpp
/// lockstep::MakeOptimizer{[](const std::vector<lockstep::NamedTensor>& parameters) {
///   std::vector<torch::Tensor> decayed, others;
///   for (const auto& [name, tensor] : parameters)
///     (name.ends_with("bias") ? others : decayed).push_back(tensor);
///   ...
/// }}
/// ```
template <class Function>
struct MakeOptimizer {
  Function function;

  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<NamedTensor>& parameters) {
    // Tensors first: a generic lambda for tensors takes either, and does not compile for the other.
    constexpr bool of_tensors = std::invocable<Function&, std::vector<at::Tensor>>;
    using Parameters = std::conditional_t<of_tensors, std::vector<at::Tensor>, std::vector<NamedTensor>>;
    constexpr bool makes = detail::OptimizerMaker<Function, Parameters>;
    static_assert(makes,
                  "lockstep: MakeOptimizer takes a function of the parameters that returns an optimizer, or "
                  "a std::unique_ptr to one");
    if constexpr (!makes)
      return nullptr;
    else if constexpr (of_tensors)
      return detail::make_optimizer_by(function, tensors_of(parameters));
    else
      return detail::make_optimizer_by(function, parameters);
  }

 private:
  static std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& parameters) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
    return tensors;
  }
};
template <class Function>
MakeOptimizer(Function) -> MakeOptimizer<Function>;

/// A Schedule of a function `(epoch, step) -> factor`.
template <class Function>
struct RateSchedule {
  Function function;
  double rate_factor(std::int64_t epoch, std::int64_t step) {
    constexpr bool gives_factor = std::is_invocable_r_v<double, Function&, std::int64_t, std::int64_t>;
    static_assert(gives_factor,
                  "lockstep: RateSchedule takes a function of the epoch and the step that returns the factor "
                  "of the rate");
    if constexpr (gives_factor)
      return function(epoch, step);
    else
      return 1;
  }
};
template <class Function>
RateSchedule(Function) -> RateSchedule<Function>;

/// A StepHook of a function `(const StepReport&)`.
template <class Function>
struct OnStep {
  Function function;
  void on_step(const StepReport& report) { function(report); }
};
template <class Function>
OnStep(Function) -> OnStep<Function>;

/// An EpochStartHook of a function `(const EpochPlan&)`.
template <class Function>
struct OnEpochStart {
  Function function;
  void on_epoch_start(const EpochPlan& plan) { function(plan); }
};
template <class Function>
OnEpochStart(Function) -> OnEpochStart<Function>;

/// An EpochHook of a function `(const EpochReport&)`.
template <class Function>
struct OnEpoch {
  Function function;
  void on_epoch(const EpochReport& report) { function(report); }
};
template <class Function>
OnEpoch(Function) -> OnEpoch<Function>;

/// Any of the four.
template <class E>
concept Hook = GradientHook<E> || StepHook<E> || EpochStartHook<E> || EpochHook<E>;

namespace detail {

// Tells a hook what it wants to know, and others nothing.
template <class E>
void notify([[maybe_unused]] E& extra, [[maybe_unused]] const Gradients& gradients) {
  if constexpr (GradientHook<E>) extra.on_gradients(gradients);
}
template <class E>
void notify([[maybe_unused]] E& extra, [[maybe_unused]] const StepReport& report) {
  if constexpr (StepHook<E>) extra.on_step(report);
}
template <class E>
void notify([[maybe_unused]] E& extra, [[maybe_unused]] const EpochPlan& plan) {
  if constexpr (EpochStartHook<E>) extra.on_epoch_start(plan);
}
template <class E>
void notify([[maybe_unused]] E& extra, const EpochReport& report) {
  if constexpr (EpochHook<E>) extra.on_epoch(report);
}

template <class E>
inline constexpr int concepts_modelled =
    int{OptimizerFactory<E>} + int{Schedule<E>} + int{GradientCheck<E>} + int{GradientHook<E>} +
    int{StepHook<E>} + int{EpochStartHook<E>} + int{EpochHook<E>} + int{ReductionPolicy<E>};

template <class... Extras>
inline constexpr bool none_twice = (int{OptimizerFactory<Extras>} + ... + 0) <= 1 &&
                                   (int{Schedule<Extras>} + ... + 0) <= 1 &&
                                   (int{GradientCheck<Extras>} + ... + 0) <= 1 &&
                                   (int{GradientHook<Extras>} + ... + 0) <= 1 &&
                                   (int{StepHook<Extras>} + ... + 0) <= 1 &&
                                   (int{EpochStartHook<Extras>} + ... + 0) <= 1 &&
                                   (int{EpochHook<Extras>} + ... + 0) <= 1 &&
                                   (int{ReductionPolicy<Extras>} + ... + 0) <= 1;

}  // namespace detail

}  // namespace lockstep
