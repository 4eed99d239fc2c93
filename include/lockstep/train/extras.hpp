#pragma once

#include <limits>
#include <memory>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <torch/optim/optimizer.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/detail/optimizer_maker.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/metrics.hpp"
#include "lockstep/train/step_profile.hpp"

namespace lockstep::inline v0_1 {

/// The gradients of one optimizer step, summed over its micro-batches and reduced over all ranks, before the
/// optimizer uses them.
struct Gradients {
  /// Zero-based, over the lifetime of the trainer.
  std::int64_t epoch, step;
  /// Each parameter once, in the model's order. `grad()` is undefined for a parameter without a gradient.
  const std::vector<at::Tensor>& parameters;
  const std::vector<NamedTensor>& named_parameters;  ///< The same with their names.
  /// The total norm of all gradients before they are modified, one element. Undefined until a
  /// GradientCallback sets it, as GradientClip does. Later callbacks and StepReport::total_norm read it.
  at::Tensor& total_norm;
  /// Whether a NaN on one rank reaches every rank. Some communication hooks do not propagate it.
  bool propagates_nan = true;
};

// Extras: arguments of a Trainer's constructor, at most one of each concept.

/// Creates the optimizer: `make_optimizer(parameters)` takes all parameters of the model in registration order, frozen
/// ones included, a tied one once, without those in DdpOptions::ignored. Called once, on every rank.
template <class E>
concept OptimizerFactory = requires(E& extra, std::vector<NamedTensor> parameters) {
  { extra.make_optimizer(parameters) } -> std::convertible_to<std::unique_ptr<torch::optim::Optimizer>>;
};

namespace detail {
inline std::vector<at::Tensor> tensor_list(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}
}  // namespace detail

/// Wraps `function` as an OptimizerFactory. It returns an optimizer, or a std::unique_ptr to one, and takes
/// a std::vector<at::Tensor>, or a std::vector<NamedTensor> to form parameter groups by name:
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
  explicit MakeOptimizer(Function function) : function(std::move(function)) {}
  Function function;

  std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::vector<NamedTensor>& parameters) {
    // Tensors first: a generic lambda written for tensors accepts both and fails to compile for NamedTensors.
    constexpr bool of_tensors = std::invocable<Function&, std::vector<at::Tensor>>;
    using Parameters = std::conditional_t<of_tensors, std::vector<at::Tensor>, std::vector<NamedTensor>>;
    constexpr bool makes = detail::OptimizerMaker<Function, Parameters>;
    static_assert(makes,
                  "lockstep: MakeOptimizer takes a function of the parameters that returns an optimizer, or "
                  "a std::unique_ptr to one");
    if constexpr (!makes)
      return nullptr;
    else if constexpr (of_tensors)
      return detail::make_optimizer_by(function, detail::tensor_list(parameters));
    else
      return detail::make_optimizer_by(function, parameters);
  }
};

/// A learning rate schedule. Each parameter group runs at its own base rate times `rate_factor(epoch, step)`,
/// both zero-based. The factor depends on these two arguments only, so that all ranks agree.
/// Counterpart: torch.optim.lr_scheduler.LambdaLR.
template <class E>
concept Schedule = requires(E& extra, std::int64_t epoch, std::int64_t step) {
  { extra.rate_factor(epoch, step) } -> std::convertible_to<double>;
};

