#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <vector>

#include "lockstep/optim/detail/active.hpp"
#include "lockstep/optim/detail/state_archive.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep::detail {

inline double sgd_rate(const SgdOptions& options) {
  return options.lr_tensor.defined() ? options.lr_tensor.item<double>() : options.lr;
}

/// Python's `_single_tensor_sgd`: completes one parameter after the other, while its memory is in the cache.
inline void sgd_loop(const SgdOptions& options, Active<SgdState>& all) {
  const double rate = sgd_rate(options);
  const at::Tensor momentum = as_python_does(options.momentum);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const at::Tensor& parameter = all.parameters[i];
    at::Tensor gradient = options.maximize ? at::neg(all.gradients[i]) : all.gradients[i];
    if (options.weight_decay != 0) gradient = at::add(gradient, parameter, options.weight_decay);
    if (options.momentum != 0) {
      at::Tensor& buffer = all.states[i]->momentum_buffer;
      if (buffer.defined())
        buffer.mul_(momentum).add_(gradient, 1 - options.dampening);
      else
        buffer = at::clone(gradient);
      gradient = options.nesterov ? at::add(gradient, buffer, options.momentum) : buffer;
    }
    parameter.add_(gradient, -rate);
  }
}

/// Python's `_multi_tensor_sgd`. As in Python, nesterov without weight decay adds to the gradients in place.
inline void sgd_foreach(const SgdOptions& options, Active<SgdState>& all) {
  const double rate = sgd_rate(options);
  std::vector<at::Tensor> made;
  std::vector<at::Tensor>* gradients = &all.gradients;
  if (options.maximize) {
    made = at::_foreach_neg(*gradients);
    gradients = &made;
  }
  if (options.weight_decay != 0) {
    if (options.maximize) {
      at::_foreach_add_(made, all.parameters, options.weight_decay);
    } else {
      made = at::_foreach_add(*gradients, all.parameters, options.weight_decay);
      gradients = &made;
    }
  }
  if (options.momentum != 0) {
    bool all_there = true;
    for (const SgdState* state : all.states) all_there = all_there && state->momentum_buffer.defined();
    if (all_there) {
      auto& buffers = all.column(0, &SgdState::momentum_buffer);
      at::_foreach_mul_(buffers, options.momentum);
      at::_foreach_add_(buffers, *gradients, 1 - options.dampening);
    } else {
      for (std::size_t i = 0; i < all.size(); ++i) {
        at::Tensor& buffer = all.states[i]->momentum_buffer;
        if (buffer.defined())
          buffer.mul_(as_python_does(options.momentum)).add_((*gradients)[i], 1 - options.dampening);
        else
          buffer = at::clone((*gradients)[i]);
      }
    }
    auto& buffers = all.column(0, &SgdState::momentum_buffer);
    if (options.nesterov)
      at::_foreach_add_(*gradients, buffers, options.momentum);
    else
      gradients = &buffers;
  }
  at::_foreach_add_(all.parameters, *gradients, -rate);
}

inline void sgd_fused_call(const SgdOptions& o, Active<SgdState>& all, const StepScale& scale, bool first) {
  const auto optional = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  const StepScale here = scale.on(all.parameters[0].device());
  auto& buffers = all.column(0, &SgdState::momentum_buffer);
  if (o.momentum == 0) buffers.clear();
  const auto call = [&](const auto& rate) {
    at::_fused_sgd_(all.parameters, all.gradients, buffers, o.weight_decay, o.momentum, rate, o.dampening,
                    o.nesterov, o.maximize, first, optional(here.scale), optional(here.found_inf));
  };
  if (o.lr_tensor.defined())
    call(o.lr_tensor);
  else
    call(o.lr);
}

/// Python's `_fused_sgd`. Python fails if a parameter gets its first gradient later than others; here such
/// parameters are stepped in a separate call.
inline void sgd_fused(const SgdOptions& options, Active<SgdState>& all, const StepScale& scale) {
  align_gradients(all);
  std::size_t fresh = 0;
  if (options.momentum != 0)
    for (const SgdState* state : all.states) fresh += state->momentum_buffer.defined() ? 0 : 1;
  if (fresh != 0 && fresh != all.size()) {
    Active<SgdState> parts[2];
    for (std::size_t i = 0; i < all.size(); ++i)
      parts[all.states[i]->momentum_buffer.defined() ? 1 : 0].add(all.parameters[i], all.gradients[i],
                                                                  all.states[i]);
    for (auto& part : parts) sgd_fused(options, part, scale);
    return;
  }
  // A first step applies no dampening, so the host must know whether it is skipped.
  if (fresh != 0 && options.dampening != 0 && scale.found_inf.defined() && scale.found_inf.item<float>() != 0)
    return;
  // If the first step is skipped for an infinite gradient, the operator leaves the buffers unchanged: use
  // zeros, where Python has uninitialized memory.
  if (fresh != 0)
    for (std::size_t i = 0; i < all.size(); ++i)
      all.states[i]->momentum_buffer =
          scale.found_inf.defined() ? at::zeros_like(all.gradients[i]) : at::empty_like(all.gradients[i]);
  sgd_fused_call(options, all, scale, fresh != 0);
}

}  // namespace lockstep::detail
