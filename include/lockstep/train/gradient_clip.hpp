#pragma once

#include "lockstep/comm/agreement.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/train/extras.hpp"

namespace lockstep {

/// A GradientCallback that scales the gradients of a step to a total norm of at most `max_norm`, over all
/// parameters together; see clip_grad_norm. It sets Gradients::total_norm to the norm before clipping, for
/// later GradientCallbacks, which see clipped gradients, and for StepReport::total_norm. Errors name the
/// parameters.
/// Counterpart: torch.nn.utils.clip_grad_norm_.
struct GradientClip {
  /// A graph can capture it unless `error_if_nonfinite` is set, which reads the norm; see CapturedStep.
  static constexpr bool capturable = true;

  double max_norm = 1;
  ClipOptions options = {};

  /// Throws UsageError if `error_if_nonfinite` is set.
  void check_capturable() const {
    if (options.error_if_nonfinite)
      throw UsageError(
          "GradientClip: error_if_nonfinite reads the norm on the host, which a graph cannot do: leave it "
          "off");
  }

  void on_gradients(const Gradients& gradients) const try {
    gradients.total_norm = detail::clip_norm(gradients.named_parameters, max_norm, options);
  } catch (const GradientError& error) {
    // Every rank throws for equal gradients, so that no abort is needed.
    if (gradients.spread_nan) throw detail::Common<GradientError>(error.what());
    throw;
  }
};

}  // namespace lockstep