/// Wraps `function(epoch, step)`, which returns the factor, as a Schedule.
template <class Function>
struct RateSchedule {
  explicit RateSchedule(Function function) : function(std::move(function)) {}
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

/// A check of the gradients before any GradientCallback sees them. `watch(named_parameters)` is called before
/// the first backward, and before an epoch in which other parameters require grad: it may register hooks on
/// them, which the next call or the destructor removes. `check(gradients, comm)` is called on every rank after
/// the backward of each step: what it throws, it throws on every rank, and the step does not run.
/// `begin_step()`, if there is one, is called before the first forward of each step.
template <class E>
concept GradientCheck = requires(E& extra, const std::vector<NamedTensor>& parameters,
                                 const Gradients& gradients, LocalComm& comm) {
  extra.watch(parameters);
  extra.check(gradients, comm);
};

/// A CommunicationHook of the trainer's communicator, recognized by the members that every hook has.
template <class E>
concept HookPolicy = requires(const E& extra) {
  { E::predivides } -> std::convertible_to<bool>;
  { E::propagates_nan } -> std::convertible_to<bool>;
  extra.wire_bytes();
};

// Callbacks: arguments of Trainer::fit, after the loss. Any number of each concept.

/// What `fit` does after a StepCallback, EpochStartCallback or EpochCallback, which returns it or void. If one
/// returns `stop` on any rank, `fit` stops on every rank after the same step or epoch; the other callbacks of
/// the event still run. An event whose callbacks have a FitAction takes one small collective.
///
/// Counterpart: `trainer.should_stop` of Lightning, `model.stop_training` of Keras.
enum class FitAction { proceed, stop };

/// A callback between backward and the optimizer step, on every rank: `on_gradients(gradients)`. The gradients
/// are equal on all ranks; a callback may modify them in place, identically on every rank. A precision with
/// `unscale(optimizer)` unscales them before the first callback, and its `step` does not again.
template <class E>
concept GradientCallback = requires(E& callback, const Gradients& gradients) {
  callback.on_gradients(gradients);
};

/// Wraps `function(gradients)` as a GradientCallback.
template <class Function>
struct OnGradients {
  explicit OnGradients(Function function) : function(std::move(function)) {}
  Function function;
  void on_gradients(const Gradients& gradients) { function(gradients); }
};

// Calls the function of a callback. Passes on a FitAction and drops any other result.
namespace detail {
template <class Function, class Report>
auto call_for(Function& function, const Report& report) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Function&, const Report&>>;
  static_assert(!std::same_as<Result, bool>,
                "lockstep: the function of a callback returns a bool, which says nothing to fit: return "
                "FitAction::stop to end the fit, FitAction::proceed to go on, or nothing");
  if constexpr (std::same_as<Result, FitAction>)
    return function(report);
  else
    static_cast<void>(function(report));
}
}  // namespace detail

/// One optimizer step as seen by this rank.
struct StepReport {
  /// Zero-based: over the lifetime of the trainer, and within the epoch.
  std::int64_t epoch, step, step_in_epoch;
  /// std::nullopt for a stream of unknown length.
  std::optional<std::int64_t> steps_in_epoch;
  /// The losses of this rank's micro-batches. Empty if this rank had no data left.
  std::span<const LocalLoss> local;
  /// False if the precision skipped the step because of non-finite gradients. Reading it synchronizes with the
  /// device if only the device knows the outcome.
  StepOutcome stepped = true;
  /// The norm of the gradients before clipping, one element on their device. `item()` synchronizes with the
  /// device. Undefined if no GradientCallback set Gradients::total_norm.
  at::Tensor total_norm = {};

  /// Returns the mean loss over this rank's part of the step, NaN if it had none. Synchronizes with the device.
  [[nodiscard]] double loss() const {
    Total total;
    for (const LocalLoss& micro : local)
      if (micro.count != 0) total += micro.total();
    return total.mean();
  }
};

/// A callback after each optimizer step, on every rank: `on_step(report)`, or `on_step(report, comm)` with
/// the Trainer's communicator. If it returns FitAction::stop, the epoch ends with this step: its
/// EpochCallbacks run, and a later `fit` starts the next epoch.
template <class E>
concept StepCallback = requires(E& callback, const StepReport& report) {
  callback.on_step(report);
}
|| requires(E& callback, const StepReport& report, LocalComm& comm) {
  callback.on_step(report, comm);
};

/// Wraps `function(report)` as a StepCallback.
template <class Function>
struct OnStep {
  explicit OnStep(Function function) : function(std::move(function)) {}
  Function function;
  auto on_step(const StepReport& report) { return detail::call_for(function, report); }
};

/// A callback after each optimizer step that also gets the times of its phases, on every rank:
/// `on_profile(report, profile)`. Costs one clock read for each phase.
template <class E>
concept ProfileCallback = requires(E& callback, const StepReport& report, const StepProfile& profile) {
  callback.on_profile(report, profile);
};

/// Wraps `function(report, profile)` as a ProfileCallback.
template <class Function>
struct OnProfile {
  explicit OnProfile(Function function) : function(std::move(function)) {}
  Function function;
  void on_profile(const StepReport& report, const StepProfile& profile) { function(report, profile); }
};

/// The epoch about to start. `epoch` is zero-based; `epochs` is the total; `steps` is the number of optimizer
/// steps, std::nullopt for a stream of unknown length. `resumed`: a checkpoint was saved within this epoch, and
/// its rest follows.
struct EpochPlan {
  std::int64_t epoch, epochs;
  std::optional<std::int64_t> steps;
  bool resumed = false;
};

