#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

namespace lockstep::inline v0_1 {

/// Applies y = x A^T + b with the bits of Python's `torch.nn.Linear`, forward and backward.
///
/// `torch::nn::Linear` computes a matrix product and then adds the bias, unless its input is `[N, C]`. Python
/// computes one fused `addmm` for inputs of any rank, which rounds differently: a transformer that is ported
/// with `torch::nn::Linear` leaves Python's parameters in its first step.
///
/// `torch::nn::Linear` is the base class: `module->as<torch::nn::Linear>()` finds this module too.
///
/// Counterpart: torch.nn.Linear. `torch::linear(x, weight)` is the counterpart of torch.nn.functional.linear,
/// such as for the tied head of a language model; `torch::nn::functional::linear` is not.
class LinearImpl : public torch::nn::LinearImpl {
 public:
  using torch::nn::LinearImpl::LinearImpl;
  explicit LinearImpl(const torch::nn::LinearImpl& other) : torch::nn::LinearImpl(other) {}

  at::Tensor forward(const at::Tensor& input) { return at::linear(input, weight, bias); }

  /// Returns a deep copy, on `device` if that is given. The base class would return a torch::nn::Linear.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    const auto copy = torch::nn::LinearImpl::clone(device);
    return std::make_shared<LinearImpl>(static_cast<const torch::nn::LinearImpl&>(*copy));
  }
};

TORCH_MODULE(Linear);

}  // namespace lockstep::inline v0_1
