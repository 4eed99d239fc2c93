#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep {

/// Names and defaults as Python's torch.amp.GradScaler has them.
struct GradScalerOptions {
  double init_scale = 65536;
  /// What the scale is multiplied by after `growth_interval` steps in a row without infinities.
  double growth_factor = 2;
  /// What it is multiplied by after a step that was skipped for them.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// Off, all of it passes everything through.
  bool enabled = true;
};

/// Multiplies losses, so that small gradients do not vanish in half precision, and divides the gradients
/// before the step, which it leaves out where one is not finite; the scale follows. Numbers and states are
/// those of Python's torch.amp.GradScaler.
///
/// An iteration is: `scale` for each loss, backward, perhaps `unscale(optimizer)` to see or clip the true
/// gradients, `step(optimizer)` for each optimizer, `update()` once.
///
/// Optimizers that divide the gradients themselves (ScaledStep: SGD, Adam and AdamW with
/// Implementation::fused) are stepped without a wait for the device, as by Python with `fused=True`: the
/// gradients are read once to see whether they are finite, and divided in the step.
class GradScaler {
 public:
  /// Throws UsageError for options without a meaning.
  explicit GradScaler(const GradScalerOptions& options = {}) : options_(options) {
    const auto refuse = [](const char* name, double value, const char* range) {
      throw UsageError(fmt::format("GradScaler: {} is {}: give {}", name, value, range));
    };
    if (!(std::isfinite(options.init_scale) && options.init_scale > 0))
      refuse("init_scale", options.init_scale, "a finite number above 0");
    if (!(options.growth_factor > 1)) refuse("growth_factor", options.growth_factor, "a number above 1");
    if (!(options.backoff_factor > 0 && options.backoff_factor < 1))
      refuse("backoff_factor", options.backoff_factor, "a number between 0 and 1");
    if (options.growth_interval < 1)
      refuse("growth_interval", static_cast<double>(options.growth_interval), "1 or more");
  }

