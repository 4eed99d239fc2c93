#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// The number format of a training step. An instance lives as long as its optimizer. The training loop calls
/// it three times per step, in this order:
///
/// 1. `forward(f)` returns `f()` (the model's forward and the loss, or an evaluation), run in the precision's
///    context.
/// 2. `scale(loss)` returns the tensor from which backward starts. Backward accumulates the gradients of this
///    tensor, so the reduction over the ranks sees gradients of equal scale.
/// 3. `step(optimizer)` unscales the reduced gradients and steps the optimizer. It returns whether it
///    stepped: false if the gradients are not finite. The result is the same on every rank. If only the
///    device knows it, it is a StepOutcome, which synchronizes when queried.
///
/// Optional members: `agree(optimizer, comm)`, a collective between 2 and 3, for reductions that do not propagate
/// infinities and NaN to every rank; `unscale(optimizer)` between 2 and 3, after which the gradients are unscaled;
/// `forget()` instead of 3, for a step that threw; `save` and `load`, with which checkpoints store the precision.
template <class P>
concept Precision = std::movable<P> && std::default_initializable<P> &&
    requires(P& precision, at::Tensor (*forward)(), const at::Tensor& loss,
             torch::optim::Optimizer& optimizer) {
  { precision.forward(forward) } -> std::same_as<at::Tensor>;
  { precision.scale(loss) } -> std::convertible_to<at::Tensor>;
  { precision.step(optimizer) } -> std::convertible_to<bool>;
};

/// A Precision that scales losses: gradients are scaled until `unscale`.
template <class P>
concept ScalingPrecision = Precision<P> && requires(P& precision, torch::optim::Optimizer& optimizer) {
  precision.unscale(optimizer);
};

/// Runs everything in the parameters' own dtype. Compiles to nothing.
struct Fp32 {
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    return std::forward<Forward>(forward)();
  }

  const at::Tensor& scale(const at::Tensor& loss) const { return loss; }

  bool step(torch::optim::Optimizer& optimizer) const {
    optimizer.step();
    return true;
  }
};

namespace detail {

/// Sets the states of autocast on this thread in a scope, on the CPU and, if there is one, on the GPU.
/// LibTorch caches its casts of parameters until the outermost of nested scopes ends; a scope of another
/// dtype clears the cache at both of its ends, since LibTorch would reuse casts to the wrong dtype.
class AutocastScope {
 public:
  struct State {
    bool enabled;
    at::ScalarType dtype;
  };
  using States = std::array<State, 2>;  // of the CPU and the GPU

  static States current() {
    States states{};
    for (std::size_t i = 0; i < states.size(); ++i)
      states[i] = {at::autocast::is_autocast_enabled(devices[i]),
                   at::autocast::get_autocast_dtype(devices[i])};
    return states;
  }

  explicit AutocastScope(at::ScalarType dtype) : AutocastScope(States{{{true, dtype}, {true, dtype}}}) {}
  explicit AutocastScope(const States& states) : before_(current()) {
    for (std::size_t i = 0; i < states.size(); ++i)
      other_dtype_ =
          other_dtype_ || (reaches(devices[i]) && before_[i].enabled && before_[i].dtype != states[i].dtype);
    set(states);
    at::autocast::increment_nesting();
    if (other_dtype_) at::autocast::clear_cache();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0 || other_dtype_) at::autocast::clear_cache();
    set(before_);
  }

 private:
  static constexpr std::array devices{at::kCPU, at::kCUDA};
  static bool reaches(at::DeviceType device) { return device == at::kCPU || at::hasCUDA(); }
  static void set(const States& states) {
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (!reaches(devices[i])) continue;
      at::autocast::set_autocast_enabled(devices[i], states[i].enabled);
      at::autocast::set_autocast_dtype(devices[i], states[i].dtype);
    }
  }

  States before_;
  bool other_dtype_ = false;  // the enclosing scope has another dtype
};

}  // namespace detail

