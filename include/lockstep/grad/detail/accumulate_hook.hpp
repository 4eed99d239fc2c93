#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace lockstep::detail {

/// An owning pointer to a leaf's gradient accumulator, which the leaf itself holds weakly. The pointer type
/// differs between versions of LibTorch.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Sets the accumulator of a leaf that has the dtype again for which the accumulator was created.
template <class Pointer>
void set_accumulator(const at::Tensor& leaf, const Pointer& accumulator) {
  if constexpr (requires { typename Pointer::weak_type; })
    torch::autograd::impl::set_grad_accumulator(leaf, typename Pointer::weak_type(accumulator));
  else
    torch::autograd::impl::set_grad_accumulator(
        leaf, c10::weak_intrusive_ptr<typename Pointer::element_type>(accumulator));
}

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
  ~AccumulateHook() {
    if (accumulator_) accumulator_->del_post_hook(key_);
  }

 private:
  Accumulator accumulator_;  // keeps the accumulator, which owns the hook, alive
  std::uintptr_t key_;
};

}  // namespace lockstep::detail
