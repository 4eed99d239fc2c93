#pragma once

#include <torch/torch.h>

#include <cstdint>

/// Runs a layer without a graph, and again with one inside backward, as Python's
/// `checkpoint(use_reentrant=True)` does.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               torch::nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return (*layer)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto* layer = reinterpret_cast<torch::nn::Linear*>(context->saved_data["layer"].toInt());
    torch::AutoGradMode enable(true);
    auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    torch::autograd::backward({(*layer)(x)}, {grads[0]});
    return {x.grad(), torch::Tensor()};
  }
};