/// Runs the forward in bfloat16 where autocast supports it; parameters, gradients and the optimizer step keep
/// their own dtype. Needs no loss scaling. Counterpart: torch.autocast(dtype=torch.bfloat16).
struct Bf16 : Fp32 {
  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kBFloat16);
    return std::forward<Forward>(forward)();
  }
};

/// A scope in which products of float32 tensors may round their factors to TensorFloat-32 (10 bits of mantissa, sums in
/// float32), in the whole process. The destructor restores the previous settings of LibTorch:
///
/// - matrix products, as by `torch.set_float32_matmul_precision("high")`: cuBLAS on a GPU, oneDNN on a CPU, which
///   computes in float32 on processors without such units (AMX);
/// - convolutions and recurrent layers on a GPU, as by `torch.backends.cudnn.allow_tf32 = True`, the default.
///
/// Destroy scopes in reverse order of construction. Throws UsageError if LibTorch's settings of single
/// backends contradict each other, since they could not be restored.
class Tf32Scope {
 public:
  Tf32Scope() try
      : matmul_(name_of(at::globalContext().float32MatmulPrecision())),
        cudnn_(at::globalContext().allowTF32CuDNN()) {
    at::globalContext().setFloat32MatmulPrecision("high");
    at::globalContext().setAllowTF32CuDNN(true);
  } catch (const c10::Error& error) {
    throw UsageError(detail::formatted(
        "Tf32: LibTorch's float32 settings of single backends contradict each other, so they "
        "could not be restored: set them alike, or do not use Tf32 ({})",
        error.what_without_backtrace()));
  }
  Tf32Scope(const Tf32Scope&) = delete;
  Tf32Scope& operator=(const Tf32Scope&) = delete;
  ~Tf32Scope() {
    at::globalContext().setFloat32MatmulPrecision(matmul_);
    at::globalContext().setAllowTF32CuDNN(cudnn_);
  }

 private:
  static const char* name_of(at::Float32MatmulPrecision precision) {
    switch (precision) {
      case at::Float32MatmulPrecision::HIGH:
        return "high";
      case at::Float32MatmulPrecision::MEDIUM:
        return "medium";
      default:
        return "highest";
    }
  }

  std::string matmul_;
  bool cudnn_;
};

/// Runs the forward, and from `scale` to `step` the backward and its reduction, with TensorFloat-32 allowed;
/// the optimizer step is in float32. See Tf32Scope.
class Tf32 {
 public:
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const Tf32Scope scope;
    return std::forward<Forward>(forward)();
  }

  const at::Tensor& scale(const at::Tensor& loss) {
    if (!backward_) backward_ = std::make_unique<Tf32Scope>();
    return loss;
  }

  bool step(torch::optim::Optimizer& optimizer) {
    backward_.reset();
    optimizer.step();
    return true;
  }

  void forget() { backward_.reset(); }

 private:
  std::unique_ptr<Tf32Scope> backward_;
};

/// The arguments that a GradScaler passes to a step: gradients are divided by `scale`, and the step is
/// skipped if `found_inf` is 1. Each has one element, or is undefined (see `any`). `on` copies them to a device.
struct StepScale {
  at::Tensor scale, found_inf;

  [[nodiscard]] bool any() const { return scale.defined() || found_inf.defined(); }
  [[nodiscard]] StepScale on(const at::Device& device) const {
    const auto there = [&](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true) : tensor;
    };
    return {there(scale), there(found_inf)};
  }
};

/// An optimizer whose step divides the gradients by a scaler's scale and decides on the device whether to
/// skip, without synchronizing and without a separate pass. A class derives from this and from
/// torch::optim::Optimizer; GradScaler then uses it.
class ScaledStep {
 public:
  /// Returns whether the current options allow `step_scaled`.
  [[nodiscard]] virtual bool takes_scale() = 0;
  /// Steps with divided gradients. If `found_inf` is 1, leaves parameters, states and step counts unchanged.
  virtual void step_scaled(const StepScale& scale) = 0;

