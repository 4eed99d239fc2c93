#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/rmsprop.h>

#include <cstddef>
#include <string>
#include <utility>

#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/optim/detail/optimizer.hpp"
#include "lockstep/train/detail/optimizer_check.hpp"
#include "lockstep/train/detail/optimizer_state.hpp"

namespace lockstep::inline v0_1::detail {

/// Compares a state of torch::optim::RMSprop or Adagrad with its parameter. Finds no faults in other states.
inline StateFaults faults_of_other(const torch::optim::OptimizerParamState* state,
                                   const torch::optim::OptimizerParamGroup& group,
                                   const at::Tensor& parameter, const std::string& where) {
  StateFaults faults{.any = true};
  const auto check = [&](const char* field, const at::Tensor& tensor, bool required) {
    if (!tensor.defined() && required) faults.missing.emplace_back(field);
    if (tensor.defined() &&
        (tensor.sizes() != parameter.sizes() || tensor.scalar_type() != parameter.scalar_type()))
      faults.others.push_back(
          formatted("{} of {} is {}, the parameter {}", field, where, describe(tensor), describe(parameter)));
  };
  const auto* options = dynamic_cast<const torch::optim::RMSpropOptions*>(&group.options());
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropParamState*>(state)) {
    check("square_avg", rmsprop->square_avg(), true);
    check("momentum_buffer", rmsprop->momentum_buffer(), options && options->momentum() > 0);
    check("grad_avg", rmsprop->grad_avg(), options && options->centered());
  } else if (const auto* adagrad = dynamic_cast<const torch::optim::AdagradParamState*>(state)) {
    check("sum", adagrad->sum(), true);
  }
  return faults;
}

LOCKSTEP_INLINE void check_states(torch::optim::Optimizer& optimizer) {
  write_whole(optimizer, [](torch::optim::Optimizer& whole) {
    auto& groups = whole.param_groups();
    const auto each_state = [&](const auto& faults_of) {
      for (std::size_t g = 0; g < groups.size(); ++g)
        for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
          const auto found = whole.state().find(groups[g].params()[i].unsafeGetTensorImpl());
          if (found == whole.state().end()) continue;
          const std::string where = formatted("parameter {} of group {}", i, g);
          StateFaults faults = faults_of(found->second.get(), groups[g], groups[g].params()[i], where);
          if (!faults.any) whole.state().erase(found);  // torch::optim::SGD would read its undefined tensor
          refuse_faults(std::move(faults), where, "the optimizer");
        }
    };
    const auto check = [&]<class Adapter>(Adapter) {
      for (std::size_t g = 0; g < groups.size(); ++g) Adapter::options(groups[g]).check(g);
      each_state([](const auto* state, const auto& group, const at::Tensor& parameter, const auto& where) {
        if (!state) return StateFaults{.any = true, .others = {"two parameters have one key"}};
        return state_faults(Adapter::state(*state), Adapter::options(group), parameter, where,
                            /*converted=*/false);
      });
    };
    if (!visit_optimizer(whole, check, /*required=*/false)) each_state(faults_of_other);
  });
}

}  // namespace lockstep::inline v0_1::detail
