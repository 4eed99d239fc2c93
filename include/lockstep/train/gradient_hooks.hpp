#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/named_tensors.hpp"

namespace lockstep {

/// The gradients of one optimizer step: of all its micro-batches and ranks, and not yet used.
struct Gradients {
  /// Counted from 0, over all that the trainer did so far.
  std::int64_t epoch, step;
  /// Each parameter once, in the model's order, with its gradient in `grad()`; undefined where it has none.
  const std::vector<at::Tensor>& parameters;
  /// The same with names.
  const std::vector<NamedTensor>& named_parameters;
  /// The norm of all gradients together, one element, as a GradientHook has found it before it changed them,
  /// for the hooks after it and StepReport::total_norm; undefined before. GradientClip sets it.
  at::Tensor& total_norm;
  /// Whether what is not a number on one rank is so on all: not with every communication hook.
  bool spread_nan = true;
};

/// Work of the user's own between backward and the optimizer's step, on every rank, such as clipping:
/// `on_gradients(gradients)`. First comes the one among the Trainer's extras, then those given to `fit`, in
/// their order: `fit(data, loss, OnGradients{look}, GradientClip{1})` looks at gradients that are not yet
/// clipped. The gradients are equal on all ranks, and may be changed in place, on all ranks
/// alike. A precision that scales its losses undoes that before, by an `unscale(optimizer)` of its own, after
/// which its `step` does not do it again; one without it shows the gradients scaled.
template <class E>
concept GradientHook = requires(E& extra, const Gradients& gradients) {
  extra.on_gradients(gradients);
};

/// A look at the gradients before anything uses them. `watch(named_parameters)` is called once, before the
/// first backward, and may put hooks on the parameters, to be removed by the destructor. `check(gradients,
/// comm)` is called after each step's backward, on every rank, before any GradientHook; where it throws,
/// every rank throws the same, and the step is not made. A step that fails before it may have no `check`:
/// where there is a `begin_step()`, it is called before the first forward of each.
template <class E>
concept GradientCheck = requires(E& extra, const std::vector<NamedTensor>& parameters,
                                 const Gradients& gradients, LocalComm& comm) {
  extra.watch(parameters);
  extra.check(gradients, comm);
};

/// A GradientHook of a function `(const Gradients&)`.
template <class Function>
struct OnGradients {
  Function function;
  void on_gradients(const Gradients& gradients) { function(gradients); }
};
template <class Function>
OnGradients(Function) -> OnGradients<Function>;

}  // namespace lockstep
