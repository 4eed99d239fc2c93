#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// Puts a module into evaluation mode and disables autograd during its lifetime. The destructor restores each
/// submodule's own mode, including submodules that the user had frozen.
class EvaluationMode {
 public:
  /// Switches `module` to evaluation mode; the destructor restores the mode of each submodule.
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
  /// Copies the buffers of `module`.
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
template <Communicator C>
void sum_over_ranks(std::span<Total> totals, C& comm) {
  if (comm.size() == 1 || totals.empty()) return;
  const detail::CallScope scope("sum_over_ranks");
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

/// Broadcasts rank 0's buffers to every rank. Collective; waits as Work::wait does.
template <Communicator C>
void broadcast_buffers(const torch::nn::Module& module, C& comm) {
  if (comm.size() == 1) return;
  const detail::CallScope scope("broadcast_buffers");
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

/// Accumulates the Sums of a metric on their device.
class SumsMeter {
 public:
  /// Throws DataError if the shape is not that of the batches before.
  void add(const Sums& sums) {
    // A copy: the metric may keep the tensor and change it.
    at::Tensor values = sums.values.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    if (!total_.defined()) {
      total_ = std::move(values);
    } else if (total_.sizes() == values.sizes()) {
      total_ += values;
    } else {
      throw DataError(detail::formatted(
          "a metric returned sums of {} after sums of {}: return a tensor of the same shape for every batch",
          describe(values), describe(total_)));
    }
  }

  /// Returns the total over all ranks, fp64 on the CPU. A rank without a batch contributes zeros. Collective.
  /// Throws MismatchError if the ranks' shapes differ, DataError if no rank had a batch.
  template <Communicator C>
  at::Tensor total(C& comm) {
    const std::vector<std::string> shapes = comm.all_gather_bytes(shape());
    std::size_t first = 0;
    while (first < shapes.size() && shapes[first].empty()) ++first;
    if (first == shapes.size())
      throw CollectiveError<DataError>(
          "the dataset has no samples, so that the sums of a metric have no shape: evaluate one with samples",
          comm.size());
    for (std::size_t rank = first + 1; rank < shapes.size(); ++rank)
      if (!shapes[rank].empty() && shapes[rank] != shapes[first])
        throw CollectiveError<MismatchError>(
            detail::formatted("a metric returned sums of {} on rank {} and of {} on rank {}: return a tensor "
                              "of the same shape on every rank",
                              describe(zeros_of(shapes[first])), RankNames(comm)(first),
                              describe(zeros_of(shapes[rank])), RankNames(comm)(rank)),
            comm.size());
    if (!total_.defined()) total_ = zeros_of(shapes[first]);
    if (comm.size() == 1) return total_.cpu();
    const at::Tensor sum = total_.to(comm_device(comm)).contiguous();
    comm.all_reduce(sum, ReduceOp::sum).wait();
    return sum.cpu();
  }

 private:
  // The sizes as bytes after a marker, so that a scalar differs from no batch.
  [[nodiscard]] std::string shape() const {
    if (!total_.defined()) return {};
    std::string bytes = "s";
    for (const std::int64_t size : total_.sizes())
      bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
    return bytes;
  }
  static at::Tensor zeros_of(const std::string& shape) {
    std::vector<std::int64_t> sizes((shape.size() - 1) / sizeof(std::int64_t));
    if (!sizes.empty()) std::memcpy(sizes.data(), shape.data() + 1, shape.size() - 1);
    return at::zeros(sizes, at::kDouble);
  }

  at::Tensor total_;
};

/// What `metric(output, batch)` or `metric(model, batch)` returns; `measure` calls it so.
template <class Metric, class M, class Batch>
decltype(auto) call_metric(Metric& metric, M& model, const at::Tensor& output, Batch& batch) {
  if constexpr (OutputMetric<Metric, Batch>)
    return metric(output, batch);
  else
    return metric(model, batch);
}

/// How evaluate accumulates a metric, and the type of its result.
template <class Metric, class M, class Batch>
struct Measured {
  using Meter = MeanMeter;
  using Result = double;
};
template <class Metric, class M, class Batch>
requires std::same_as<
    std::remove_cvref_t<decltype(call_metric(std::declval<Metric&>(), std::declval<M&>(),
                                             std::declval<const at::Tensor&>(), std::declval<Batch&>()))>,
    Sums>
struct Measured<Metric, M, Batch> {
  using Meter = SumsMeter;
  using Result =
      std::remove_cvref_t<decltype(std::declval<Metric&>().compute(std::declval<const at::Tensor&>()))>;
};

template <class M, class Batch, class... Meters, class... Metrics>
void measure(M& model, Batch& batch, std::tuple<Meters...>& meters, Metrics&... metrics) {
  at::Tensor output;
  if constexpr ((OutputMetric<Metrics, Batch> || ...)) output = call_model(model, batch.data);
  const auto add = [&](auto& meter, auto& metric) {
    decltype(auto) value = call_metric(metric, model, output, batch);
    if constexpr (std::same_as<std::remove_cvref_t<decltype(meter)>, SumsMeter>)
      meter.add(value);
    else
      add_to(meter, value, batch);
  };
  [&]<std::size_t... i>(std::index_sequence<i...>, const auto& all) {
    (add(std::get<i>(meters), std::get<i>(all)), ...);
  }
  (std::index_sequence_for<Metrics...>{}, std::tie(metrics...));
}

/// Returns the metrics' results of the meters' totals over all ranks. Collective.
template <class... Results, class C, class... Meters, class... Metrics>
std::tuple<Results...> results_of(C& comm, std::tuple<Meters...>& meters, Metrics&... metrics) {
  std::array<Total, sizeof...(Meters)> totals;
  std::size_t means = 0;
  const auto read = [&]<class Meter>(Meter& meter) {
    if constexpr (std::same_as<Meter, MeanMeter>) totals[means++] = meter.total();
  };
  std::apply([&](auto&... meter) { (read(meter), ...); }, meters);
  sum_over_ranks(std::span(totals).first(means), comm);
  std::size_t next = 0;
  const auto result = [&]<class Meter>([[maybe_unused]] Meter& meter, [[maybe_unused]] auto& metric) {
    if constexpr (std::same_as<Meter, MeanMeter>)
      return totals[next++].mean();
    else
      return metric.compute(meter.total(comm));
  };
  return [&]<std::size_t... i>(std::index_sequence<i...>, const auto& all) {
    // Braces evaluate from left to right: every rank calls the collectives in the same order.
    return std::tuple<Results...>{result(std::get<i>(meters), std::get<i>(all))...};
  }
  (std::index_sequence_for<Metrics...>{}, std::tie(metrics...));
}

/// Throws MismatchError on every rank if the ranks' datasets differ in their number of samples, which
/// `samples` holds by rank: each rank would evaluate its part of another partition.
template <class C>
void require_equal_lengths(const std::vector<std::string>& samples, C& comm) {
  const auto other = std::find_if(samples.begin(), samples.end(),
                                  [&](const std::string& there) { return there != samples[0]; });
  if (other == samples.end()) return;
  const RankNames name_of(comm);
  throw CollectiveError<MismatchError>(
      detail::formatted(
          "evaluate has a dataset of {} samples on rank {} and of {} on rank {}: give it the same "
          "dataset on every rank",
          samples[0], name_of(0), *other, name_of(static_cast<std::size_t>(other - samples.begin()))),
      comm.size());
}

/// The return type of an invalid call of evaluate: converts to any type, so that a static_assert is the only
/// error.
struct NotMeasured {
  template <class T>
  operator T() const;
};

/// Diagnoses the arguments of evaluate with one static_assert each.
template <class M, class Data, class... Metrics>
struct CheckedEvaluation {
  static constexpr bool good() {
    constexpr bool dataset = Dataset<Data>;
    static_assert(
        dataset,
        "lockstep: evaluate measures on a dataset, which has size() and get(i) or get_batch(indices)");
    static_assert(sizeof...(Metrics) > 0, "lockstep: evaluate needs a metric, such as lockstep::Accuracy{}");
    if constexpr (dataset && sizeof...(Metrics) > 0) {
      constexpr bool measurable = (Metric<Metrics, M, BatchOf<Data>> && ...);
      static_assert(
          measurable,
          "lockstep: a metric is called as metric(output, batch) or metric(model, batch) and returns a "
          "Mean{sum, count}, a tensor of one element, or Sums{values} if it has compute(total)");
      return measurable;
    } else {
      return false;
    }
  }
};

}  // namespace lockstep::detail

namespace lockstep {

/// Runs the model over each sample of the dataset exactly once, partitioned among the ranks, and returns each
/// metric over all samples: the same value on every rank, equal to that of a single process.
///
/// Batches are copied to the model's device. The result of a metric is a double, NaN for an empty dataset,
/// or what its `compute` returns. One metric returns its result, several a std::tuple of results. Rank 0's
/// buffers (running statistics) are broadcast first. Every submodule's mode is restored afterwards. An
/// exception of the dataset, the model or a metric that not every rank throws within two seconds aborts the
/// communicator: the other ranks throw PeerError. Throws MismatchError if the ranks' datasets differ in
/// their number of samples. Collective.
template <Model M, Communicator C, class D, class... Metrics>
auto evaluate(M& model, C& comm, D&& dataset, const EvaluationOptions& options, Metrics&&... metrics) {
  using Data = std::remove_reference_t<D>;
  if constexpr (detail::CheckedEvaluation<M, Data, std::remove_reference_t<Metrics>...>::good()) {
    using Batch = BatchOf<Data>;
    const detail::CallScope scope("evaluate");
    auto results = detail::aborting(comm, [&] {
      const std::size_t samples = dataset_size(dataset);
      const auto check = [&] {
        if (options.batch_size < 1)
          throw UsageError(detail::formatted("batch_size is {}: give 1 or more samples per rank and step",
                                             options.batch_size));
        return std::to_string(samples);
      };
      // The exchange also finds ranks that are in another call, before they exchange tensors.
      detail::require_equal_lengths(agree<UsageError>(comm, check), comm);
      const EvaluationMode mode(detail::module_of(model));
      std::optional<BufferSnapshot> snapshot;
      if (options.restore_buffers) snapshot.emplace(detail::module_of(model));
      broadcast_buffers(detail::module_of(model), comm);
      DataLoader loader{detail::DatasetView{dataset},
                        EvaluationSampler{samples, comm},
                        {.batch_size = static_cast<std::size_t>(options.batch_size),
                         .num_workers = static_cast<std::size_t>(options.num_workers),
                         .pin_memory = true}};
      std::tuple<typename detail::Measured<std::remove_reference_t<Metrics>, M, Batch>::Meter...> meters;
      for (auto& batch : StagedBatches{loader, detail::device_of(detail::module_of(model))})
        detail::measure(model, batch, meters, metrics...);
      return detail::results_of<
          typename detail::Measured<std::remove_reference_t<Metrics>, M, Batch>::Result...>(comm, meters,
                                                                                            metrics...);
    });
    if constexpr (sizeof...(Metrics) == 1)
      return std::get<0>(std::move(results));
    else
      return results;
  } else {
    return detail::NotMeasured{};
  }
}

}  // namespace lockstep
