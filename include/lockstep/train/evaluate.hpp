#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <sstream>

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/detail/option_checks.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep::inline v0_1 {

// Calls `restore()` in a destructor: warns of an exception, which may not leave it.
namespace detail {
template <class Restore>
void restoring(const char* what, const Restore& restore) try {
  restore();
} catch (...) {
  TORCH_WARN(what, " could not be restored");
}
}  // namespace detail

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
    detail::restoring("a module's training mode", [&] {
      for (const auto& [part, training] : before_) part->train(training);
    });
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
    detail::restoring("a buffer of the module", [&] {
      for (auto& [buffer, copy] : kept_) buffer.copy_(copy);
    });
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
  std::int64_t batch_size = 32;  ///< Samples per rank and step.
  std::int64_t num_workers = 0;  ///< Loader threads per rank.
  /// Whether each rank gets its own buffers back afterwards, for training with per-rank buffers.
  bool restore_buffers = false;
};

namespace detail {
/// Returns `own`, or zeros of the dtype and shape of the other ranks' tensors if it is undefined. Collective.
/// Throws MismatchError if those of two ranks differ, DataError if no rank has one. `what` names them.
template <Communicator C>
at::Tensor own_or_zeros(const at::Tensor& own, const char* what, C& comm) {
  std::string shape;  // the dtype and the sizes
  if (own.defined()) shape = std::to_string(static_cast<int>(own.scalar_type()));
  for (const std::int64_t size : own.defined() ? own.sizes() : at::IntArrayRef())
    shape += " " + std::to_string(size);
  const auto zeros_of = [](const std::string& shape) {
    std::istringstream text(shape);
    const std::vector<std::int64_t> numbers{std::istream_iterator<std::int64_t>(text), {}};
    return at::zeros(at::IntArrayRef(numbers).slice(1), static_cast<at::ScalarType>(numbers[0]));
  };
  const std::vector<std::string> shapes = comm.all_gather_bytes(shape);
  std::size_t first = 0;
  while (first < shapes.size() && shapes[first].empty()) ++first;
  if (first == shapes.size())
    throw CollectiveError<DataError>(
        detail::formatted("the dataset has no samples, so that the {} of a metric have no shape", what) +
            ": evaluate one with samples",
        comm.size());
  for (std::size_t rank = first + 1; rank < shapes.size(); ++rank)
    if (!shapes[rank].empty() && shapes[rank] != shapes[first])
      throw CollectiveError<MismatchError>(
          detail::formatted("a metric returned {} of {} on rank {} and of {} on rank {}: return a tensor of "
                            "the same shape on every rank",
                            what, describe(zeros_of(shapes[first])), RankNames(comm)(first),
                            describe(zeros_of(shapes[rank])), RankNames(comm)(rank)),
          comm.size());
  return own.defined() ? own : zeros_of(shapes[first]);
}

/// Accumulates the Sums of a metric on their device.
class SumsMeter {
 public:
  template <class Batch>
  void add(const Sums& sums, const Batch&) {
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

  /// Returns the total over all ranks, fp64 on the CPU. Collective.
  template <Communicator C>
  at::Tensor total(C& comm) {
    total_ = own_or_zeros(total_, "sums", comm);
    if (comm.size() == 1) return total_.cpu();
    const at::Tensor sum = total_.to(comm_device(comm)).contiguous();
    comm.all_reduce(sum, ReduceOp::sum).wait();
    return sum.cpu();
  }

 private:
  at::Tensor total_;
};

/// Keeps the PerSample values of a metric on their device.
class PerSampleMeter {
 public:
  template <class Batch>
  void add(const PerSample& per_sample, const Batch& batch) {
    const at::Tensor& values = per_sample.values;
    if constexpr (Countable<Batch>)
      if (values.dim() == 0 || values.size(0) != samples_in(batch))
        throw DataError(detail::formatted(
            "a metric returned values per sample of {} for a batch of {}: return a tensor whose first "
            "dimension counts the samples",
            describe(values), samples_in(batch)));
    if (!all_.empty() && (all_[0].scalar_type() != values.scalar_type() ||
                          all_[0].sizes().slice(1) != values.sizes().slice(1)))
      throw DataError(detail::formatted(
          "a metric returned values of {} per sample after values of {}: return the same shape and dtype for "
          "each sample",
          describe(values), describe(all_[0])));
    all_.push_back(values.detach().clone());  // the metric may keep the tensor and change it
  }

