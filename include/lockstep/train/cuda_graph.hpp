#pragma once

// CUDA graphs for CapturedStep. Not part of lockstep.hpp: it needs CUDA headers, and a program that includes
// it links lockstep_cuda.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <memory>
#include <utility>

#include "lockstep/train/captured_step.hpp"

namespace lockstep {

/// The StepGraph over LibTorch's CUDAGraph, with a memory pool and a stream of its own. The capture is
/// thread-local: CUDA calls of other threads are neither captured nor an error.
class CudaGraph {
 public:
  /// Creates a stream of its own on `device`.
  explicit CudaGraph(const c10::Device& device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        graph_(std::make_unique<at::cuda::CUDAGraph>()) {}

  template <class Function>
  void on_stream(Function&& function) {
    const c10::cuda::CUDAGuard on_device(device_);
    const auto caller = c10::cuda::getCurrentCUDAStream(device_.index());
    const auto order = [](const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& then) {
      at::cuda::CUDAEvent event;
      event.record(first);
      event.block(then);
    };
    order(caller, stream_);
    {
      const c10::cuda::CUDAStreamGuard on_own(stream_);
      std::forward<Function>(function)();
    }
    order(stream_, caller);
  }

  template <class Function>
  void capture(Function&& function) {
    on_stream([&] {
      stream_.synchronize();  // once: the work of the warm-up is not part of the graph
      graph_->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      try {
        function();
      } catch (...) {
        try {
          graph_->capture_end();
        } catch (...) {  // the first exception is the cause
        }
        graph_ = std::make_unique<at::cuda::CUDAGraph>();
        throw;
      }
      graph_->capture_end();
    });
  }

  void replay() {
    const c10::cuda::CUDAGuard on_device(device_);
    graph_->replay();
  }

  /// Returns the device of the graph's stream.
  [[nodiscard]] c10::Device device() const { return device_; }

 private:
  c10::Device device_;
  c10::cuda::CUDAStream stream_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};

static_assert(StepGraph<CudaGraph>);

}  // namespace lockstep
