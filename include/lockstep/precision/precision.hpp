#pragma once

#include <ATen/core/Tensor.h>

#include <torch/optim/optimizer.h>
#include <concepts>

namespace lockstep {

/// In which number format a step runs. One lives as long as its optimizer; the training loop calls it three
/// times a step, in this order:
///
/// 1. `forward(f)` runs `f()` - the model's forward and the loss, or an evaluation - in the precision's
///    context and returns its result unchanged; the context is left whatever `f` throws.
/// 2. `scale(loss)` gives the tensor that backward starts from. The gradients that backward accumulates are
///    those of this tensor, so that the reduction over the ranks sees them scaled alike.
/// 3. `step(optimizer)` undoes the scale in the gradients, which are reduced by now, and steps the optimizer.
///    It returns whether it stepped: false where the precision refused gradients that are not finite. The
///    answer is the same on every rank. Where only the device knows it so far, it is a StepOutcome, which
///    waits when it is asked.
///
/// Two more calls may come between 2 and 3 where it has them: `agree(optimizer, comm)`, collective, for
/// reductions that do not carry what is not finite to every rank; `unscale(optimizer)`, after which whoever
/// looks at the gradients sees the true ones; and in place of 3 `forget()`, where something threw. One that
/// has `save` and `load` is kept in checkpoints.
template <class P>
concept Precision = std::movable<P> && std::default_initializable<P> &&
    requires(P& precision, at::Tensor (*forward)(), const at::Tensor& loss,
             torch::optim::Optimizer& optimizer) {
  { precision.forward(forward) } -> std::same_as<at::Tensor>;
  { precision.scale(loss) } -> std::convertible_to<at::Tensor>;
  { precision.step(optimizer) } -> std::convertible_to<bool>;
};

/// One that scales losses, so that gradients are not the true ones before `unscale`.
template <class P>
concept ScalingPrecision = Precision<P> && requires(P& precision, torch::optim::Optimizer& optimizer) {
  precision.unscale(optimizer);
};

}  // namespace lockstep