  /// Returns the values of all ranks, one rank after another, on the communicator's device. Collective.
  template <class C>
  at::Tensor total(C& comm) {
    at::Tensor own = all_.empty() ? at::Tensor() : at::cat(all_);
    const at::Tensor empty = own_or_zeros(own.defined() ? own.slice(0, 0, 0) : own, "values", comm);
    if (!own.defined()) own = empty;
    if (comm.size() == 1) return own;
    std::vector<std::int64_t> rows;
    for (const std::string& count : comm.all_gather_bytes(std::to_string(own.size(0))))
      rows.push_back(std::stoll(count));
    // One message of equal size from each rank, as bytes: a backend need not know the dtype.
    const at::Device device = comm_device(comm);
    std::vector<std::int64_t> sizes = empty.sizes().vec();
    sizes[0] = *std::max_element(rows.begin(), rows.end());
    const at::Tensor padded = at::zeros(sizes, own.options().device(device));
    padded.narrow(0, 0, own.size(0)).copy_(own);
    sizes.insert(sizes.begin(), comm.size());
    const at::Tensor gathered = at::empty(sizes, padded.options());
    if (padded.numel() > 0)
      comm.all_gather(gathered.view({comm.size(), -1}).view(at::kByte), padded.view({-1}).view(at::kByte))
          .wait();
    std::vector<at::Tensor> parts;
    for (std::size_t rank = 0; rank < rows.size(); ++rank)
      parts.push_back(gathered[static_cast<std::int64_t>(rank)].narrow(0, 0, rows[rank]));
    return at::cat(parts);
  }

 private:
  std::vector<at::Tensor> all_;
};

/// Calls the metric as `metric(output, batch)` or `metric(model, batch)`.
template <class Metric, class M, class Batch>
decltype(auto) call_metric(Metric& metric, M& model, const at::Tensor& output, Batch& batch) {
  if constexpr (OutputMetric<Metric, Batch>)
    return metric(output, batch);
  else
    return metric(model, batch);
}

/// A metric with what evaluate has accumulated for it.
template <class Metric, class M, class Batch>
struct Measurement {
  using Value =
      std::remove_cvref_t<decltype(call_metric(std::declval<Metric&>(), std::declval<M&>(),
                                               std::declval<const at::Tensor&>(), std::declval<Batch&>()))>;
  static constexpr bool is_mean = LossResult<Value>;
  using Meter = std::conditional_t<is_mean, MeanMeter,
                                   std::conditional_t<std::same_as<Value, Sums>, SumsMeter, PerSampleMeter>>;

  void add(M& model, const at::Tensor& output, Batch& batch) {
    Value value = call_metric(metric, model, output, batch);
    if constexpr (is_mean) {
      NamedMeters parts = LossParts<Value>::meters();  // of a loss, which are not its value
      add_to(meter, LossParts<Value>::take(std::move(value), batch, parts), batch);
    } else {
      meter.add(value, batch);
    }
  }
  /// Returns the result over all ranks; that of a mean is the next of `means`. Collective.
  template <class C>
  auto result(C& comm, [[maybe_unused]] const Total*& means) {
    if constexpr (is_mean)
      return (means++)->mean();
    else if constexpr (ComputingMetric<Metric>)
      return metric.compute(meter.total(comm));
    else
      return meter.total(comm);
  }

