#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/ops/scalar_tensor.h>

#include "lockstep/error.hpp"
#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/optim/optimizers.hpp"

/// The options and states of lockstep's optimizers and of LibTorch's as values of one kind.
namespace lockstep::inline v0_1::detail {

/// Adapts lockstep's optimizers to the functions below.
template <class Values, class Kept>
struct LockstepOptimizer {
  using Options = Values;
  using State = Kept;
  static constexpr bool maximizes = true;

  static Options options(const torch::optim::OptimizerParamGroup& group) {
    Options values = static_cast<const GroupOptions<Options>&>(group.options()).values;
    values.lr = group.options().get_lr();
    return values;
  }
  static void set_options(torch::optim::OptimizerParamGroup& group, const Options& options) {
    auto& kept = static_cast<GroupOptions<Options>&>(group.options());
    kept.values = options;
    kept.set_lr(options.lr);
  }
  static State state(const torch::optim::OptimizerParamState& kept) {
    return static_cast<const State&>(kept);
  }
  static std::unique_ptr<torch::optim::OptimizerParamState> new_state(State state) {
    return std::make_unique<State>(std::move(state));
  }
};

/// Reads and writes the options of LibTorch's optimizers, which `Adapter::each_option` pairs with lockstep's.
template <class Own, class Values, class Adapter>
struct TorchOptions {
  using Options = Values;
  static constexpr bool maximizes = false;

  static Options options(const torch::optim::OptimizerParamGroup& group) {
    Options values;
    Adapter::each_option(static_cast<const Own&>(group.options()), values,
                         [](const auto& from, auto& to) { to = from; });
    return values;
  }
  static void set_options(torch::optim::OptimizerParamGroup& group, const Options& values) {
    Adapter::each_option(static_cast<Own&>(group.options()), values,
                         [](auto& to, const auto& from) { to = from; });
  }
};

/// Adapts torch::optim::SGD. Its options and states are those of lockstep's, but for `maximize`.
struct TorchSgd : TorchOptions<torch::optim::SGDOptions, SGDOptions, TorchSgd> {
  using State = SGDState;

  template <class Own, class Values, class Copy>
  static void each_option(Own& own, Values& values, const Copy& copy) {
    copy(own.lr(), values.lr);
    copy(own.momentum(), values.momentum);
    copy(own.dampening(), values.dampening);
    copy(own.weight_decay(), values.weight_decay);
    copy(own.nesterov(), values.nesterov);
  }
  static State state(const torch::optim::OptimizerParamState& kept) {
    State state;
    state.momentum_buffer = static_cast<const torch::optim::SGDParamState&>(kept).momentum_buffer();
    return state;
  }
  static std::unique_ptr<torch::optim::OptimizerParamState> new_state(const State& state) {
    auto made = std::make_unique<torch::optim::SGDParamState>();
    made->momentum_buffer(state.momentum_buffer);
    return made;
  }
};

/// Adapts torch::optim::Adam and AdamW, which count steps in an integer.
template <class Own, class OwnState, bool decoupled>
struct TorchAdam : TorchOptions<Own, AdamOptions, TorchAdam<Own, OwnState, decoupled>> {
  using State = AdamState;

  template <class Group, class Values, class Copy>
  static void each_option(Group& own, Values& values, const Copy& copy) {
    copy(own.lr(), values.lr);
    copy(std::get<0>(own.betas()), values.betas[0]);
    copy(std::get<1>(own.betas()), values.betas[1]);
    copy(own.eps(), values.eps);
    copy(own.weight_decay(), values.weight_decay);
    copy(own.amsgrad(), values.amsgrad);
    if constexpr (!std::is_const_v<Values>) values.decoupled = decoupled;
  }
  static State state(const torch::optim::OptimizerParamState& kept) {
    const auto& own = static_cast<const OwnState&>(kept);
    State state;
    state.step = at::scalar_tensor(own.step(), at::kFloat);
    state.exp_avg = own.exp_avg();
    state.exp_avg_sq = own.exp_avg_sq();
    state.max_exp_avg_sq = own.max_exp_avg_sq();
    return state;
  }
  static std::unique_ptr<torch::optim::OptimizerParamState> new_state(const State& state) {
    auto made = std::make_unique<OwnState>();
    made->step(static_cast<std::int64_t>(step_value(state)));
    made->exp_avg(state.exp_avg);
    made->exp_avg_sq(state.exp_avg_sq);
    made->max_exp_avg_sq(state.max_exp_avg_sq);
    return made;
  }
};

/// Calls `visit(adapter)` for the optimizer's type. Returns false for another type, or throws UsageError if `required`.
template <class Visit>
bool visit_optimizer(const torch::optim::Optimizer& optimizer, const Visit& visit, bool required = true) {
  if (dynamic_cast<const SGD*>(&optimizer)) return visit(LockstepOptimizer<SGDOptions, SGDState>{}), true;
  if (dynamic_cast<const Adam*>(&optimizer)) return visit(LockstepOptimizer<AdamOptions, AdamState>{}), true;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return visit(TorchSgd{}), true;
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer))
    return visit(TorchAdam<torch::optim::AdamOptions, torch::optim::AdamParamState, false>{}), true;
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer))
    return visit(TorchAdam<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>{}), true;
  if (!required) return false;
  throw UsageError(
      "state_dict: only SGD, Adam and AdamW, of lockstep or torch::optim, have Python's layout: save another "
      "optimizer by its save(archive)");
}

/// Calls `write` with the optimizer that has all groups: the one inside a sharded optimizer.
template <class Write>
void write_whole(torch::optim::Optimizer& optimizer, const Write& write) {
  if (auto* sharded = dynamic_cast<ShardedState*>(&optimizer))
    sharded->write_full_state(write);
  else
    write(optimizer);
}

}  // namespace lockstep::inline v0_1::detail
