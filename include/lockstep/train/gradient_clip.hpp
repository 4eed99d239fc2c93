#pragma once

#include "lockstep/comm/detail/same_errors.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/train/extras.hpp"

namespace lockstep {

/// A GradientCallback that scales the gradients of a step down to a norm of at most `max_norm`, over all
/// parameters together; see clip_grad_norm. The norm that it found is in Gradients::total_norm for the
/// GradientCallbacks after it, which see clipped gradients, and in StepReport::total_norm. Errors name the
/// parameters.
struct GradientClip {
  /// A graph can hold it without `error_if_nonfinite`, which reads the norm; see CapturedStep.
  static constexpr bool capturable = true;

  double max_norm = 1;
  ClipOptions options = {};

  /// Throws UsageError where a graph cannot hold it.
  void check_capturable() const {
    if (options.error_if_nonfinite)
      throw UsageError(
          "GradientClip: error_if_nonfinite reads the norm on the host, which a graph cannot do: leave it "
          "off");
  }

  void on_gradients(const Gradients& gradients) const try {
    gradients.total_norm = detail::clip_norm(gradients.named_parameters, max_norm, options);
  } catch (const GradientError& error) {
    // Equal gradients are refused on every rank: nobody has to be told.
    if (gradients.spread_nan) throw detail::Common<GradientError>(error.what());
    throw;
  }
};

}  // namespace lockstep
