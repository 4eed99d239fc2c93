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
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// Puts a module into evaluation mode and disables autograd during its lifetime. The destructor restores each
/// submodule's own mode, including submodules that the user had frozen.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) {
    module.apply([this](torch::nn::Module& part) { before_.emplace_back(&part, part.is_training()); });
    module.eval();
  }
  ~EvaluationMode() {
    // train() recurses into children. apply() lists parents first, so each child's own mode is set last.
    for (const auto& [part, training] : before_) part->train(training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> before_;
  at::NoGradGuard no_grad_;
};

/// Snapshots the buffers of a module and restores them at destruction.
class BufferSnapshot {
 public:
  explicit BufferSnapshot(const torch::nn::Module& module) {
    for (NamedTensor& buffer : unique_buffers(module)) {
      at::Tensor copy = buffer.tensor.clone();
      kept_.emplace_back(std::move(buffer.tensor), std::move(copy));
    }
  }
  ~BufferSnapshot() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, copy] : kept_) buffer.copy_(copy);
  }
  BufferSnapshot(const BufferSnapshot&) = delete;
  BufferSnapshot& operator=(const BufferSnapshot&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

/// Sums each total over the ranks in one collective; a no-op on a single rank. Collective. Blocks.
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

/// Broadcasts rank 0's buffers to every rank. Collective.
template <Reducing C>
void share_buffers(const torch::nn::Module& module, C& comm) {
  if (comm.size() == 1) return;
  std::vector<at::Tensor> buffers;
  for (NamedTensor& buffer : unique_buffers(module)) buffers.push_back(std::move(buffer.tensor));
  detail::BroadcastList(std::move(buffers)).run(comm, 0);
}

/// Options of evaluate.
struct EvaluationOptions {
  /// Samples per rank and step.
  std::int64_t batch_size = 32;
  /// Loader threads per rank.
  std::int64_t num_workers = 0;
  /// Whether each rank gets its own buffers back afterwards, for training with per-rank buffers.
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

/// Runs the model over each sample of the dataset exactly once, partitioned among the ranks, and returns each
/// metric over all samples: the same number on every rank, equal to that of a single process.
///
/// Batches are copied to the model's device. One metric returns a double, several a std::tuple of doubles;
/// NaN for an empty dataset. Rank 0's buffers (running statistics) are broadcast first. Every submodule's
/// mode is restored afterwards. An exception of the dataset, the model or a metric that not every rank throws
/// within two seconds aborts the communicator: the other ranks throw PeerError. Collective.
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
        throw UsageError(detail::formatted("batch_size is {}: give 1 or more samples per rank and step",
                                           options.batch_size));
      const EvaluationMode mode(detail::module_of(model));
      std::optional<BufferSnapshot> snapshot;
      if (options.restore_buffers) snapshot.emplace(detail::module_of(model));
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
