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
  // Lists of the states' tensors, kept from step to step so that filling them allocates nothing.
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
  /// Fills a column with a tensor of each state.
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

/// Calls `work` on all, or where they differ in dtype or device once for each kind: lists of foreach and
/// fused operators are of one kind.
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

/// A number as Python's operators take it, a tensor that counts as a number. For bfloat16,
/// `tensor.mul_(number)` of C++ rounds the number first and this does not.
inline at::Tensor as_python_does(double number) {
  return at::native::wrapped_scalar_tensor(number);
}

/// The fused operators walk through memory without looking at strides: a gradient laid out otherwise than its
/// parameter is copied into the parameter's layout.
template <class State>
void align_gradients(Active<State>& all) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    at::Tensor& gradient = all.gradients[i];
    if (gradient.strides() != all.parameters[i].strides())
      gradient = at::empty_like(all.parameters[i]).copy_(gradient);
  }
}

}  // namespace lockstep::detail