/// A callback before each epoch, on every rank: `on_epoch_start(plan)`, or `on_epoch_start(plan, comm)` with
/// the Trainer's communicator. If it returns FitAction::stop, the epoch does not start.
template <class E>
concept EpochStartCallback = requires(E& callback, const EpochPlan& plan) {
  callback.on_epoch_start(plan);
}
|| requires(E& callback, const EpochPlan& plan, LocalComm& comm) {
  callback.on_epoch_start(plan, comm);
};

/// Wraps `function(plan)` as an EpochStartCallback.
template <class Function>
struct OnEpochStart {
  explicit OnEpochStart(Function function) : function(std::move(function)) {}
  Function function;
  auto on_epoch_start(const EpochPlan& plan) { return detail::call_for(function, plan); }
};

/// One completed epoch over all ranks.
struct EpochReport {
  /// `epoch` is zero-based, over the lifetime of the trainer. `step` is the number of steps completed so far.
  std::int64_t epoch, step;
  /// The mean loss over every sample of every rank; identical on all ranks.
  double loss;
  /// Wall-clock time of the epoch on this rank, without the callbacks before and after it.
  double seconds;
  /// Steps that the precision skipped because of non-finite gradients.
  std::int64_t skipped = 0;
  /// Of this rank, in bytes; see peak_memory().
  std::int64_t peak_memory = 0;
  /// The named parts of the loss over every sample of every rank, if the loss returns any.
  std::vector<std::pair<std::string_view, Total>> losses = {};
};

/// A callback after each epoch, on every rank: `on_epoch(report)`, or `on_epoch(report, comm)` with the Trainer's
/// communicator. It may evaluate, save and log. If it returns FitAction::stop, `fit` returns after this epoch.
template <class E>
concept EpochCallback = requires(E& callback, const EpochReport& report) {
  callback.on_epoch(report);
}
|| requires(E& callback, const EpochReport& report, LocalComm& comm) {
  callback.on_epoch(report, comm);
};

/// Wraps `function(report)` as an EpochCallback.
template <class Function>
struct OnEpoch {
  explicit OnEpoch(Function function) : function(std::move(function)) {}
  Function function;
  auto on_epoch(const EpochReport& report) { return detail::call_for(function, report); }
};

/// Any of the five callback concepts.
template <class E>
concept Callback =
    GradientCallback<E> || StepCallback<E> || ProfileCallback<E> || EpochStartCallback<E> || EpochCallback<E>;

