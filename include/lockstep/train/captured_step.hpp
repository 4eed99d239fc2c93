#pragma once

#include <any>
#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Device.h>
#include <fmt/format.h>

#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/capture_scope.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/detail/policies.hpp"
#include "lockstep/train/extras.hpp"

namespace lockstep {

/// A part of a training step that a graph can hold and repeat: it says so by a `static constexpr bool
/// capturable = true`.
///
/// 1. It reads no value of the device on the host: what it decides, it decides on the device.
/// 2. Its operators, shapes and memory are the same in every step, but for memory that it takes and gives
///    back inside of the step.
/// 3. What changes from step to step (a rate, a scale, a count) it keeps in tensors and changes in place. The
///    host's own code runs once, when the step is captured.
///
/// Where that depends on options, its `check_capturable()` throws UsageError that says on which. A
/// communicator may have `watch_replay(replay)`, which calls `replay()` once unless it has failed, and sees
/// that what is repeated ends: each replay goes through it.
template <class T>
concept Capturable = requires {
  requires bool(std::remove_cvref_t<T>::capturable);
};

/// What records a step and repeats it. The caller's stream is the one that is current where it calls.
///
/// 1. `on_stream(f)` calls `f()` with the graph's own stream as the current one. What that is given comes
///    after what the caller's stream was given before, and before what it is given next; the host does not
///    wait.
/// 2. `capture(f)` calls `f()` once, as on_stream does, but what the stream is given is recorded and not
///    done. Only this thread is part of that: others, such as a watchdog or a loader, go on as ever. Where
///    `f` throws, the recording is dropped and the exception goes on.
/// 3. `replay()` gives the caller's stream all that was recorded, with the same memory.
/// 4. `device()` is where it works.
template <class G>
concept StepGraph = std::movable<G> && requires(G& graph, const G& seen, void (*function)()) {
  graph.on_stream(function);
  graph.capture(function);
  graph.replay();
  { seen.device() } -> std::same_as<c10::Device>;
};

struct CaptureOptions {
  /// Steps that are made as ever before the capture, in which memory is taken, buckets find their order and
  /// libraries choose their kernels: 2 or more.
  std::int64_t warm_up = 3;
  /// Of the DistributedDataParallel inside.
  DdpOptions ddp = {};
};

}  // namespace lockstep

namespace lockstep::detail {

// Says in one sentence what of a captured step a graph cannot hold.
template <class Graph, class Comm, class Optimizer, class PrecisionType, class Hook,
          class... GradientCallbacks>
struct CheckedCapture {
  static_assert(StepGraph<Graph>,
                "lockstep: the first argument of a CapturedStep is what captures: a type that models "
                "lockstep::StepGraph, such as lockstep::CudaGraph");
  static_assert(Capturable<Comm>,
                "lockstep: a CapturedStep needs a communicator whose collectives a graph can hold, such as "
                "lockstep::NcclComm or lockstep::LocalComm; those of GlooComm block the host");
  static_assert(Capturable<Optimizer>,
                "lockstep: a CapturedStep needs an optimizer whose rate and state live in tensors, such as "
                "lockstep::SGD, Adam or AdamW; those of torch::optim keep numbers that a graph would repeat");
  static_assert(Capturable<PrecisionType> && Precision<PrecisionType>,
                "lockstep: a CapturedStep needs a precision that decides on the device alone: Fp32, Tf32, "
                "Bf16, Fp16, or one of your own that says static constexpr bool capturable = true");
  static_assert(Capturable<Hook> && ReductionPolicy<Hook>,
                "lockstep: a CapturedStep needs a communication hook that does the same in every step, such "
                "as AllReduceHook, Fp16Hook or Bf16Hook; PowerSgdHook and hooks of functions do not promise "
                "it");
  static_assert(
      ((Capturable<GradientCallbacks> && GradientCallback<GradientCallbacks>)&&...),
      "lockstep: between backward and step a CapturedStep takes GradientCallbacks that decide on the "
      "device alone, such as GradientClip; CheckFinite and functions look at values on the host");
};

}  // namespace lockstep::detail

