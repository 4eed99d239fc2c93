#pragma once

#include <any>

#ifdef LOCKSTEP_HAS_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#endif

#include "lockstep/data/dataset.hpp"
#include "lockstep/train/detail/training_step.hpp"

namespace lockstep::inline v0_1 {

/// A part of a training step that a graph can capture and replay. A type opts in with `static constexpr bool
/// capturable = true`: it never reads a device value on the host; its operators, shapes and memory are the same
/// in every step, except for memory that it allocates and frees within the step; and values that change from
/// step to step (a rate, a scale, a count) live in tensors. Its host code runs once, at capture.
///
/// If options decide whether it is capturable, `check_capturable()` throws UsageError. A communicator may have
/// `watch_replay(replay)`: it calls `replay()` once unless it has failed, and watches the replayed collectives.
template <class T>
concept Capturable = requires {
  requires bool(std::remove_cvref_t<T>::capturable);
};

/// Options of a CapturedStep.
struct CaptureOptions {
  /// Eager steps before the capture, 2 or more. They allocate memory, order the buckets and let libraries
  /// select their kernels.
  std::int64_t num_warmup_iters = 3;
  DdpOptions ddp = {};  ///< Of the wrapper of the model.
};

namespace detail {
inline namespace LOCKSTEP_DEVICES {
#ifdef LOCKSTEP_HAS_CUDA
/// A graph of LibTorch with a memory pool and a stream of its own.
class StepGraph {
 public:
  explicit StepGraph(const c10::Device& device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        graph_(std::make_unique<at::cuda::CUDAGraph>()) {}

  /// Runs `function()` with the graph's stream as the current stream, ordered after all prior work and before
  /// all later work on the caller's stream. Does not block the host.
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

  /// Runs `function()` once, as on_stream does, but records the stream's work instead of executing it. CUDA
  /// calls of other threads are not captured. If `function` throws, drops the recording and rethrows.
  template <class Function>
  void capture(Function&& function) {
    on_stream([&] {
      stream_.synchronize();  // once: the work of the warm-up is not part of the graph
      graph_->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      try {
        const CaptureScope nothing_is_read;
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

 private:
  c10::Device device_;
  c10::cuda::CUDAStream stream_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
};
#else
/// Stands for the graph in a program without CUDA.
struct StepGraph {
  explicit StepGraph(const c10::Device& device) {
    throw UsageError(
        formatted("CapturedStep: this program was built without CUDA, and {} needs it: link lockstep::cuda",
                  device.str()));
  }
  void on_stream(const auto& function) { function(); }
  void capture(const auto& function) { function(); }
  void replay() {}
};
#endif
}  // namespace LOCKSTEP_DEVICES

template <class Comm, class Optimizer, class PrecisionType, class Hook, class... GradientCallbacks>
struct CheckedCapture {
  static_assert(Capturable<Comm>,
                "lockstep: a CapturedStep needs a communicator whose collectives a graph can hold, such as "
                "lockstep::NcclComm or lockstep::LocalComm; those of GlooComm block the host");
  static_assert(Capturable<Optimizer>,
                "lockstep: a CapturedStep needs an optimizer whose rate and state live in tensors, such as "
                "lockstep::SGD, Adam or AdamW; those of torch::optim keep numbers that a graph would repeat");
  static_assert(Capturable<PrecisionType> && Precision<PrecisionType>,
                "lockstep: a CapturedStep needs a precision that decides on the device alone: Fp32, Tf32, "
                "Bf16, Fp16, or one of your own that says static constexpr bool capturable = true");
  static_assert(Capturable<Hook> && HookPolicy<Hook>,
                "lockstep: a CapturedStep needs a communication hook that does the same in every step, such "
                "as AllReduceHook, Fp16Hook or Bf16Hook; PowerSgdHook and hooks of functions do not promise "
                "it");
  static_assert(
      ((Capturable<GradientCallbacks> && GradientCallback<GradientCallbacks>)&&...),
      "lockstep: between backward and step a CapturedStep takes GradientCallbacks that decide on the "
      "device alone, such as GradientClip; CheckFinite and functions look at values on the host");
};

// The micro-batch source of a step with one batch, whose mean loss has the weight 1.
template <class B>
class SingleBatchSource {
 public:
  using Batch = B;
  static constexpr bool counts_beforehand = true;

  explicit SingleBatchSource(Batch& batch) : batch_(&batch) {}

  void begin_step() {}
  Batch* next() { return std::exchange(batch_, nullptr); }
  [[nodiscard]] bool last() const { return true; }
  [[nodiscard]] LocalLoss weigh(const at::Tensor& mean, const Batch&) const {
    return {mean, mean.detach(), 1, 1};
  }
  [[nodiscard]] double samples(int ranks) const { return ranks; }

 private:
  Batch* batch_;
};
}  // namespace detail

inline namespace LOCKSTEP_DEVICES {

/// Captures a model's forward, backward, reduction and optimizer step as one graph of a GPU. The first steps
/// run eagerly, the next one is captured, and later calls replay it with the new batch's data, at the cost of
/// one launch. On the CPU every step runs eagerly.
///
/// ```cpp
/// lockstep::SGD optimizer{model->parameters(),
///                         {.implementation = Implementation::fused, .lr_tensor = rate}};
/// lockstep::CapturedStep step{device, model, comm, optimizer, precision, loss};
/// for (auto& batch : lockstep::StagedBatches{loader, device}) {
///   optimizer.param_groups()[0].options().set_lr(curve(t++));  // into the tensor
///   step(batch);
/// }
/// ```
///
/// `loss(model, batch)` returns the mean over the batch. Every batch has the shapes of the first one: drop a
/// last batch that is not full. Host code that is not a tensor operator, such as a branch of the forward or a
/// print, runs once, at capture. Any schedule works: it writes into the rate's tensor before the call.
///
/// Model, communicator, optimizer and precision must outlive it. Not thread-safe. Collective.
/// Counterpart: torch.cuda.make_graphed_callables.
template <class M, class Comm, class Optimizer, class PrecisionType, class Loss, class Hook = AllReduceHook,
          class... GradientCallbacks>
class CapturedStep : detail::CheckedCapture<Comm, Optimizer, PrecisionType, Hook, GradientCallbacks...> {
 public:
  /// `device` is the model's. Throws UsageError for a GPU in a program without CUDA, and on every device for
  /// options that a graph cannot capture. Collective.
  CapturedStep(const c10::Device& device, M& model, Comm& comm, Optimizer& optimizer,
               PrecisionType& precision, Loss loss, const CaptureOptions& options = {}, Hook hook = {},
               GradientCallbacks... callbacks)
      : device_(device),
        comm_(comm),
        loss_(std::move(loss)),
        options_(options),
        callbacks_(std::move(callbacks)...) {
    if (options.num_warmup_iters < 2)
      throw UsageError(detail::formatted(
          "CapturedStep: num_warmup_iters is {}: give 2 or more, since the second step orders the buckets",
          options.num_warmup_iters));
    if (options.ddp.static_graph && options.num_warmup_iters < 3)
      throw UsageError(
          "CapturedStep: num_warmup_iters is 2: give 3 or more with DdpOptions::static_graph, since the "
          "third step orders the buckets");
    if (options.ddp.find_unused_parameters || options.ddp.lazy_bucket_allocation ||
        options.ddp.gradients != GradientStorage::in_bucket)
      throw UsageError(
          "CapturedStep: find_unused_parameters, lazy_bucket_allocation and gradients other than in_bucket "
          "change the work or the memory from step to step: leave these DdpOptions at their defaults");
    const auto check = [](auto& part) {
      if constexpr (requires { part.check_capturable(); }) part.check_capturable();
    };
    check(comm);
    check(optimizer);
    check(precision);
    check(hook);
    std::apply([&](auto&... part) { (check(part), ...); }, callbacks_);
    if (!device.is_cpu()) graph_.emplace(device);
    on_stream([&] { ddp_.emplace(model, comm, options_.ddp, std::move(hook)); });
    // A graph needs the gradients at fixed addresses.
    step_.emplace(ddp_->module(), *ddp_, comm, optimizer, precision, options_.ddp,
                  detail::ClearGradients::fill_with_zeros);
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  /// Runs one step with this batch and returns its loss, one element, which the next step overwrites. Throws UsageError
  /// for a batch whose type or shapes differ from the first batch's, and after a failed capture. From the capture on, a
  /// call throws the communicator's first error; an error inside a replay is thrown by the next call.
  template <class Batch>
  const at::Tensor& operator()(Batch& batch) {
    static_assert(TensorBatch<Batch>,
                  "lockstep: a CapturedStep copies the tensors of each batch to fixed places, and does not "
                  "find them in this type: give it each_tensor(f)");
    if (failed_)
      throw UsageError(
          "CapturedStep: the capture has failed, and part of the step may be missing: construct a new one");
    Batch& fixed = fill(batch);
    if (!graph_ || steps_ < options_.num_warmup_iters) {
      on_stream([&] { run(fixed); });
    } else {
      if (!captured_) {
        ddp_->synchronize();  // not possible in a capture
        failed_ = true;
        graph_->capture([&] { run(fixed); });
        failed_ = false;
        captured_ = true;
      }
      replay();
    }
    ++steps_;
    return value_;
  }

  /// Returns the number of steps so far, eager and replayed.
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] bool captured() const { return captured_; }
  [[nodiscard]] auto& ddp() { return *ddp_; }  ///< Returns the wrapper of the model.

 private:
  template <class Function>
  void on_stream(Function&& function) {
    graph_ ? graph_->on_stream(function) : function();
  }

  // Copies a batch to the tensors that the graph reads.
  template <class Batch>
  Batch& fill(Batch& batch) {
    std::vector<at::Tensor> given;
    for_each_tensor(batch, [&](at::Tensor& tensor) { given.push_back(tensor); });
    if (!batch_.has_value()) {
      Batch fixed = batch;
      for_each_tensor(fixed, [&](at::Tensor& tensor) {
        tensor = at::empty_like(tensor, tensor.options().device(device_));
        inputs_.push_back(tensor);
      });
      batch_ = std::move(fixed);
    }
    auto* fixed = std::any_cast<Batch>(&batch_);
    if (fixed == nullptr || given.size() != inputs_.size())
      throw UsageError("CapturedStep: this batch is of another kind than the first: give it batches of one");
    for (std::size_t i = 0; i < given.size(); ++i)
      if (given[i].sizes() != inputs_[i].sizes() || given[i].scalar_type() != inputs_[i].scalar_type())
        throw UsageError(detail::formatted(
            "CapturedStep: tensor {} of the batch is {}, and that of the first was {}: a graph has fixed "
            "shapes, so leave out a batch that is not full (LoaderOptions::drop_last)",
            i, detail::describe(given[i]), detail::describe(inputs_[i])));
    for (std::size_t i = 0; i < given.size(); ++i) inputs_[i].copy_(given[i], /*non_blocking=*/true);
    return *fixed;
  }

  void replay() {
    const auto repeat = [this] { graph_->replay(); };
    if constexpr (requires { comm_.watch_replay(repeat); })
      comm_.watch_replay(repeat);
    else
      repeat();
  }

  template <class Batch>
  void run(Batch& batch) {
    using Value = std::invoke_result_t<Loss&, M&, Batch&>;
    static_assert(std::convertible_to<Value, at::Tensor>,
                  "lockstep: the loss of a CapturedStep returns a tensor, the mean over the batch");
    detail::SingleBatchSource source(batch);
    std::tuple<> no_extras;
    std::apply(
        [&](auto&... callback) {
          step_->run(source, loss_, {0, steps_}, no_extras, callback...);
        },
        callbacks_);
    value_ = step_->losses()[0].reported;
  }

  c10::Device device_;
  std::optional<detail::StepGraph> graph_;  // none on the CPU
  Comm& comm_;
  Loss loss_;
  CaptureOptions options_;
  std::tuple<GradientCallbacks...> callbacks_;
  std::optional<DistributedDataParallel<M, Comm, Hook>> ddp_;
  std::optional<detail::TrainingStep<M, Comm, Optimizer, PrecisionType, Hook>> step_;
  std::any batch_;                  // of the first batch's type, with the tensors that the graph reads
  std::vector<at::Tensor> inputs_;  // the tensors of batch_
  at::Tensor value_;
  std::int64_t steps_ = 0;
  bool captured_ = false, failed_ = false;
};

template <class M, class Comm, class Optimizer, class PrecisionType, class Loss, class... Rest>
CapturedStep(c10::Device, M&, Comm&, Optimizer&, PrecisionType&, Loss, CaptureOptions, Rest...)
    -> CapturedStep<M, Comm, Optimizer, PrecisionType, Loss, Rest...>;
template <class M, class Comm, class Optimizer, class PrecisionType, class Loss>
CapturedStep(c10::Device, M&, Comm&, Optimizer&, PrecisionType&, Loss)
    -> CapturedStep<M, Comm, Optimizer, PrecisionType, Loss>;

}  // namespace LOCKSTEP_DEVICES

}  // namespace lockstep::inline v0_1
