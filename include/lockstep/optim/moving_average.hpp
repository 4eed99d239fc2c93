#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep {

/// What a moving average does with buffers, such as the running statistics of batch norm.
enum class AveragedBuffers {
  /// They are the model's own, as they are (Python's use_buffers=False).
  copied,
  /// They are averaged, too (use_buffers=True).
  averaged,
};

struct MovingAverageOptions {
  /// The share of the old average in the new one.
  double decay = 0.999;
  AveragedBuffers buffers = AveragedBuffers::copied;
};

/// An exponential moving average of a model's parameters: the tensors of Python's `AveragedModel(model,
/// multi_avg_fn=get_ema_multi_avg_fn(decay))` to the bit. The model's parameters are equal on all ranks after
/// a step, so the average is, too, and nothing is communicated. The model's tensors stay in place as long as
/// this lives.
class MovingAverage {
 public:
  /// Throws UsageError for a decay that is not from 0 to 1.
  explicit MovingAverage(const torch::nn::Module& model, const MovingAverageOptions& options = {})
      : options_(options), parameters_(unique_parameters(model)), buffers_(unique_buffers(model)) {
    if (!(options.decay >= 0 && options.decay <= 1))
      throw UsageError(fmt::format("MovingAverage: a decay of {}: give one from 0 to 1", options.decay));
    const at::NoGradGuard no_grad;
    for (const auto* list : {&parameters_, &buffers_})
      for (const NamedTensor& item : *list) average_.push_back(item.tensor.detach().clone());
  }
  MovingAverage(const MovingAverage&) = delete;
  MovingAverage& operator=(const MovingAverage&) = delete;

  /// To be called after each optimizer step. The first call takes the model as it is.
  void update() {
    refuse_while_swapped("update");
    const at::NoGradGuard no_grad;
    const bool averaged_buffers = options_.buffers == AveragedBuffers::averaged;
    std::vector<at::Tensor> averages, values;
    for (std::size_t i = 0; i < average_.size(); ++i) {
      const at::Tensor& value = source(i);
      if (updates_ == 0 || (i >= parameters_.size() && !averaged_buffers)) {
        average_[i].copy_(value);
      } else if (!value.is_floating_point() && !value.is_complex()) {
        average_[i].copy_(average_[i] * options_.decay + value * (1 - options_.decay));
      } else {
        averages.push_back(average_[i]);
        values.push_back(value.detach());
      }
    }
    // On a mixture of dtypes ATen takes them one by one by itself.
    if (!averages.empty()) at::_foreach_lerp_(averages, values, 1 - options_.decay);
    ++updates_;
  }

  /// The model holds the average while this lives, and what it held before afterwards. Used for evaluation
  /// and for saving; optimizer steps in between would be lost.
  class [[nodiscard]] Swap {
   public:
    explicit Swap(MovingAverage& owner) : owner_(&owner) { owner.exchange(); }
    Swap(Swap&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    Swap& operator=(Swap&&) = delete;
    ~Swap() {
      if (owner_) owner_->exchange();
    }

   private:
    MovingAverage* owner_;
  };
  /// Throws UsageError while an earlier Swap lives.
  Swap swap_in() {
    refuse_while_swapped("swap_in");
    return Swap(*this);
  }

  [[nodiscard]] std::int64_t updates() const { return updates_; }
  /// The averages of the parameters, then the buffers, in registration order, each once. While a Swap lives
  /// they are what the model held before.
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return average_; }

  /// Under the model's names, with the number of updates.
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("updates", c10::IValue(updates_));
    for (std::size_t i = 0; i < average_.size(); ++i) archive.write(key(i), c10::IValue(average_[i]));
  }
  /// Throws CheckpointError, naming what is missing or of another shape, and changes nothing then.
  void load(torch::serialize::InputArchive& archive) {
    refuse_while_swapped("load");
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> found;
    c10::IValue value;
    for (std::size_t i = 0; i < average_.size(); ++i) {
      if (!archive.try_read(key(i), value) || !value.isTensor() ||
          value.toTensor().sizes() != average_[i].sizes())
        throw CheckpointError(
            fmt::format("MovingAverage: the archive has no '{}' of this model's shape: load the average of "
                        "the same model",
                        name(i)));
      found.push_back(value.toTensor());
    }
    if (!archive.try_read("updates", value) || !value.isInt())
      throw CheckpointError("MovingAverage: the archive has no number of updates: it is no moving average's");
    updates_ = value.toInt();
    for (std::size_t i = 0; i < average_.size(); ++i) average_[i].copy_(found[i]);
  }

 private:
  [[nodiscard]] const NamedTensor& item(std::size_t index) const {
    return index < parameters_.size() ? parameters_[index] : buffers_[index - parameters_.size()];
  }
  [[nodiscard]] const at::Tensor& source(std::size_t index) const { return item(index).tensor; }
  [[nodiscard]] const std::string& name(std::size_t index) const { return item(index).name; }
  // Archives take no points in names, except as paths.
  [[nodiscard]] std::string key(std::size_t index) const {
    std::string key = "average/" + name(index);
    for (char& letter : key)
      if (letter == '.') letter = '/';
    return key;
  }

  void refuse_while_swapped(const char* what) const {
    if (swapped_)
      throw UsageError(
          fmt::format("MovingAverage: {} while the model holds the average: end the Swap first", what));
  }

  void exchange() {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < average_.size(); ++i) {
      at::Tensor tensor = source(i).detach();
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

}  // namespace lockstep