namespace lockstep {

/// Forward, backward, reduction and optimizer step of a model as one graph: the first steps are made as ever,
/// then one is captured, and from there on each call repeats that with the data of its batch, at the cost of
/// one launch.
///
/// ```cpp
/// lockstep::SGD optimizer{model->parameters(), {.implementation = Implementation::fused, .lr_tensor =
/// rate}}; lockstep::CapturedStep step{lockstep::CudaGraph{device}, model, comm, optimizer, precision, loss};
/// for (auto& batch : lockstep::StagedBatches{loader, device}) {
///   optimizer.param_groups()[0].options().set_lr(curve(t++));  // into the tensor
///   step(batch);
/// }
/// ```
///
/// `loss(model, batch)` returns the mean over the batch. Every batch has the shapes of the first: leave out
/// one that is not full. The DistributedDataParallel inside is made on the graph's stream, where its hooks
/// then belong. What is no operator on tensors happens once, in the capture: a branch of the forward, a
/// printed line. Any schedule fits, since it writes into the rate's tensor before the call.
///
/// Model, communicator, optimizer and precision outlive it. One thread uses it; collective.
template <class Graph, class M, class Comm, class Optimizer, class PrecisionType, class Loss,
          class Hook = AllReduceHook, class... GradientCallbacks>
class CapturedStep
    : detail::CheckedCapture<Graph, Comm, Optimizer, PrecisionType, Hook, GradientCallbacks...> {
 public:
  /// Throws UsageError for what a graph cannot hold though its type might: an optimizer whose rate is a
  /// number or a communicator that waits in each call (their `check_capturable()` says so), a search for
  /// unused parameters, gradients beside the buckets.
  CapturedStep(Graph graph, M& model, Comm& comm, Optimizer& optimizer, PrecisionType& precision, Loss loss,
               const CaptureOptions& options = {}, Hook hook = {}, GradientCallbacks... callbacks)
      : graph_(std::move(graph)),
        comm_(comm),
        optimizer_(optimizer),
        precision_(precision),
        loss_(std::move(loss)),
        options_(options),
        callbacks_(std::move(callbacks)...) {
    if (options.warm_up < 2)
      throw UsageError(
          fmt::format("CapturedStep: {} steps of warm-up: give 2 or more, in which the buckets find their "
                      "order",
                      options.warm_up));
    if (options.ddp.static_graph && options.warm_up < 3)
      throw UsageError(
          "CapturedStep: a static graph finds the order of its buckets in the third step: give 3 or more "
          "steps "
          "of warm-up");
    if (options.ddp.param_dtype)
      throw UsageError(
          "CapturedStep: DdpOptions::param_dtype gives parameters new memory in each step, which a graph "
          "cannot "
          "hold: take a precision policy, such as Bf16");
    if (options.ddp.find_unused_parameters || options.ddp.gradients != GradientStorage::in_bucket)
      throw UsageError(
          "CapturedStep: a search for unused parameters, or gradients beside the buckets, take another way "
          "from step to step: leave DdpOptions::find_unused_parameters and gradients as they are");
    const auto check = [](auto& part) {
      if constexpr (requires { part.check_capturable(); }) part.check_capturable();
    };
    check(comm);
    check(optimizer);
    std::apply([&](auto&... part) { (check(part), ...); }, callbacks_);
    graph_.on_stream([&] { ddp_.emplace(model, comm, options_.ddp, std::move(hook)); });
    parameters_ = ddp_->parameters();
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  /// One step with this batch; its loss, of one element, which the next step overwrites. Throws UsageError
  /// for a batch of other shapes than the first, and after a capture that failed. What a step throws before
  /// the capture, it throws as ever; from there on it throws the communicator's first error, and repeats
  /// nothing then: that of a repeated step comes with the next one.
  template <class Batch>
  const at::Tensor& operator()(Batch& batch) {
    static_assert(TensorBatch<Batch>,
                  "lockstep: a CapturedStep copies the tensors of each batch to fixed places, and does not "
                  "find them in this type: give it each_tensor(f)");
    if (failed_)
      throw UsageError(
          "CapturedStep: the capture has failed, and part of the step may be missing: make a new one");
    Batch& fixed = fill(batch);
    if (steps_ < options_.warm_up) {
      graph_.on_stream([&] { run(fixed); });
    } else {
      if (!captured_) capture(fixed);
      replay();
    }
    ++steps_;
    return value_;
  }

  /// Steps made so far, and whether they are repeated from a graph by now.
  [[nodiscard]] std::int64_t steps() const { return steps_; }
  [[nodiscard]] bool captured() const { return captured_; }
  [[nodiscard]] auto& ddp() { return *ddp_; }

 private:
  // Copies a batch to where the graph reads it.
  template <class Batch>
  Batch& fill(Batch& batch) {
    std::vector<at::Tensor> given;
    for_each_tensor(batch, [&](at::Tensor& tensor) { given.push_back(tensor); });
    if (!batch_.has_value()) {
      Batch fixed = batch;
      for_each_tensor(fixed, [&](at::Tensor& tensor) {
        tensor = at::empty_like(tensor, tensor.options().device(graph_.device()));
        inputs_.push_back(tensor);
      });
      batch_ = std::move(fixed);
    }
    auto* fixed = std::any_cast<Batch>(&batch_);
    if (fixed == nullptr || given.size() != inputs_.size())
      throw UsageError("CapturedStep: this batch is of another kind than the first: give it batches of one");
    for (std::size_t i = 0; i < given.size(); ++i)
      if (given[i].sizes() != inputs_[i].sizes() || given[i].scalar_type() != inputs_[i].scalar_type())
        throw UsageError(fmt::format(
            "CapturedStep: tensor {} of the batch is {}, and that of the first was {}: a graph has fixed "
            "shapes, so leave out a batch that is not full (LoaderOptions::drop_last)",
            i, detail::describe(given[i]), detail::describe(inputs_[i])));
    for (std::size_t i = 0; i < given.size(); ++i) inputs_[i].copy_(given[i], /*non_blocking=*/true);
    return *fixed;
  }

  template <class Batch>
  void capture(Batch& batch) try {
    const detail::CaptureScope nothing_is_read;
    graph_.capture([&] { run(batch); });
    captured_ = true;
  } catch (...) {
    failed_ = true;
    throw;
  }

  // A communicator whose watchdog would not know of what a graph repeats is told of it.
  void replay() {
    const auto repeat = [this] { graph_.replay(); };
    if constexpr (requires { comm_.watch_replay(repeat); })
      comm_.watch_replay(repeat);
    else
      repeat();
  }

  template <class Batch>
  void run(Batch& batch) try {
    using Value = std::invoke_result_t<Loss&, M&, Batch&>;
    static_assert(std::convertible_to<Value, at::Tensor>,
                  "lockstep: the loss of a CapturedStep returns a tensor, the mean over the batch");
    optimizer_.zero_grad(/*set_to_none=*/false);  // the gradients stay where they are
    ddp_->before_forward();
    const at::Tensor loss =
        precision_.forward([&]() -> at::Tensor { return std::invoke(loss_, ddp_->module(), batch); });
    ddp_->backward(precision_.scale(loss));
    if constexpr (detail::AgreeingPrecision<PrecisionType, Comm>)
      if (!Hook::propagates_nan || !options_.ddp.ignored.empty()) precision_.agree(optimizer_, comm_);
    if constexpr (sizeof...(GradientCallbacks) > 0) {
      if constexpr (ScalingPrecision<PrecisionType>) precision_.unscale(optimizer_);
      at::Tensor total_norm;
      const Gradients gradients{0, steps_, parameters_, ddp_->named_parameters(), total_norm};
      std::apply([&](auto&... hook) { (hook.on_gradients(gradients), ...); }, callbacks_);
    }
    precision_.step(optimizer_);
    value_ = loss.detach();
  } catch (...) {
    if constexpr (requires { precision_.forget(); }) precision_.forget();
    throw;
  }

  Graph graph_;
  Comm& comm_;
  Optimizer& optimizer_;
  PrecisionType& precision_;
  Loss loss_;
  CaptureOptions options_;
  std::tuple<GradientCallbacks...> callbacks_;
  std::optional<DistributedDataParallel<M, Comm, Hook>> ddp_;
  std::vector<at::Tensor> parameters_;
  std::any batch_;                  // of the first's type, with the tensors that the graph reads
  std::vector<at::Tensor> inputs_;  // those
  at::Tensor value_;
  std::int64_t steps_ = 0;
  bool captured_ = false, failed_ = false;
};

template <class Graph, class M, class Comm, class Optimizer, class PrecisionType, class Loss, class... Rest>
CapturedStep(Graph, M&, Comm&, Optimizer&, PrecisionType&, Loss, CaptureOptions, Rest...)
    -> CapturedStep<Graph, M, Comm, Optimizer, PrecisionType, Loss, Rest...>;
template <class Graph, class M, class Comm, class Optimizer, class PrecisionType, class Loss>
CapturedStep(Graph, M&, Comm&, Optimizer&, PrecisionType&, Loss)
    -> CapturedStep<Graph, M, Comm, Optimizer, PrecisionType, Loss>;

}  // namespace lockstep
