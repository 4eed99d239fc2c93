#pragma once

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/sgd_steps.hpp"

namespace lockstep {

/// Stochastic gradient descent with Python's arithmetic (torch/optim/sgd.py): the parameters and the state of
/// `torch.optim.SGD` to the bit, for the same implementation, dtype and number of threads.
///
/// Sparse gradients are taken as Python takes them: not fused, and without weight decay.
class SGD : public detail::GroupedOptimizer<SGD, SgdState, SgdOptions> {
 public:
  static constexpr const char* name = "SGD";

  /// Throws UsageError for no parameters, for one that is there twice and for options out of range.
  explicit SGD(std::vector<at::Tensor> parameters, const SgdOptions& options = {})
      : GroupedOptimizer(std::move(parameters), options) {}
  /// The same with groups; one without options has the given ones.
  explicit SGD(std::vector<torch::optim::OptimizerParamGroup> groups, const SgdOptions& options = {})
      : GroupedOptimizer(std::move(groups), options) {}

 private:
  friend GroupedOptimizer;

  static const char* refusal(const SgdOptions& options, const at::Tensor& gradient) {
    if (!gradient.is_sparse()) return nullptr;
    if (options.implementation == Implementation::fused)
      return "is sparse, which a fused step does not take: choose another implementation";
    if (options.weight_decay != 0)
      return "is sparse, to which weight decay cannot be added: set weight_decay to 0 for its group";
    return nullptr;
  }

  static void prepare(const SgdOptions&, const at::Tensor&, SgdState&) {}

  // Without momentum the fused operator rounds as the loop does, in every vector width; with it, the last few
  // elements of a parameter may differ.
  static bool fused_is_equal(const SgdOptions& options, const detail::Active<SgdState>& all) {
    if (options.momentum != 0) return false;
    for (const at::Tensor& parameter : all.parameters)
      if (!parameter.is_non_overlapping_and_dense()) return false;
    const at::ScalarType type = all.parameters[0].scalar_type();
    return type == at::kFloat || type == at::kDouble;
  }

  static void step_group(const SgdOptions& options, detail::Active<SgdState>& group, const StepScale& scale) {
    detail::each_kind(group, [&](detail::Active<SgdState>& all) {
      bool sparse = false;
      for (const at::Tensor& gradient : all.gradients) sparse = sparse || gradient.is_sparse();
      const bool choose = options.implementation == Implementation::automatic;
      const bool on_cpu = all.parameters[0].is_cpu();
      const bool rate_on_device = options.lr_tensor.defined() && !options.lr_tensor.is_cpu();
      if (options.implementation == Implementation::fused ||
          (choose && !sparse && (on_cpu ? fused_is_equal(options, all) : rate_on_device)))
        detail::sgd_fused(options, all, scale);
      else if (sparse || (choose && on_cpu))
        detail::sgd_loop(options, all);
      else
        detail::sgd_foreach(options, all);
    });
  }
};

}  // namespace lockstep