 protected:
  ScaledStep() = default;
  ScaledStep(const ScaledStep&) = default;
  ScaledStep& operator=(const ScaledStep&) = default;
  ~ScaledStep() = default;
};

/// The outcome of a step: made or skipped. Only the device may know it; querying it then synchronizes.
class StepOutcome {
 public:
  StepOutcome(bool stepped)
      : stepped_(stepped) {}  // NOLINT(google-explicit-constructor): a bool is an outcome
  explicit StepOutcome(at::Tensor found_inf) : found_inf_(std::move(found_inf)) {}

  /// Returns whether the host knows the outcome, so that querying it does not block.
  [[nodiscard]] bool known() const { return !found_inf_.defined(); }
  operator bool() const {  // NOLINT(google-explicit-constructor)
    return known() ? stepped_ : found_inf_.item<float>() == 0;
  }
  /// Returns one element on the device, 1 if the step was skipped and 0 otherwise. Undefined if the host
  /// knows the outcome.
  [[nodiscard]] const at::Tensor& found_inf() const { return found_inf_; }

 private:
  bool stepped_ = false;
  at::Tensor found_inf_;
};

/// Options of GradScaler, with the names and defaults of torch.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;    ///< of the first step
  double growth_factor = 2;     ///< after `growth_interval` consecutive steps with finite gradients
  double backoff_factor = 0.5;  ///< after a skipped step
  std::int64_t growth_interval = 2000;
  /// False makes scaling, unscaling and update no-ops; `step` steps the optimizer unconditionally.
  bool enabled = true;
};

/// Scales losses, so that small gradients do not underflow in half precision, and skips a step whose gradients
/// are not finite. Bitwise equal to Python's.
///
/// Each iteration calls `scale` for each loss, backward, optionally `unscale(optimizer)` to inspect or clip
/// the gradients, `step(optimizer)` for each optimizer, and `update()` once. A ScaledStep (SGD, Adam and AdamW
/// with Implementation::fused) is stepped without synchronizing with the device.
///
/// Counterpart: torch.amp.GradScaler.
class GradScaler {
 public:
  /// Throws UsageError for options out of range.
  explicit GradScaler(const GradScalerOptions& options = {}) : options_(options) {
    const auto refuse = [](const char* name, double value, const char* range) {
      throw UsageError(detail::formatted("GradScaler: {} is {}: give {}", name, value, range));
    };
    if (!(std::isfinite(static_cast<float>(options.init_scale)) && options.init_scale > 0))
      refuse("init_scale", options.init_scale, "a finite number above 0");
    if (!(options.growth_factor > 1)) refuse("growth_factor", options.growth_factor, "a number above 1");
    if (!(options.backoff_factor > 0 && options.backoff_factor < 1))
      refuse("backoff_factor", options.backoff_factor, "a number between 0 and 1");
    if (options.growth_interval < 1)
      refuse("growth_interval", static_cast<double>(options.growth_interval), "1 or more");
  }

