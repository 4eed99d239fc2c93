#pragma once

#include "lockstep/optim/clip.hpp"
#include "lockstep/train/gradient_hooks.hpp"

namespace lockstep {

/// A GradientHook that scales the gradients of a step down to a norm of at most `max_norm`, over all
/// parameters together; see clip_grad_norm. Errors name the parameters.
struct GradientClip {
  double max_norm = 1;
  ClipOptions options = {};

  void on_gradients(const Gradients& gradients) const {
    detail::clip_norm(gradients.named_parameters, max_norm, options);
  }
};

}  // namespace lockstep
