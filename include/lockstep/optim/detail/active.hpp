#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <utility>
#include <vector>

#include "lockstep/precision/precision.hpp"

namespace lockstep::detail {

/// The parameters of a group that have a gradient, in the group's order, with their gradients and states.
template <class State>
struct Active {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<State*> states;
  // Lists of the states' tensors, kept from step to step to avoid allocations.
  std::array<std::vector<at::Tensor>, 4> columns;

  [[nodiscard]] std::size_t size() const { return parameters.size(); }
  void clear() {
    parameters.clear();
    gradients.clear();
    states.clear();
    for (auto& column : columns) column.clear();
  }
  void add(at::Tensor parameter, at::Tensor gradient, State* state) {
    parameters.push_back(std::move(parameter));
    gradients.push_back(std::move(gradient));
    states.push_back(state);
  }
  /// Fills column `index` with a tensor of each state and returns it.
  std::vector<at::Tensor>& column(std::size_t index, at::Tensor State::*tensor) {
    auto& list = columns[index];
    list.clear();
    for (State* state : states) list.push_back(state->*tensor);
    return list;
  }
};

inline bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

/// Calls `work` once for each dtype and device among the parameters: foreach and fused operators take lists
/// of one dtype and device.
template <class State, class Work>
void each_kind(Active<State>& all, Work&& work) {
  bool alike = true;
  for (const at::Tensor& parameter : all.parameters) alike = alike && same_kind(parameter, all.parameters[0]);
  if (alike) return work(all);
  std::vector<Active<State>> kinds;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::size_t kind = 0;
    while (kind < kinds.size() && !same_kind(kinds[kind].parameters[0], all.parameters[i])) ++kind;
    if (kind == kinds.size()) kinds.emplace_back();
    kinds[kind].add(all.parameters[i], all.gradients[i], all.states[i]);
  }
  for (auto& kind : kinds) work(kind);
}

/// Returns a scalar as Python's operators take it: a wrapped-number tensor. For bfloat16, C++'s
/// `tensor.mul_(number)` rounds the number first; a wrapped number is not rounded.
inline at::Tensor as_python_does(double number) {
  return at::native::wrapped_scalar_tensor(number);
}

/// Copies each gradient whose strides differ from its parameter's into the parameter's layout: the fused
/// operators ignore strides.
template <class State>
void align_gradients(Active<State>& all) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    at::Tensor& gradient = all.gradients[i];
    if (gradient.strides() != all.parameters[i].strides())
      gradient = at::empty_like(all.parameters[i]).copy_(gradient);
  }
}

}  // namespace lockstep::detail
