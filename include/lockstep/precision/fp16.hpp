#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/precision/detail/autocast.hpp"
#include "lockstep/precision/grad_scaler.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep {

/// Runs the forward in float16 where autocast supports it and scales the loss by its own GradScaler;
/// parameters and the optimizer step keep their own dtype. Skips a step whose gradients are not finite.
/// Checkpoints store the scaler.
///
/// Counterpart: torch.autocast(dtype=torch.float16) with torch.amp.GradScaler.
class Fp16 {
 public:
  /// CapturedStep can capture it with a fused optimizer.
  static constexpr bool capturable = true;

  Fp16() = default;
  explicit Fp16(const GradScalerOptions& options) : scaler_(options) {}

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kHalf);
    return std::forward<Forward>(forward)();
  }

  at::Tensor scale(const at::Tensor& loss) { return scaler_.scale(loss); }
  /// Divides the gradients by the scale, to inspect or clip them before the step.
  void unscale(torch::optim::Optimizer& optimizer) { scaler_.unscale(optimizer); }
  /// Makes all ranks skip a step that one rank must skip; see GradScaler::agree. Collective.
  template <Reducing Comm>
  void agree(torch::optim::Optimizer& optimizer, Comm& comm) {
    scaler_.agree(optimizer, comm);
  }
  StepOutcome step(torch::optim::Optimizer& optimizer) {
    StepOutcome stepped = scaler_.step(optimizer);
    scaler_.update();
    return stepped;
  }

  void forget() { scaler_.forget(); }

  [[nodiscard]] const GradScaler& scaler() const { return scaler_; }
  void save(torch::serialize::OutputArchive& archive) const { scaler_.save(archive); }
  void load(torch::serialize::InputArchive& archive) { scaler_.load(archive); }

 private:
  GradScaler scaler_;
};

}  // namespace lockstep