  Metric& metric;
  Meter meter{};
};

/// Returns the results of the measurements over all ranks. Collective.
template <class C, class... Measurements>
auto results_of(C& comm, std::tuple<Measurements...>& measurements) {
  return std::apply(
      [&](auto&... each) {
        std::vector<Total> totals;
        const auto read = [&](auto& one) {
          if constexpr (std::remove_cvref_t<decltype(one)>::is_mean) totals.push_back(one.meter.total());
        };
        (read(each), ...);
        sum_over_ranks(std::span(totals), comm);
        const Total* means = totals.data();
        // Braces evaluate from left to right: every rank calls the collectives in the same order.
        return std::tuple<decltype(each.result(comm, means))...>{each.result(comm, means)...};
      },
      measurements);
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

/// The result of an invalid call of evaluate: converts to any type, so that a static_assert is the only error.
struct NotMeasured {
  template <class T>
  operator T() const;
};

template <class M, class Data, class... Metrics>
struct CheckedEvaluation {
  static constexpr bool good() {
    constexpr bool dataset = Dataset<Data>;
    static_assert(
        dataset,
        "lockstep: evaluate measures on a dataset, which has size() and get(i) or get_batch(indices); the "
        "members of a const one are const");
    static_assert(sizeof...(Metrics) > 0, "lockstep: evaluate needs a metric, such as lockstep::Accuracy{}");
    if constexpr (dataset && sizeof...(Metrics) > 0) {
      constexpr bool measurable = (Metric<Metrics, M, BatchOf<Data>> && ...);
      static_assert(
          measurable,
          "lockstep: a metric is called as metric(output, batch) or metric(model, batch) and returns a "
          "Mean{sum, count}, a tensor of one element, PerSample{values}, or Sums{values} if it has "
          "compute(total)");
      return measurable;
    } else {
      return false;
    }
  }
};
}  // namespace detail

/// Runs the model over each sample of the dataset exactly once, partitioned among the ranks, and returns each
/// metric over all samples: the same value on every rank, equal to that of a single process.
///
/// Batches are copied to the model's device. One metric returns its result, several a std::tuple of results; a
/// mean of no sample is NaN. Rank 0's buffers (running statistics) are broadcast first. Every submodule's mode is
/// restored afterwards. An exception of the dataset, the model or a metric that not every rank throws within two
/// seconds aborts the communicator: the other ranks throw PeerError. Throws MismatchError if the ranks' datasets
/// differ in their number of samples. Collective.
template <Model M, Communicator C, class D, class... Metrics>
auto evaluate(M& model, C& comm, D&& dataset, const EvaluationOptions& options, Metrics&&... metrics) {
  using Data = std::remove_reference_t<D>;
  if constexpr (detail::CheckedEvaluation<M, Data, std::remove_reference_t<Metrics>...>::good()) {
    using Batch = BatchOf<Data>;
    const detail::CallScope scope("evaluate");
    auto results = detail::aborting(comm, [&] {
      const std::size_t samples = dataset_size(dataset);
      const auto check = [&] {
        detail::check_batch_size(options.batch_size);
        detail::check_workers(options.num_workers);
        return std::to_string(samples);
      };
      // The exchange also finds ranks that are in another call, before they exchange tensors.
      detail::require_equal_lengths(agree<UsageError>(comm, check), comm);
      const EvaluationMode mode(detail::module_of(model));
      std::optional<BufferSnapshot> snapshot;
      if (options.restore_buffers) snapshot.emplace(detail::module_of(model));
      broadcast_buffers(detail::module_of(model), comm);
      DataLoader loader{
          detail::DatasetView{dataset},
          EvaluationSampler{samples, comm},
          {.batch_size = options.batch_size, .num_workers = options.num_workers, .pin_memory = true}};
      std::tuple measurements{detail::Measurement<std::remove_reference_t<Metrics>, M, Batch>{metrics}...};
      for (auto& batch : StagedBatches{loader, detail::device_of(detail::module_of(model))}) {
        at::Tensor output;
        if constexpr ((detail::OutputMetric<std::remove_reference_t<Metrics>, Batch> || ...))
          output = detail::call_model(model, batch.data);
        std::apply([&](auto&... each) { (each.add(model, output, batch), ...); }, measurements);
      }
      auto measured = detail::results_of(comm, measurements);
      detail::compare_calls(comm);  // a metric or the model may have collectives
      return measured;
    });
    if constexpr (sizeof...(Metrics) == 1)
      return std::get<0>(std::move(results));
    else
      return results;
  } else {
    return detail::NotMeasured{};
  }
}

}  // namespace lockstep::inline v0_1
