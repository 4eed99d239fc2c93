#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace lockstep::inline v0_1 {

/// A TorchScript module as a torch::nn::Module, for a Trainer, `evaluate` and all else that takes one:
///
///   Trainer trainer{world, options, ScriptModel(torch::jit::load("model.pt"))};
///
/// Parameters, buffers and submodules have the script's names and share its memory.
class ScriptModelImpl : public torch::nn::Module {
 public:
  /// Registers the parameters, buffers and submodules of `script`.
  explicit ScriptModelImpl(torch::jit::Module script) : script_(std::move(script)) {
    torch::nn::Module::train(script_.is_training());
    for (const auto& parameter : script_.named_parameters(/*recurse=*/false))
      register_parameter(parameter.name, parameter.value, parameter.value.requires_grad());
    for (const auto& buffer : script_.named_buffers(/*recurse=*/false))
      buffers_.push_back({register_buffer(buffer.name, buffer.value.detach()),
                          script_.type()->getAttributeSlot(buffer.name)});
    for (const auto& child : script_.named_children())
      children_.push_back(register_module(child.name, std::make_shared<ScriptModelImpl>(child.value)));
  }

  /// Runs the script's forward, which returns a tensor. Throws c10::Error for inputs that the script refuses.
  template <class... Inputs>
  at::Tensor forward(const Inputs&... inputs) {
    return call(inputs...).toTensor();
  }
  /// Runs the script's forward, which returns any value.
  template <class... Inputs>
  c10::IValue call(const Inputs&... inputs) {
    c10::IValue output = script().forward({c10::IValue(inputs)...});
    adopt_buffers();
    return output;
  }

  /// Sets the training mode of this module and of the script's modules.
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    if (script_.hasattr("training")) script_.setattr("training", on);
  }

  /// Returns the script with the current values, such as for `script().save(path)`.
  [[nodiscard]] torch::jit::Module& script() {
    for (const auto& [tensor, slot] : buffers_)  // `to` moves this module's tensors
      if (!tensor.is_alias_of(slot_of(slot))) script_._ivalue()->setSlot(slot, tensor.detach());
    for (const auto& child : children_) static_cast<void>(child->script());
    return script_;
  }

 private:
  [[nodiscard]] const at::Tensor& slot_of(std::size_t slot) const {
    return script_._ivalue()->getSlot(slot).toTensor();
  }

  // The script replaces the tensor of a buffer that it assigns. Those of this module are tensors of their own, so
  // that a graph may hold the script's.
  void adopt_buffers() {
    for (const auto& [tensor, slot] : buffers_)
      if (!tensor.is_alias_of(slot_of(slot))) tensor.set_data(slot_of(slot));
    for (const auto& child : children_) child->adopt_buffers();
  }

  torch::jit::Module script_;
  std::vector<std::pair<at::Tensor, std::size_t>> buffers_;  // with their slots in the script
  std::vector<std::shared_ptr<ScriptModelImpl>> children_;
};
/// The module holder of ScriptModelImpl.
TORCH_MODULE(ScriptModel);

}  // namespace lockstep::inline v0_1
