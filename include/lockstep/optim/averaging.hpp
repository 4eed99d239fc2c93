#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1 {

struct MovingAverageOptions {
  double decay = 0.999;  ///< weight of the old average in the new one, from 0 to 1
  /// Averages the buffers too, such as the running statistics of batch norm. If false, copies the model's.
  bool use_buffers = false;
};

/// Maintains an exponential moving average of a model's parameters, bitwise equal to Python's. Communicates
/// nothing. The model's tensors must not be replaced while this object lives.
///
/// Counterpart: torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)).
class MovingAverage {
 public:
  explicit MovingAverage(const torch::nn::Module& model, const MovingAverageOptions& options = {})
      : options_(options), parameters_(unique_parameters(model)), buffers_(unique_buffers(model)) {
    if (!(options.decay >= 0 && options.decay <= 1))
      throw UsageError(
          detail::formatted("MovingAverage: a decay of {}: give one from 0 to 1", options.decay));
    const at::NoGradGuard no_grad;
    for (const auto* list : {&parameters_, &buffers_})
      for (const NamedTensor& item : *list) average_.push_back(item.tensor.detach().clone());
  }
  MovingAverage(const MovingAverage&) = delete;
  MovingAverage& operator=(const MovingAverage&) = delete;

  /// Updates the average. Call it after each optimizer step; the first call copies the model. Throws
  /// UsageError while a Swap lives.
  void update() {
    refuse_while_swapped("update");
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> averages, values;
    for (std::size_t i = 0; i < average_.size(); ++i) {
      const at::Tensor& value = item(i).tensor;
      if (updates_ == 0 || (i >= parameters_.size() && !options_.use_buffers)) {
        average_[i].copy_(value);
      } else if (!value.is_floating_point() && !value.is_complex()) {
        average_[i].copy_(average_[i] * options_.decay + value * (1 - options_.decay));
      } else {
        averages.push_back(average_[i]);
        values.push_back(value.detach());
      }
    }
    // ATen falls back to one tensor at a time for mixed dtypes.
    if (!averages.empty()) at::_foreach_lerp_(averages, values, 1 - options_.decay);
    ++updates_;
  }

  /// A guard during whose life the model holds the average. An optimizer step in between would be lost.
  class [[nodiscard]] Swap {
   public:
    explicit Swap(MovingAverage& owner) : owner_(&owner) { owner.exchange(); }
    Swap(Swap&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    Swap& operator=(Swap&&) = delete;
    ~Swap() {
      if (owner_) try {
          owner_->exchange();
        } catch (const std::exception& error) {
          TORCH_WARN("the model's own values could not be restored: ", error.what());
        }
    }

   private:
    MovingAverage* owner_;
  };
  /// Swaps the average into the model. Throws UsageError while another Swap lives.
  Swap swap_in() {
    refuse_while_swapped("swap_in");
    return Swap(*this);
  }

  [[nodiscard]] std::int64_t updates() const { return updates_; }  ///< so far
  /// Returns the averages of the parameters, then of the buffers, in registration order, each once. While a
  /// Swap lives these are the model's previous values.
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return average_; }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("updates", c10::IValue(updates_));
    for (std::size_t i = 0; i < average_.size(); ++i) archive.write(key(i), c10::IValue(average_[i]));
  }
  /// Throws CheckpointError for another model, and then changes nothing. Throws UsageError while a Swap lives.
  void load(torch::serialize::InputArchive& archive) {
    refuse_while_swapped("load");
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> found;
    c10::IValue value;
    for (std::size_t i = 0; i < average_.size(); ++i) {
      if (!archive.try_read(key(i), value) || !value.isTensor() ||
          value.toTensor().sizes() != average_[i].sizes())
        throw CheckpointError(detail::formatted(
            "MovingAverage: the archive has no '{}' of this model's shape: load the average of "
            "the same model",
            item(i).name));
      found.push_back(value.toTensor());
    }
    if (!archive.try_read("updates", value) || !value.isInt() || value.toInt() < 0 ||
        value.toInt() == std::numeric_limits<std::int64_t>::max())
      throw CheckpointError(
          "MovingAverage: the archive has no number of updates: load an archive that a MovingAverage saved");
    updates_ = value.toInt();
    for (std::size_t i = 0; i < average_.size(); ++i) average_[i].copy_(found[i]);
  }

 private:
  [[nodiscard]] const NamedTensor& item(std::size_t index) const {
    return index < parameters_.size() ? parameters_[index] : buffers_[index - parameters_.size()];
  }
  // Archive keys cannot contain dots, except as paths.
  [[nodiscard]] std::string key(std::size_t index) const {
    std::string key = "average/" + item(index).name;
    for (char& letter : key)
      if (letter == '.') letter = '/';
    return key;
  }

  void refuse_while_swapped(const char* what) const {
    if (swapped_)
      throw UsageError(
          detail::formatted("MovingAverage: {} while the model holds the average: end the Swap first", what));
  }

  void exchange() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < average_.size(); ++i) {
      at::Tensor tensor = item(i).tensor.detach();
      const at::Tensor kept = tensor.clone();
      tensor.copy_(average_[i]);
      average_[i].copy_(kept);
    }
    swapped_ = !swapped_;
  }

  MovingAverageOptions options_;
  std::vector<NamedTensor> parameters_, buffers_;
  std::vector<at::Tensor> average_;
  std::int64_t updates_ = 0;
  bool swapped_ = false;
};

