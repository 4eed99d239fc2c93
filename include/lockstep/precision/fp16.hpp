#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/precision/detail/autocast.hpp"
#include "lockstep/precision/grad_scaler.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep {

/// Forward in float16 where autocast knows how, the loss scaled by a GradScaler of its own, parameters and
/// step in their own format: `torch.autocast(dtype=torch.float16)` with `torch.amp.GradScaler`. A step whose
/// gradients are not finite is left out. A checkpoint holds the scaler.
class Fp16 {
 public:
  /// A graph can hold it, with a fused optimizer; see CapturedStep.
  static constexpr bool capturable = true;

  Fp16() = default;
  explicit Fp16(const GradScalerOptions& options) : scaler_(options) {}

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const detail::AutocastScope scope(at::kHalf);
    return std::forward<Forward>(forward)();
  }

  at::Tensor scale(const at::Tensor& loss) { return scaler_.scale(loss); }
  /// The true gradients, for who looks at them or clips them before the step.
  void unscale(torch::optim::Optimizer& optimizer) { scaler_.unscale(optimizer); }
  /// All ranks skip the step that one must skip; see GradScaler::agree.
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