  /// Returns the loss times the scale. Returns an undefined loss unchanged.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss) {
    if (!options_.enabled || !loss.defined()) return loss;
    create_scale_on(loss.device());
    return loss * scale_.to(loss.device());
  }

  /// Divides the gradients of the optimizer's parameters by the scale and checks whether all are finite. Throws
  /// UsageError if it was called already or after `step`, and GradientError if a gradient is float16 (keep
  void unscale(torch::optim::Optimizer& optimizer) {
    if (!options_.enabled) return;
    State& state = states_[&optimizer];
    if (state.stage != Stage::ready)
      throw UsageError(state.stage == Stage::unscaled
                           ? "GradScaler: unscale was called already for this optimizer since the last "
                             "update: call it once between backward and step"
                           : "GradScaler: unscale after step: call it before, or update first");
    divide(optimizer, state);
    state.stage = Stage::unscaled;
  }

  /// Makes all ranks skip a step that one rank must skip. Collective. Call it before `step`, before or after `unscale`.
  ///
  /// Needed for hooks that do not propagate infinities to all ranks (PowerSgdHook, NoOpHook) and for parameters
  /// that are not reduced. Throws UsageError after `step`.
  template <Communicator Comm>
  void agree(torch::optim::Optimizer& optimizer, Comm& comm) {
    if (!options_.enabled || comm.size() == 1) return;
    const detail::CallScope scope("GradScaler::agree");
    State& state = states_[&optimizer];
    if (state.stage == Stage::stepped)
      throw UsageError("GradScaler: agree after step: call it before, or update first");
    check_finite(optimizer, state);
    at::Tensor any = combined(state).clone();
    comm.all_reduce(any, ReduceOp::max).wait();
    state.found_inf = {any};
  }

  /// Unscales the gradients if `unscale` has not, and steps the optimizer unless a gradient is not finite.
  /// Returns whether it stepped.
  ///
  /// For a ScaledStep the outcome stays on the device until it is queried. Throws UsageError if it was called
  /// already since the last update, and GradientError as `unscale` does.
  StepOutcome step(torch::optim::Optimizer& optimizer) {
    if (!options_.enabled) {
      optimizer.step();
      return true;
    }
    State& state = states_[&optimizer];
    if (state.stage == Stage::stepped)
      throw UsageError(
          "GradScaler: step was called already for this optimizer since the last update: call update "
          "after the steps");
    check_finite(optimizer, state);
    const at::Tensor found = combined(state);
    if (ScaledStep* inside = scaled_step_of(optimizer)) {
      inside->step_scaled({state.divided ? at::Tensor() : scale_, found});
      state.stage = Stage::stepped;
      // In place, so that replays of a captured step keep counting.
      if (!skipped_on_device_.defined()) skipped_on_device_ = at::zeros_like(found);
      skipped_on_device_.add_(found.to(skipped_on_device_.device()));
      return StepOutcome(found);
    }
    divide(optimizer, state);
    const bool finite = found.item<float>() == 0;
    if (finite)
      optimizer.step();
    else
      ++skipped_;
    state.stage = Stage::stepped;
    return finite;
  }

  /// Ends the iteration: adapts the scale to the outcome of the steps, or sets it to `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt) {
    if (!options_.enabled) return;
    if (new_scale) {
      options_.init_scale = *new_scale;
      if (scale_.defined()) scale_.fill_(*new_scale);
    } else {
      at::Tensor found;
      for (const auto& [optimizer, state] : states_)
        for (const at::Tensor& one : state.found_inf)
          found = found.defined() ? found + one.to(scale_.device()) : one.to(scale_.device());
      if (!found.defined())
        throw UsageError(
            "GradScaler: update without a step or an unscale before it: there is nothing to learn");
      at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor, options_.backoff_factor,
                             options_.growth_interval);
    }
    states_.clear();
  }

  void forget() { states_.clear(); }

  [[nodiscard]] double get_scale() const { return options_.enabled ? kept_scale() : 1; }
  /// Returns the number of consecutive finite steps since the scale last changed. Like `get_scale` and `skipped`
  /// (steps of all optimizers), synchronizes with the device.
  [[nodiscard]] std::int64_t growth_tracker() const {
    return growth_tracker_.defined() ? growth_tracker_.item<std::int32_t>() : init_growth_tracker_;
  }
  [[nodiscard]] std::int64_t skipped() const {
    return skipped_ +
           (skipped_on_device_.defined() ? static_cast<std::int64_t>(skipped_on_device_.item<float>()) : 0);
  }

  /// Writes the values of Python's state_dict, and the number of skipped steps.
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("scale", c10::IValue(kept_scale()));
    archive.write("growth_factor", c10::IValue(options_.growth_factor));
    archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
    archive.write("growth_interval", c10::IValue(options_.growth_interval));
    archive.write("growth_tracker", c10::IValue(growth_tracker()));
    archive.write("skipped", c10::IValue(skipped()));
  }
  /// Throws CheckpointError if the archive is not a GradScaler's, and then changes nothing.
  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key, bool integer) {
      c10::IValue value;
      if (!archive.try_read(key, value) ||
          !(integer ? value.isInt() && value.toInt() >= 0 : value.isDouble()))
        throw CheckpointError(detail::formatted(
            "GradScaler: the archive has no '{}': load an archive that a GradScaler saved", key));
      return value;
    };
    GradScalerOptions loaded = options_;
    loaded.init_scale = read("scale", false).toDouble();
    loaded.growth_factor = read("growth_factor", false).toDouble();
    loaded.backoff_factor = read("backoff_factor", false).toDouble();
    loaded.growth_interval = read("growth_interval", true).toInt();
    const std::int64_t tracker = read("growth_tracker", true).toInt(),
                       skipped = read("skipped", true).toInt();
    if (tracker >= std::numeric_limits<std::int32_t>::max() ||
        skipped == std::numeric_limits<std::int64_t>::max())
      throw CheckpointError("the saved GradScaler has a count out of range: load another checkpoint");
    try {
      static_cast<void>(GradScaler(loaded));
    } catch (const UsageError& error) {
      throw CheckpointError(detail::formatted("the saved {}: load another checkpoint", error.what()));
    }
    skipped_ = skipped;
    skipped_on_device_ = at::Tensor();
    options_ = loaded;
    init_growth_tracker_ = tracker;
    if (scale_.defined()) {
      scale_.fill_(loaded.init_scale);
      growth_tracker_.fill_(tracker);
    }
    states_.clear();
  }

 private:
  enum class Stage { ready, unscaled, stepped };
  struct State {
    Stage stage = Stage::ready;
    bool divided = false;               // the gradients are unscaled
    std::vector<at::Tensor> found_inf;  // one element per device, 1 if a gradient was not finite
  };

  [[nodiscard]] double kept_scale() const {
    return scale_.defined() ? scale_.item<float>() : options_.init_scale;
  }

  static ScaledStep* scaled_step_of(torch::optim::Optimizer& optimizer) {
    auto* inside = dynamic_cast<ScaledStep*>(&optimizer);
    return inside && inside->takes_scale() ? inside : nullptr;
  }

  void create_scale_on(const at::Device& device) {
    if (scale_.defined()) return;
    scale_ = at::full({}, options_.init_scale, at::TensorOptions(at::kFloat).device(device));
    growth_tracker_ = at::full({}, init_growth_tracker_, at::TensorOptions(at::kInt).device(device));
  }

  struct OnDevice {
    at::Tensor found_inf, factor;
    std::vector<std::pair<at::ScalarType, std::vector<at::Tensor>>> gradients;
  };

  // Checks whether all gradients are finite. Unscales them in the same pass, unless the step does it.
  void check_finite(torch::optim::Optimizer& optimizer, State& state) {
    if (!state.found_inf.empty()) return;
    if (scaled_step_of(optimizer))
      state.found_inf = multiply(optimizer, /*by_inverse=*/false);
    else
      divide(optimizer, state);
  }

  void divide(torch::optim::Optimizer& optimizer, State& state) {
    if (state.divided) return;
    auto found = multiply(optimizer, /*by_inverse=*/true);
    state.divided = true;
    if (state.found_inf.empty())
      state.found_inf = std::move(found);  // else all ranks have agreed on it already
  }

  // Multiplies the gradients by 1 / scale, or by 1. Returns one found_inf per device: 1 if a gradient there
  // was not finite.
  std::vector<at::Tensor> multiply(torch::optim::Optimizer& optimizer, bool by_inverse) {
    const at::NoGradGuard no_grad;
    std::vector<std::pair<at::Device, OnDevice>> devices;
    for (const auto& group : optimizer.param_groups())
      for (const at::Tensor& parameter : group.params()) {
        at::Tensor& grad = parameter.mutable_grad();
        if (!grad.defined()) continue;
        if (by_inverse && grad.scalar_type() == at::kHalf)
          throw GradientError(
              "GradScaler: a gradient is float16, which overflows when it is unscaled: keep the parameters "
              "in float32 and use autocast");
        create_scale_on(grad.device());
        add(devices, grad.is_sparse() ? grad._values() : grad, by_inverse);
      }
    std::vector<at::Tensor> found;
    for (auto& [device, here] : devices) {
      for (auto& [type, gradients] : here.gradients)
        at::_amp_foreach_non_finite_check_and_unscale_(gradients, here.found_inf, here.factor);
      found.push_back(here.found_inf);
    }
    if (found.empty())
      throw GradientError(
          "GradScaler: none of the optimizer's parameters has a gradient: call backward before");
    return found;
  }

  void add(std::vector<std::pair<at::Device, OnDevice>>& devices, const at::Tensor& gradient,
           bool by_inverse) const {
    auto place = std::find_if(devices.begin(), devices.end(),
                              [&](const auto& item) { return item.first == gradient.device(); });
    if (place == devices.end()) {
      const auto options = at::TensorOptions(at::kFloat).device(gradient.device());
      // Reciprocal in float64, as in Python.
      const at::Tensor factor = by_inverse
                                    ? scale_.to(at::kDouble).reciprocal().to(at::kFloat).to(gradient.device())
                                    : at::full({}, 1.0, options);
      devices.emplace_back(gradient.device(), OnDevice{at::full({}, 0.0, options), factor, {}});
      place = devices.end() - 1;
    }
    auto& kinds = place->second.gradients;
    auto kind = std::find_if(kinds.begin(), kinds.end(),
                             [&](const auto& item) { return item.first == gradient.scalar_type(); });
    if (kind == kinds.end()) {
      kinds.emplace_back(gradient.scalar_type(), std::vector<at::Tensor>());
      kind = kinds.end() - 1;
    }
    kind->second.push_back(gradient);
  }

  // Returns one element, 0 or 1: the fused operators skip a step only for exactly 1.
  static at::Tensor combined(const State& state) {
    at::Tensor found = state.found_inf.at(0);
    for (std::size_t i = 1; i < state.found_inf.size(); ++i)
      found = at::maximum(found, state.found_inf[i].to(found.device()));
    return found;
  }

  GradScalerOptions options_;
  at::Tensor scale_, growth_tracker_;  // on the device of the first loss; undefined before it
  at::Tensor skipped_on_device_;       // steps skipped on the device; undefined if there were none
  std::int64_t init_growth_tracker_ = 0, skipped_ = 0;
  std::unordered_map<const torch::optim::Optimizer*, State> states_;  // since the last update
};