  /// The loss times the scale, for a backward; undefined where it is.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss) {
    if (!options_.enabled || !loss.defined()) return loss;
    make_on(loss.device());
    return loss * scale_.to(loss.device());
  }

  /// Divides the gradients of the optimizer's parameters by the scale, and looks whether all are finite. Once
  /// between a backward and the step. Throws UsageError where it was called already, GradientError for
  /// gradients in float16: it is the parameters' copies that are to be of half precision (autocast).
  void unscale(torch::optim::Optimizer& optimizer) {
    if (!options_.enabled) return;
    State& state = states_[&optimizer];
    if (state.stage != Stage::ready)
      throw UsageError(state.stage == Stage::unscaled
                           ? "GradScaler: unscale was called already for this optimizer since the last update"
                           : "GradScaler: unscale after step: call it before, or update first");
    divide(optimizer, state);
    state.stage = Stage::unscaled;
  }

  /// Makes all ranks skip the step that one must skip. Where every gradient was reduced by a sum, infinities
  /// have come to all ranks by themselves, and this is not needed: it is for hooks that keep them
  /// (PowerSgdHook, NoOpHook) and for parameters that are not reduced. Collective, before `step`, and
  /// before or after `unscale`.
  template <Reducing Comm>
  void agree(torch::optim::Optimizer& optimizer, Comm& comm) {
    if (!options_.enabled || comm.size() == 1) return;
    State& state = states_[&optimizer];
    if (state.stage == Stage::stepped)
      throw UsageError("GradScaler: agree after step: call it before, or update first");
    look(optimizer, state);
    at::Tensor any = combined(state).clone();
    comm.all_reduce(any, ReduceOp::max).wait();
    state.found_inf = {any};
  }

  /// Steps the optimizer unless one of its gradients is not finite; divides them first where that was not
  /// done. Returns whether it stepped: a ScaledStep leaves the answer on the device until it is asked for,
  /// for others this waits for the device. Throws UsageError where it was called already since the last
  /// update.
  StepOutcome step(torch::optim::Optimizer& optimizer) {
    if (!options_.enabled) {
      optimizer.step();
      return true;
    }
    State& state = states_[&optimizer];
    if (state.stage == Stage::stepped)
      throw UsageError("GradScaler: step was called already for this optimizer since the last update");
    look(optimizer, state);
    const at::Tensor found = combined(state);
    if (ScaledStep* inside = divides_itself(optimizer)) {
      inside->step_scaled({state.divided ? at::Tensor() : scale_, found});
      state.stage = Stage::stepped;
      // In place, so that a step that a captured graph repeats counts on.
      if (!skipped_there_.defined()) skipped_there_ = at::zeros_like(found);
      skipped_there_.add_(found.to(skipped_there_.device()));
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

  /// Ends the iteration: the scale grows or shrinks by what the steps have found, or is set to `new_scale`.
  /// Nothing waits for the device. Throws UsageError where no step or unscale came before.
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

  /// Forgets what was done since the last update, for an iteration that is given up.
  void forget() { states_.clear(); }

  /// 1 where it is not enabled; waits for the device.
  [[nodiscard]] double get_scale() const {
    if (!options_.enabled) return 1;
    return scale_.defined() ? scale_.item<float>() : options_.init_scale;
  }
  /// Steps in a row without infinities since the scale last changed; waits for the device.
  [[nodiscard]] std::int64_t growth_tracker() const {
    return growth_tracker_.defined() ? growth_tracker_.item<std::int32_t>() : init_growth_tracker_;
  }
  /// Steps that were left out, of all optimizers; waits for the device.
  [[nodiscard]] std::int64_t skipped() const {
    return skipped_ +
           (skipped_there_.defined() ? static_cast<std::int64_t>(skipped_there_.item<float>()) : 0);
  }

  /// Writes what Python's state_dict holds, and the steps skipped.
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("scale", c10::IValue(get_scale()));
    archive.write("growth_factor", c10::IValue(options_.growth_factor));
    archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
    archive.write("growth_interval", c10::IValue(options_.growth_interval));
    archive.write("growth_tracker", c10::IValue(growth_tracker()));
    archive.write("skipped", c10::IValue(skipped()));
  }
  /// Throws CheckpointError for an archive of something else, and changes nothing then.
  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key) {
      c10::IValue value;
      if (!archive.try_read(key, value))
        throw CheckpointError(fmt::format("GradScaler: the archive has no '{}': it is no scaler's", key));
      return value;
    };
    GradScalerOptions loaded = options_;
    loaded.init_scale = read("scale").toDouble();
    loaded.growth_factor = read("growth_factor").toDouble();
    loaded.backoff_factor = read("backoff_factor").toDouble();
    loaded.growth_interval = read("growth_interval").toInt();
    const std::int64_t tracker = read("growth_tracker").toInt();
    skipped_ = read("skipped").toInt();
    skipped_there_ = at::Tensor();
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
    bool divided = false;               // the gradients are the true ones
    std::vector<at::Tensor> found_inf;  // one element a device, 1 where something was not finite
  };

  static ScaledStep* divides_itself(torch::optim::Optimizer& optimizer) {
    auto* inside = dynamic_cast<ScaledStep*>(&optimizer);
    return inside && inside->takes_scale() ? inside : nullptr;
  }

  void make_on(const at::Device& device) {
    if (scale_.defined()) return;
    scale_ = at::full({}, options_.init_scale, at::TensorOptions(at::kFloat).device(device));
    growth_tracker_ = at::full({}, init_growth_tracker_, at::TensorOptions(at::kInt).device(device));
  }

  /// What lies on one device, with what of the scale is needed there.
  struct OnDevice {
    at::Tensor found_inf, factor;
    std::vector<std::pair<at::ScalarType, std::vector<at::Tensor>>> gradients;
  };

  // Finds out whether all gradients are finite; divides them along the way, unless the step does.
  void look(torch::optim::Optimizer& optimizer, State& state) {
    if (!state.found_inf.empty()) return;
    if (divides_itself(optimizer))
      state.found_inf = multiply(optimizer, /*by_inverse=*/false);
    else
      divide(optimizer, state);
  }

  void divide(torch::optim::Optimizer& optimizer, State& state) {
    if (state.divided) return;
    auto found = multiply(optimizer, /*by_inverse=*/true);
    state.divided = true;
    if (state.found_inf.empty()) state.found_inf = std::move(found);  // else that of all ranks is known
  }

  // Multiplies the gradients by 1 / scale, or by 1; what was not finite, by device.
  std::vector<at::Tensor> multiply(torch::optim::Optimizer& optimizer, bool by_inverse) {
    const at::NoGradGuard no_grad;
    std::vector<std::pair<at::Device, OnDevice>> devices;
    for (const auto& group : optimizer.param_groups())
      for (const at::Tensor& parameter : group.params()) {
        at::Tensor& grad = parameter.mutable_grad();
        if (!grad.defined()) continue;
        if (by_inverse && grad.scalar_type() == at::kHalf)
          throw GradientError(
              "GradScaler: a gradient is of float16, which overflows when it is divided: keep the parameters "
              "in float32, and let autocast make copies of them");
        make_on(grad.device());
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
      // The reciprocal in float64, as Python takes it.
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

  // One element, 0 or 1: the fused operators leave a step out where it is 1 exactly.
  static at::Tensor combined(const State& state) {
    at::Tensor found = state.found_inf.at(0);
    if (state.found_inf.size() == 1) return found;
    for (std::size_t i = 1; i < state.found_inf.size(); ++i)
      found = at::maximum(found, state.found_inf[i].to(found.device()));
    return found;
  }

  GradScalerOptions options_;
  at::Tensor scale_, growth_tracker_;  // on the device of the first loss, undefined before
  at::Tensor skipped_there_;           // steps that a device left out; undefined where there were none
  std::int64_t init_growth_tracker_ = 0, skipped_ = 0;
  std::unordered_map<const torch::optim::Optimizer*, State> states_;  // since the last update
};

}  // namespace lockstep