namespace detail {
// Calls the callback if it is one for this event.
template <class E>
void notify([[maybe_unused]] E& callback, [[maybe_unused]] const Gradients& gradients) {
  if constexpr (GradientCallback<E>) callback.on_gradients(gradients);
}
template <class E>
void notify([[maybe_unused]] E& callback, [[maybe_unused]] const StepReport& report,
            [[maybe_unused]] const StepProfile& profile) {
  if constexpr (ProfileCallback<E>) callback.on_profile(report, profile);
}
// Calls the callback if it is one for this event, with the communicator if it takes one.
template <class E, class Comm>
auto call_callback([[maybe_unused]] E& callback, [[maybe_unused]] const StepReport& report,
                   [[maybe_unused]] Comm& comm) {
  if constexpr (requires { callback.on_step(report, comm); })
    return callback.on_step(report, comm);
  else if constexpr (StepCallback<E>)
    return callback.on_step(report);
}
template <class E, class Comm>
auto call_callback([[maybe_unused]] E& callback, [[maybe_unused]] const EpochPlan& plan,
                   [[maybe_unused]] Comm& comm) {
  if constexpr (requires { callback.on_epoch_start(plan, comm); })
    return callback.on_epoch_start(plan, comm);
  else if constexpr (EpochStartCallback<E>)
    return callback.on_epoch_start(plan);
}
template <class E, class Comm>
auto call_callback([[maybe_unused]] E& callback, const EpochReport& report, [[maybe_unused]] Comm& comm) {
  if constexpr (requires { callback.on_epoch(report, comm); })
    return callback.on_epoch(report, comm);
  else if constexpr (EpochCallback<E>)
    return callback.on_epoch(report);
}

// A class has a member of a name if the lookup is ambiguous in a class derived from it and from MemberNames.
struct MemberNames {
  int on_gradients, on_step, on_profile, on_epoch_start, on_epoch;
};
template <class E>
struct WithMemberNames : E, MemberNames {};
template <class E>
requires(!std::is_class_v<E> || std::is_final_v<E>) struct WithMemberNames<E> : MemberNames {
};

/// Diagnoses the members of a callback of `fit`, one of which may be right and another not.
template <class Callback, class Comm>
constexpr bool checked_callback() {
  using Class = std::remove_cv_t<Callback>;
  using Members = WithMemberNames<Class>;
  // clang-format off
  constexpr bool gradients = GradientCallback<Callback> ||
      requires { &Members::on_gradients; };
  constexpr bool profile = ProfileCallback<Callback> ||
      requires { &Members::on_profile; };
  constexpr bool step = StepCallback<Callback> ||
      requires { &Members::on_step; } ||
      requires(Callback& call, const StepReport& report, Comm& comm) { call.on_step(report, comm); };
  constexpr bool start = EpochStartCallback<Callback> ||
      requires { &Members::on_epoch_start; } ||
      requires(Callback& call, const EpochPlan& plan, Comm& comm) { call.on_epoch_start(plan, comm); };
  constexpr bool epoch = EpochCallback<Callback> ||
      requires { &Members::on_epoch; } ||
      requires(Callback& call, const EpochReport& report, Comm& comm) { call.on_epoch(report, comm); };
  // clang-format on
  static_assert(
      !std::is_final_v<Class>,
      "lockstep: the class of a callback is final, so that a member of a wrong form would not be found: "
      "remove final");
  static_assert(gradients,
                "lockstep: on_gradients of a callback takes const Gradients&: fit would not call it");
  static_assert(profile,
                "lockstep: on_profile of a callback takes const StepReport& and const StepProfile&: "
                "fit would not call it");
  static_assert(step,
                "lockstep: on_step of a callback takes const StepReport&, and the communicator if it "
                "likes: fit would not call it");
  static_assert(start,
                "lockstep: on_epoch_start of a callback takes const EpochPlan&, and the communicator if "
                "it likes: fit would not call it");
  static_assert(epoch,
                "lockstep: on_epoch of a callback takes const EpochReport&, and the communicator if it "
                "likes: fit would not call it");
  return !std::is_final_v<Class> && gradients && profile && step && start && epoch;
}

/// Whether the callback can stop `fit` at this event.
template <class E, class Report, class Comm>
inline constexpr bool can_stop =
    std::same_as<decltype(call_callback(std::declval<E&>(), std::declval<const Report&>(),
                                        std::declval<Comm&>())),
                 FitAction>;

/// Calls the callback if it is one for this event. Returns whether it asks `fit` to stop.
template <class E, class Report, class Comm>
bool asks_to_stop(E& callback, const Report& report, Comm& comm) {
  if constexpr (can_stop<E, Report, Comm>) {
    return call_callback(callback, report, comm) == FitAction::stop;
  } else {
    call_callback(callback, report, comm);
    return false;
  }
}
}  // namespace detail

/// A GradientCallback that clips the gradients of a step as clip_grad_norm does, with `max_norm` and
/// `options`. It sets Gradients::total_norm to the norm before clipping. Errors name the parameters.
/// Counterpart: torch.nn.utils.clip_grad_norm_.
struct GradientClip {
  /// A graph can capture it unless `error_if_nonfinite` is set, which reads the norm; see CapturedStep.
  static constexpr bool capturable = true;

  double max_norm = 1;
  ClipOptions options = {};

  /// Throws UsageError if `error_if_nonfinite` is set.
  void check_capturable() const {
    if (options.error_if_nonfinite)
      throw UsageError(
          "GradientClip: error_if_nonfinite reads the norm on the host, which a graph cannot do: set it to "
          "false");
  }

  void on_gradients(const Gradients& gradients) const try {
    gradients.total_norm = detail::clip_norm(gradients.named_parameters, max_norm, options);
  } catch (const GradientError& error) {
    // Every rank throws for equal gradients, so that no abort is needed.
    if (gradients.propagates_nan) throw detail::CollectiveError<GradientError>(error.what());
    throw;
  }
};

/// A GradientCheck that rejects NaN and infinite gradients. If a gradient holds one, every rank throws the
/// same GradientError, which names the parameter, the step and the ranks whose own gradients were not finite.
/// The parameters keep the values of the last step. It reads each gradient twice, before and after the
/// reduction, and synchronizes with the device.
class CheckFinite {
 public:
  CheckFinite() = default;
  CheckFinite(CheckFinite&&) = default;
  CheckFinite& operator=(CheckFinite&&) = default;

