#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/data/evaluation_sampler.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/staging.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/detail/dataset_view.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// Evaluation mode and no autograd while it lives; then each module is in the mode it was in before, also one
/// that the user had frozen by itself.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) {
    module.apply([this](torch::nn::Module& part) { before_.emplace_back(&part, part.is_training()); });
    module.eval();
  }
  ~EvaluationMode() {
    // train() reaches into the children, which therefore come after their parents, as apply() lists them.
    for (const auto& [part, training] : before_) part->train(training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> before_;
  at::NoGradGuard no_grad_;
};

/// Keeps the buffers of a module as they are when it is made, and puts them back when it goes.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& module) {
    for (NamedTensor& buffer : unique_buffers(module)) {
      at::Tensor copy = buffer.tensor.clone();
      kept_.emplace_back(std::move(buffer.tensor), std::move(copy));
    }
  }
  ~KeptBuffers() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, copy] : kept_) buffer.copy_(copy);
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

/// Adds each total up over the ranks: one collective for all of them, none where this rank is alone.
template <Reducing C>
void sum_over_ranks(std::span<Total> totals, C& comm) {
  if (comm.size() == 1 || totals.empty()) return;
  const auto numbers = static_cast<std::int64_t>(2 * totals.size());
  at::Tensor packed = at::empty({numbers}, at::kDouble);
  double* at = packed.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < totals.size(); ++i) {
    at[2 * i] = totals[i].sum;
    at[2 * i + 1] = totals[i].count;
  }
  if constexpr (DeviceCommunicator<C>) {
    const at::Tensor there = packed.to(comm.tensor_device());
    comm.all_reduce(there, ReduceOp::sum).wait();
    packed.copy_(there);
  } else {
    comm.all_reduce(packed, ReduceOp::sum).synchronize();
  }
  for (std::size_t i = 0; i < totals.size(); ++i) totals[i] = {at[2 * i], at[2 * i + 1]};
}

/// Gives every rank the buffers of rank 0. Collective.
template <Reducing C>
void share_buffers(const torch::nn::Module& module, C& comm) {
  if (comm.size() == 1) return;
  std::vector<at::Tensor> buffers;
  for (NamedTensor& buffer : unique_buffers(module)) buffers.push_back(std::move(buffer.tensor));
  detail::BroadcastList(std::move(buffers)).run(comm, 0);
}

struct EvaluationOptions {
  /// Samples a rank and a step.
  std::int64_t batch_size = 32;
  /// Threads a rank that load ahead.
  std::int64_t num_workers = 0;
  /// Each rank gets its own buffers back afterwards: for a training in which every rank keeps its own.
  bool restore_buffers = false;
};

}  // namespace lockstep

namespace lockstep::detail {

template <class M, class Batch, class... Metrics>
void measure(M& model, Batch& batch, std::span<MeanMeter> meters, Metrics&... metrics) {
  at::Tensor output;
  if constexpr ((OutputMetric<Metrics, Batch> || ...)) output = call_model(model, batch.data);
  auto meter = meters.begin();
  auto add = [&](auto& metric) {
    if constexpr (OutputMetric<std::remove_reference_t<decltype(metric)>, Batch>)
      add_to(*meter++, metric(output, batch), batch);
    else
      add_to(*meter++, metric(model, batch), batch);
  };
  (add(metrics), ...);
}

}  // namespace lockstep::detail

namespace lockstep {

/// Runs the model over each sample of the dataset exactly once, shared out among the ranks, and gives what
/// each metric is over all of them: the same number on every rank, that of one process alone. Batches come to
/// the model's device. One metric
/// gives a double, several a std::tuple of them; NaN for an empty dataset. Collective. Rank 0's buffers
/// (running statistics) are given to all ranks first. The modules' modes are restored afterwards. What the
/// dataset, the model or a metric throws on some ranks, and not within two seconds on all, aborts the
/// communicator, so that the others throw PeerError.
template <Model M, Reducing C, class D, class... Metrics>
auto evaluate(M& model, C& comm, D&& dataset, const EvaluationOptions& options, Metrics&&... metrics) {
  using Batch = BatchOf<std::remove_reference_t<D>>;
  constexpr bool measurable = (Metric<std::remove_reference_t<Metrics>, M, Batch> && ...);
  static_assert(sizeof...(Metrics) > 0, "lockstep: evaluate needs a metric, such as lockstep::Accuracy{}");
  static_assert(measurable,
                "lockstep: a metric is called as metric(output, batch) or metric(model, batch) and returns a "
                "Mean{sum, count} or a tensor of one element");
  std::array<Total, sizeof...(Metrics)> totals;
  if constexpr (measurable)
    detail::aborting(comm, [&] {
      if (options.batch_size < 1)
        throw UsageError(fmt::format("batch size is {}: give the samples a rank and a step, 1 or more",
                                     options.batch_size));
      const EvaluationMode mode(detail::module_of(model));
      std::optional<KeptBuffers> kept;
      if (options.restore_buffers) kept.emplace(detail::module_of(model));
      share_buffers(detail::module_of(model), comm);
      DataLoader loader{detail::DatasetView{dataset},
                        EvaluationSampler{dataset_size(dataset), comm},
                        {.batch_size = static_cast<std::size_t>(options.batch_size),
                         .num_workers = static_cast<std::size_t>(options.num_workers),
                         .pin_memory = true}};
      std::array<MeanMeter, sizeof...(Metrics)> meters;
      for (auto& batch : StagedBatches{loader, detail::device_of(detail::module_of(model))})
        detail::measure(model, batch, meters, metrics...);
      for (std::size_t i = 0; i < totals.size(); ++i) totals[i] = meters[i].total();
      sum_over_ranks(totals, comm);
    });
  if constexpr (sizeof...(Metrics) == 1)
    return totals[0].mean();
  else
    return std::apply([](const auto&... total) { return std::make_tuple(total.mean()...); }, totals);
}

}  // namespace lockstep
