#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace lockstep::detail {

/// Finds the autograd nodes that a backward can reach, including the accumulators of leaves. Does not see the
/// nodes of a re-entrant backward (a checkpoint). Reuse the object: a graph no larger than the last one needs
/// no new memory.
class GraphSearch {
 public:
  /// Traverses the graph from `roots`.
  void run(at::ArrayRef<at::Tensor> roots) {
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
  /// Returns the sinks that the last `run` reached, including the accumulators of leaves.
  [[nodiscard]] const std::vector<const torch::autograd::Node*>& ends() const { return ends_; }
  /// Returns whether the last `run` reached the node.
  [[nodiscard]] bool reached(const torch::autograd::Node* node) const {
    return seen_.find(node) != seen_.end();
  }

 private:
  void visit(const torch::autograd::Node* node) {
    if (node && seen_.insert(node).second) open_.push_back(node);
  }

  ska::flat_hash_set<const torch::autograd::Node*> seen_;
  std::vector<const torch::autograd::Node*> open_, ends_;
};

}  // namespace lockstep::detail