  void watch(const std::vector<NamedTensor>& parameters) {
    watched_.clear();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].tensor.requires_grad())
        watched_.push_back(std::make_unique<Watch>(i, parameters[i].tensor));
  }

  void begin_step() {
    for (const auto& watch : watched_) watch->own = at::Tensor();
  }

  template <Communicator C>
  void check(const Gradients& gradients, C& comm) {
    std::size_t first = 0;
    std::string reduced;
    for (; first < watched_.size(); ++first) {
      reduced = not_finite(largest(gradients.parameters[watched_[first]->index].grad()));
      if (!reduced.empty()) break;
    }
    if (!gradients.propagates_nan)
      for (const std::string& there : agree(comm, [&] { return std::to_string(first); }))
        first = std::min<std::size_t>(first, std::stoull(there));
    if (first == watched_.size()) return;
    // A hook may spread a NaN over its bucket, so the error names a gradient that was not finite before the reduction.
    const std::vector<std::string> own = agree(comm, [&] { return first_of_own(); });
    std::size_t culprit = watched_.size();
    for (const std::string& found : own)
      if (!found.empty()) culprit = std::min<std::size_t>(culprit, std::stoull(found));
    throw detail::CollectiveError<GradientError>(
        describe(*watched_[culprit < watched_.size() ? culprit : first], gradients) +
        blame(own, culprit, reduced, detail::RankNames(comm)));
  }

 private:
  /// Tracks the largest magnitude of the gradients that this rank's backwards computed for a parameter; NaN
  /// if one was NaN.
  struct Watch {
    Watch(std::size_t index, const at::Tensor& parameter) : index(index), parameter(parameter) {
      hook = parameter.register_hook([this](const at::Tensor& gradient) {
        const at::Tensor here = largest(gradient);
        if (here.defined()) own = own.defined() ? at::maximum(own, here) : here;
      });
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() { parameter.remove_hook(hook); }

    std::size_t index;
    at::Tensor parameter, own;
    unsigned hook;
  };

  static at::Tensor largest(const at::Tensor& gradient) {
    if (!gradient.defined()) return {};
    const at::NoGradGuard no_grad;
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    if (values.numel() == 0) return {};
    return at::linalg_vector_norm(values, std::numeric_limits<double>::infinity());
  }

  static std::string not_finite(const at::Tensor& largest) {
    if (!largest.defined()) return "";
    const double value = detail::host_value(largest);
    return std::isnan(value) ? "nan" : std::isinf(value) ? "inf" : "";
  }

  static std::string describe(const Watch& watch, const Gradients& gradients) {
    return detail::formatted(
        "the gradient of parameter {} '{}' is not finite in step {} of epoch {}: ", watch.index,
        gradients.named_parameters[watch.index].name, gradients.step, gradients.epoch + 1);
  }

  // Returns the first parameter whose gradient on this rank was not finite before the reduction, such as
  // "3 nan", or an empty string.
  [[nodiscard]] std::string first_of_own() const {
    for (std::size_t i = 0; i < watched_.size(); ++i)
      if (const std::string kind = not_finite(watched_[i]->own); !kind.empty())
        return detail::formatted("{} {}", i, kind);
    return {};
  }

  // Returns the ranks that caused the error: those with `culprit` as their first.
  static std::string blame(const std::vector<std::string>& own, std::size_t culprit,
                           const std::string& reduced, const detail::RankNames& name_of) {
    std::string ranks;
    for (std::size_t rank = 0; rank < own.size(); ++rank)
      if (!own[rank].empty() && std::stoull(own[rank]) == culprit)
        ranks += detail::formatted("{}rank {} has {}", ranks.empty() ? "" : ", ", name_of(rank),
                                   own[rank].substr(own[rank].find(' ') + 1));
    if (ranks.empty())
      return detail::formatted(
          "it is finite on each rank, but {} after the reduction; lower the learning rate, or reduce in a "
          "wider dtype",
          reduced.empty() ? "nan or inf" : reduced);
    return ranks + "; look at their batches of this step, or lower the learning rate";
  }

  std::vector<std::unique_ptr<Watch>> watched_;
};

}  // namespace lockstep::inline v0_1
