#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/optim/detail/optimizer_maker.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/loss.hpp"

namespace lockstep {

/// The gradients of one optimizer step: of all its micro-batches and ranks, and not yet used.
struct Gradients {
  /// Counted from 0, over all that the trainer did so far.
  std::int64_t epoch, step;
  /// Each parameter once, in the model's order, with its gradient in `grad()`; undefined where it has none.
  const std::vector<at::Tensor>& parameters;
  /// The same with names.
  const std::vector<NamedTensor>& named_parameters;
  /// The norm of all gradients together, one element, as a GradientCallback has found it before it changed them,
  /// for the callbacks after it and StepReport::total_norm; undefined before. GradientClip sets it.
  at::Tensor& total_norm;
  /// Whether what is not a number on one rank is so on all: not with every communication hook.
  bool spread_nan = true;
};

/// Work of the user's own between backward and the optimizer's step, on every rank, such as clipping:
/// `on_gradients(gradients)`. First comes the one among the Trainer's extras, then those given to `fit`, in
/// their order: `fit(data, loss, OnGradients{look}, GradientClip{1})` looks at gradients that are not yet
/// clipped. The gradients are equal on all ranks, and may be changed in place, on all ranks
/// alike. A precision that scales its losses undoes that before, by an `unscale(optimizer)` of its own, after
/// which its `step` does not do it again; one without it shows the gradients scaled.
template <class E>
concept GradientCallback = requires(E& extra, const Gradients& gradients) {
  extra.on_gradients(gradients);
};

/// A look at the gradients before anything uses them. `watch(named_parameters)` is called once, before the
/// first backward, and may put hooks on the parameters, to be removed by the destructor. `check(gradients,
/// comm)` is called after each step's backward, on every rank, before any GradientCallback; where it throws,
/// every rank throws the same, and the step is not made. A step that fails before it may have no `check`:
/// where there is a `begin_step()`, it is called before the first forward of each.
template <class E>
concept GradientCheck = requires(E& extra, const std::vector<NamedTensor>& parameters,
                                 const Gradients& gradients, LocalComm& comm) {
  extra.watch(parameters);
  extra.check(gradients, comm);
};

/// A GradientCallback of a function `(const Gradients&)`.
template <class Function>
struct OnGradients {
  Function function;
  void on_gradients(const Gradients& gradients) { function(gradients); }
};
template <class Function>
OnGradients(Function) -> OnGradients<Function>;

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
  /// waits for that; undefined where no GradientCallback has set Gradients::total_norm.
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
  { E::predivides } -> std::convertible_to<bool>;
  { E::propagates_nan } -> std::convertible_to<bool>;
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
concept StepCallback = requires(E& extra, [[maybe_unused]] const StepReport& report) {
  extra.on_step(report);
};

/// Work of the user's own before each epoch, on every rank: `on_epoch_start(plan)`.
template <class E>
concept EpochStartCallback = requires(E& extra, [[maybe_unused]] const EpochPlan& plan) {
  extra.on_epoch_start(plan);
};

/// Work of the user's own after each epoch, on every rank: `on_epoch(report)`. It may evaluate, save and log.
template <class E>
concept EpochCallback = requires(E& extra, const EpochReport& report) {
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

/// A StepCallback of a function `(const StepReport&)`.
template <class Function>
struct OnStep {
  Function function;
  void on_step(const StepReport& report) { function(report); }
};
template <class Function>
OnStep(Function) -> OnStep<Function>;

/// An EpochStartCallback of a function `(const EpochPlan&)`.
template <class Function>
struct OnEpochStart {
  Function function;
  void on_epoch_start(const EpochPlan& plan) { function(plan); }
};
template <class Function>
OnEpochStart(Function) -> OnEpochStart<Function>;

/// An EpochCallback of a function `(const EpochReport&)`.
template <class Function>
struct OnEpoch {
  Function function;
  void on_epoch(const EpochReport& report) { function(report); }
};
template <class Function>
OnEpoch(Function) -> OnEpoch<Function>;

/// Any of the four.
template <class E>
concept Callback = GradientCallback<E> || StepCallback<E> || EpochStartCallback<E> || EpochCallback<E>;

}  // namespace lockstep

namespace lockstep::detail {

// Tells a hook what it wants to know, and others nothing.
template <class E>
void notify([[maybe_unused]] E& extra, [[maybe_unused]] const Gradients& gradients) {
  if constexpr (GradientCallback<E>) extra.on_gradients(gradients);
}
template <class E>
void notify([[maybe_unused]] E& extra, [[maybe_unused]] const StepReport& report) {
  if constexpr (StepCallback<E>) extra.on_step(report);
}
template <class E>
void notify([[maybe_unused]] E& extra, [[maybe_unused]] const EpochPlan& plan) {
  if constexpr (EpochStartCallback<E>) extra.on_epoch_start(plan);
}
template <class E>
void notify([[maybe_unused]] E& extra, const EpochReport& report) {
  if constexpr (EpochCallback<E>) extra.on_epoch(report);
}

template <class E>
inline constexpr int concepts_modelled =
    int{OptimizerFactory<E>} + int{Schedule<E>} + int{GradientCheck<E>} + int{GradientCallback<E>} +
    int{StepCallback<E>} + int{EpochStartCallback<E>} + int{EpochCallback<E>} + int{ReductionPolicy<E>};

template <class... Extras>
inline constexpr bool none_twice = (int{OptimizerFactory<Extras>} + ... + 0) <= 1 &&
                                   (int{Schedule<Extras>} + ... + 0) <= 1 &&
                                   (int{GradientCheck<Extras>} + ... + 0) <= 1 &&
                                   (int{GradientCallback<Extras>} + ... + 0) <= 1 &&
                                   (int{StepCallback<Extras>} + ... + 0) <= 1 &&
                                   (int{EpochStartCallback<Extras>} + ... + 0) <= 1 &&
                                   (int{EpochCallback<Extras>} + ... + 0) <= 1 &&
                                   (int{ReductionPolicy<Extras>} + ... + 0) <= 1;

}  // namespace lockstep::detail