/// Replaces the parameters by their average over the ranks of `comm`, divided by the number of ranks and then
/// summed, as in Python, by one all-reduce per dtype and device. Collective; waits as Work::wait does.
///
/// Counterpart: torch.distributed.algorithms.model_averaging.utils.average_parameters.
template <Communicator Comm>
void average_parameters(const std::vector<at::Tensor>& parameters, Comm& comm) {
  if (comm.size() == 1) return;
  const detail::CallScope scope("average_parameters");
  const at::NoGradGuard no_grad;
  std::vector<char> done(parameters.size(), 0);
  for (std::size_t first = 0; first < parameters.size(); ++first) {
    if (done[first]) continue;
    std::vector<at::Tensor> alike;
    std::int64_t length = 0;
    for (std::size_t i = first; i < parameters.size(); ++i) {
      const at::Tensor& other = parameters[i];
      if (done[i] || other.scalar_type() != parameters[first].scalar_type() ||
          other.device() != parameters[first].device())
        continue;
      done[i] = 1;
      alike.push_back(other.is_complex() ? at::view_as_real(other.detach()) : other.detach());
      length += alike.back().numel();
    }
    const at::Tensor flat = at::empty({length}, alike[0].options());
    const auto each_part = [&](auto&& copy) {
      std::int64_t offset = 0;
      for (at::Tensor& tensor : alike) {
        copy(tensor, flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
        offset += tensor.numel();
      }
    };
    each_part([](const at::Tensor& tensor, at::Tensor part) { part.copy_(tensor); });
    flat.div_(comm.size());
    comm.all_reduce(flat, ReduceOp::sum).wait();
    each_part([](at::Tensor& tensor, const at::Tensor& part) { tensor.copy_(part); });
  }
}

struct PeriodicModelAveragerOptions {
  std::int64_t period = 4;        ///< steps between two averages
  std::int64_t warmup_steps = 0;  ///< steps before the first average
};

/// Averages a model over the ranks every `period` steps, in the same steps as Python. Use it with
/// PostLocalSgdHook, under which the ranks' parameters diverge.
///
/// Counterpart: torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager.
class PeriodicModelAverager {
 public:
  explicit PeriodicModelAverager(const PeriodicModelAveragerOptions& options = {}) : options_(options) {
    if (options.period < 1)
      throw UsageError(
          detail::formatted("PeriodicModelAverager: a period of {}: give 1 or more", options.period));
    if (options.warmup_steps < 0)
      throw UsageError(
          detail::formatted("PeriodicModelAverager: {} warm-up steps: give 0 or more", options.warmup_steps));
  }

  /// Counts a step and averages the parameters if it is due. Returns whether it averaged. Call it on every
  /// rank after each optimizer step. Collective when it averages.
  template <Communicator Comm>
  bool step(const std::vector<at::Tensor>& parameters, Comm& comm) {
    const std::int64_t since = steps_++ - options_.warmup_steps;
    if (since < 0 || since % options_.period != 0) return false;
    average_parameters(parameters, comm);
    return true;
  }

  /// Returns the number of steps so far. A resumed run restores it by `set_steps`.
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  void set_steps(std::int64_t steps) { steps_ = steps; }

 private:
  PeriodicModelAveragerOptions options_;
  std::int64_t steps_ = 0;
};

}  // namespace lockstep::inline v0_1
