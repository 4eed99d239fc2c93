#pragma once

#include <torch/optim/optimizer.h>

#include <utility>
#include <vector>

#include "lockstep/optim/detail/optimizer.hpp"
#include "lockstep/optim/detail/sgd_steps.hpp"

namespace lockstep {

/// Implements stochastic gradient descent, bitwise equal to `torch.optim.SGD` in parameters and state for the
/// same implementation, dtype and number of threads.
///
/// Sparse gradients are supported as in Python: not with `fused` and not with weight decay.
///
/// Counterpart: torch.optim.SGD.
class SGD : public detail::GroupedOptimizer<SGD, SgdState, SgdOptions> {
 public:
  static constexpr const char* name = "SGD";
  /// CapturedStep can capture a fused step whose learning rate is a tensor.
  static constexpr bool capturable = true;

  /// Throws UsageError if there are no parameters, one is repeated, or an option is out of range.
  explicit SGD(std::vector<at::Tensor> parameters, const SgdOptions& options = {})
      : GroupedOptimizer(std::move(parameters), options) {}
  /// Constructs an optimizer of parameter groups. `options` are the defaults of groups without options.
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

  // Whether the fused operator rounds as the loop does. Without momentum it does. With momentum it rounds the
  // elements after the last whole vector differently, so there must be none: its threads and widest vectors
  // process up to 16 elements at once.
  static bool fused_is_equal(const SgdOptions& options, const at::Tensor& parameter,
                             const at::Tensor& gradient) {
    const at::ScalarType type = parameter.scalar_type();
    return (type == at::kFloat || type == at::kDouble) && !gradient.is_sparse() &&
           parameter.is_non_overlapping_and_dense() && (options.momentum == 0 || parameter.numel() % 16 == 0);
  }

  void step_group(const SgdOptions& options, detail::Active<SgdState>& group, const StepScale& scale) {
    detail::each_kind(group, [&](detail::Active<SgdState>& all) {
      const bool on_cpu = all.parameters[0].is_cpu();
      if (options.implementation == Implementation::automatic && on_cpu) return fastest_on_cpu(options, all);
      bool sparse = false;
      for (const at::Tensor& gradient : all.gradients) sparse = sparse || gradient.is_sparse();
      const bool rate_on_device = options.lr_tensor.defined() && !options.lr_tensor.is_cpu();
      if (options.implementation == Implementation::fused)
        detail::sgd_fused(options, all, scale);
      else if (sparse)
        detail::sgd_loop(options, all);
      else if (options.implementation == Implementation::automatic && rate_on_device)
        detail::sgd_fused(options, all, scale);
      else
        detail::sgd_foreach(options, all);
    });
  }

  // Uses the fused operator where it has the loop's bits.
  void fastest_on_cpu(const SgdOptions& options, detail::Active<SgdState>& all) {
    fused_.clear();
    looped_.clear();
    for (std::size_t i = 0; i < all.size(); ++i)
      (fused_is_equal(options, all.parameters[i], all.gradients[i]) ? fused_ : looped_)
          .add(all.parameters[i], all.gradients[i], all.states[i]);
    if (fused_.size() != 0) detail::sgd_fused(options, fused_, {});
    if (looped_.size() != 0) detail::sgd_loop(options, looped_);
    fused_.clear();
    looped_.clear();
  }

  detail::Active<SgdState> fused_, looped_;
};

}  // namespace lockstep
