#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/grad/detail/autograd.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void GraphSearch::run(at::ArrayRef<at::Tensor> roots) {
  seen_.clear();
  open_.clear();
  ends_.clear();
  for (const at::Tensor& root : roots)
    if (root.defined() && root.requires_grad())
      visit(torch::autograd::impl::gradient_edge(root).function.get());
  while (!open_.empty()) {
    const torch::autograd::Node* node = open_.back();
    open_.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
    if (node->num_outputs() == 0) ends_.push_back(node);
  }
}

}  // namespace lockstep::detail
