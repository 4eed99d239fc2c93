#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::inline v0_1::detail {

/// Calls `action()` each time a gradient has been accumulated into a leaf, from construction to destruction.
/// Leaves other hooks on the leaf in place. Objects that `action` refers to must not move.
template <class Action>
class AccumulateHook {
  struct Hook final : torch::autograd::FunctionPostHook {
    explicit Hook(Action action) : action(std::move(action)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      action();
      return outputs;  // always empty: an accumulator is a sink of the graph
    }
    Action action;
  };

 public:
  AccumulateHook(const at::Tensor& leaf, Action action)
      : accumulator_(torch::autograd::impl::grad_accumulator(leaf)),
        key_(accumulator_->add_post_hook(std::make_unique<Hook>(std::move(action)))) {}
  AccumulateHook(AccumulateHook&& other) noexcept
      : accumulator_(std::move(other.accumulator_)), key_(other.key_) {
    other.accumulator_ = nullptr;
  }
  AccumulateHook& operator=(AccumulateHook&&) = delete;
  [[nodiscard]] const torch::autograd::Node* node() const { return &*accumulator_; }
  /// Returns whether gradients of the leaf still reach the hook: a conversion to another dtype or device
  /// discards the leaf's accumulator.
  [[nodiscard]] bool reaches(const at::Tensor& leaf) const {
    const auto now = torch::autograd::impl::try_get_grad_accumulator(leaf);
    return now && &*now == node();
  }
  ~AccumulateHook() {
    if (accumulator_) accumulator_->del_post_hook(key_);
  }

 private:
  // Keeps the accumulator, which owns the hook, alive: the leaf holds it weakly. The type of the pointer
  // differs between versions of LibTorch.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) accumulator_;
  std::uintptr_t key_;
};

/// Finds the autograd nodes that a backward can reach, but not those of a re-entrant backward (a checkpoint). A
/// graph no larger than the last one needs no new memory.
class GraphSearch {
 public:
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

/// Queues a callback for the end of the backward that the engine is running: calls `end(true)`, or
/// `end(false)` if the backward throws and the engine drops the callback.
template <class End>
void at_end_of_backward(End end) {
  struct Token {
    explicit Token(End end) : end(std::move(end)) {}
    ~Token() {
      if (!ended) end(false);
    }
    End end;
    bool ended = false;
  };
  torch::autograd::Engine::get_default_engine().queue_callback(
      [token = std::make_shared<Token>(std::move(end))] {
        token->ended = true;
        token->end(true);
      });
}

}  // namespace lockstep::inline v0_1::detail
