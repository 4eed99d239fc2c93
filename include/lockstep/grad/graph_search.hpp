#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <vector>

namespace lockstep::detail {

using GraphNodes = std::unordered_set<const torch::autograd::Node*>;

/// The nodes that a backward from `roots` can reach, the accumulators of leaves among them. What a node runs
/// in a backward of its own (a checkpoint) is not seen.
inline GraphNodes reachable_nodes(const std::vector<at::Tensor>& roots) {
  GraphNodes seen;
  std::vector<const torch::autograd::Node*> open;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node && seen.insert(node).second) open.push_back(node);
  };
  for (const at::Tensor& root : roots)
    if (root.defined() && root.requires_grad())
      visit(torch::autograd::impl::gradient_edge(root).function.get());
  while (!open.empty()) {
    const torch::autograd::Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return seen;
}

}  // namespace lockstep::detail
