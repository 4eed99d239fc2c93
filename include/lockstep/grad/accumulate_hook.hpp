#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace lockstep::detail {

/// Calls `action()` each time a gradient has been accumulated into a leaf, from construction to destruction.
/// Such hooks stack: those of the user and of others stay as they are. What `action` refers to must not move.
template <class Action>
class AccumulateHook {
  struct Hook final : torch::autograd::FunctionPostHook {
    explicit Hook(Action action) : action(std::move(action)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      action();
      return outputs;  // always empty: accumulating is the end of the graph
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
  ~AccumulateHook() {
    if (accumulator_) accumulator_->del_post_hook(key_);
  }

 private:
  // A tensor holds its accumulator weakly: this keeps it, and with it the hook, alive. The pointer's type
  // differs between LibTorch's versions.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) accumulator_;
  std::uintptr_t key_;
};

}  // namespace lockstep::detail