/// Runs the forward in float16 where autocast supports it and scales the loss by its own GradScaler;
/// parameters and the optimizer step keep their own dtype.
///
/// Counterpart: torch.autocast(dtype=torch.float16) with torch.amp.GradScaler.
class Fp16 {
 public:
  /// CapturedStep can capture it with a fused optimizer.
  static constexpr bool capturable = true;

  Fp16() = default;
  /// Throws UsageError for options out of range.
  explicit Fp16(const GradScalerOptions& options) : scaler_(options) {}

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kHalf);
    return std::forward<Forward>(forward)();
  }

  at::Tensor scale(const at::Tensor& loss) { return scaler_.scale(loss); }
  void unscale(torch::optim::Optimizer& optimizer) { scaler_.unscale(optimizer); }
  template <Communicator Comm>
  void agree(torch::optim::Optimizer& optimizer, Comm& comm) {
    scaler_.agree(optimizer, comm);
  }
  StepOutcome step(torch::optim::Optimizer& optimizer) {
    StepOutcome stepped = scaler_.step(optimizer);
    scaler_.update();
    return stepped;
  }

  void forget() { scaler_.forget(); }

  [[nodiscard]] const GradScaler& scaler() const { return scaler_; }  ///< for its scale and counts
  void save(torch::serialize::OutputArchive& archive) const { scaler_.save(archive); }
  void load(torch::serialize::InputArchive& archive) { scaler_.load(archive); }

 private:
  GradScaler scaler_;
};

}  // namespace lockstep::inline v0_1
