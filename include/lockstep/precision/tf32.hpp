#pragma once

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep {

/// A scope in which products of float32 tensors may round their factors to TensorFloat-32 (10 bits of
/// mantissa, sums in float32), in the whole process. The destructor restores the previous settings of
/// LibTorch:
///
/// - matrix products, as by `torch.set_float32_matmul_precision("high")`: cuBLAS on a GPU; on a CPU oneDNN,
///   which uses it on processors with such units (AMX) and computes in float32 elsewhere;
/// - convolutions and recurrent layers on a GPU, as by `torch.backends.cudnn.allow_tf32 = True`, which is
///   LibTorch's default.
///
/// Destroy scopes in reverse order of construction. Throws UsageError if LibTorch's settings of single
/// backends contradict each other, since they could not be restored.
class Tf32Scope {
 public:
  Tf32Scope() try
      : matmul_(name_of(at::globalContext().float32MatmulPrecision())),
        cudnn_(at::globalContext().allowTF32CuDNN()) {
    at::globalContext().setFloat32MatmulPrecision("high");
    at::globalContext().setAllowTF32CuDNN(true);
  } catch (const c10::Error& error) {
    throw UsageError(detail::formatted(
        "Tf32: LibTorch's float32 settings of single backends contradict each other, and could "
        "not be put back: leave them as they are ({})",
        error.what_without_backtrace()));
  }
  Tf32Scope(const Tf32Scope&) = delete;
  Tf32Scope& operator=(const Tf32Scope&) = delete;
  ~Tf32Scope() {
    at::globalContext().setFloat32MatmulPrecision(matmul_);
    at::globalContext().setAllowTF32CuDNN(cudnn_);
  }

 private:
  static const char* name_of(at::Float32MatmulPrecision precision) {
    switch (precision) {
      case at::Float32MatmulPrecision::HIGH:
        return "high";
      case at::Float32MatmulPrecision::MEDIUM:
        return "medium";
      default:
        return "highest";
    }
  }

  std::string matmul_;
  bool cudnn_;
};

/// Runs the forward, and from `scale` to `step` the backward and its reduction, with TensorFloat-32 allowed;
/// the optimizer step is in float32. See Tf32Scope for its effect on each device. Needs no loss scaling: the
/// range is that of float32.
class Tf32 {
 public:
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) const {
    const Tf32Scope scope;
    return std::forward<Forward>(forward)();
  }

  const at::Tensor& scale(const at::Tensor& loss) {
    if (!backward_) backward_ = std::make_unique<Tf32Scope>();
    return loss;
  }

  bool step(torch::optim::Optimizer& optimizer) {
    backward_.reset();
    optimizer.step();
    return true;
  }

  /// Leaves the scope of an abandoned backward.
  void forget() { backward_.reset(); }

 private:
  std::unique_ptr<Tf32Scope> backward_;
};

}  // namespace lockstep
