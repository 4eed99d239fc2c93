#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"

namespace lockstep::inline v0_1::detail {

/// The partition of an epoch's samples into ranks, steps and micro-batches. Each optimizer step takes up to
/// `accumulate` micro-batches of up to `batch_size` samples from every rank; at the end of the epoch a rank
/// may have fewer and smaller ones, or none. The partition follows from the samplers alone, so every rank
/// computes all of it without communication.
class EpochPartition {
 public:
  /// `samples[r]` is rank r's number of samples in the epoch. `batch_size` and `accumulate` are at least 1.
  EpochPartition(const std::vector<std::size_t>& samples, std::int64_t batch_size, std::int64_t accumulate)
      : samples_(samples.begin(), samples.end()), batch_(batch_size), accumulate_(accumulate) {}

  /// Returns the number of optimizer steps in the epoch: as many as the rank with the most samples needs.
  [[nodiscard]] std::int64_t steps() const {
    return divide_up(*std::max_element(samples_.begin(), samples_.end()), batch_ * accumulate_);
  }

  /// Returns whether all ranks have equally many micro-batches in each step.
  [[nodiscard]] bool equal_micro_batches() const {
    return std::all_of(samples_.begin(), samples_.end(), [&](std::int64_t samples) {
      return divide_up(samples, batch_) == divide_up(samples_[0], batch_);
    });
  }

  [[nodiscard]] std::int64_t samples_in_step(std::int64_t step) const {
    std::int64_t sum = 0;
    for (const std::int64_t samples : samples_) sum += in_step(samples, step);
    return sum;
  }

  /// Returns the number of micro-batches in a step of a rank with `samples` in the epoch.
  [[nodiscard]] std::int64_t micro_batches(std::int64_t samples, std::int64_t step) const {
    return divide_up(in_step(samples, step), batch_);
  }

  /// Returns the number of samples in its micro-batch `micro`, zero-based.
  [[nodiscard]] std::int64_t micro_size(std::int64_t samples, std::int64_t step, std::int64_t micro) const {
    return std::clamp<std::int64_t>(in_step(samples, step) - micro * batch_, 0, batch_);
  }

  /// Returns the divisor for the mean loss of a micro-batch of `micro_samples`, so that the sum over micro-batches,
  /// averaged over ranks, is the mean over all samples of the step. If all micro-batches have equally many samples, it
  /// is exactly the number of micro-batches of a rank, as in Python's `loss / accumulate`.
  [[nodiscard]] double divisor(std::int64_t micro_samples, std::int64_t step) const {
    return static_cast<double>(samples_in_step(step)) /
           static_cast<double>(micro_samples * static_cast<std::int64_t>(samples_.size()));
  }

 private:
  static std::int64_t divide_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }
  [[nodiscard]] std::int64_t in_step(std::int64_t samples, std::int64_t step) const {
    const std::int64_t whole = batch_ * accumulate_;
    return std::clamp<std::int64_t>(samples - step * whole, 0, whole);
  }

  std::vector<std::int64_t> samples_;  // of each rank
  std::int64_t batch_, accumulate_;
};

/// Returns the number of samples of each rank of `group` in the coming epoch, by rank: from a
/// CountingSampler, otherwise this rank's number for every rank.
template <Sampler S, RankedGroup G>
std::vector<std::size_t> samples_of_ranks(const S& sampler, const G& group) {
  std::vector<std::size_t> samples(static_cast<std::size_t>(group.size()), sampler.size());
  if constexpr (CountingSampler<S>) {
    for (int rank = 0; rank < group.size(); ++rank)
      samples[static_cast<std::size_t>(rank)] = sampler.size_of(rank);
  }
  return samples;
}

/// Returns the name and type of the first module whose forward is collective, such as
/// "'1' (lockstep::SyncBatchNorm2dImpl)", or an empty string.
inline std::string collective_module(const torch::nn::Module& model) {
  for (const auto& child : model.named_modules())
    if (const auto* module = dynamic_cast<const CollectiveModule*>(child.value().get());
        module && module->ranks() > 1)
      return detail::formatted("'{}' ({})", child.key(), child.value()->name());
  return {};
}

/// Throws UsageError if the forward of a module is collective and the ranks run different numbers of forwards.
inline void require_equal_forwards(const torch::nn::Module& model, const EpochPartition& partition) {
  if (partition.equal_micro_batches()) return;
  if (const std::string module = collective_module(model); !module.empty())
    throw UsageError(detail::formatted(
        "{} is collective in its forward, and at the end of the epoch some ranks have one batch less than "
        "others: give every rank equally many, by pad = true or drop_last = true",
        module));
}

/// The state of a rank's stream at a micro-batch.
enum class Turn { none, more, last_of_step };

/// Checks that all ranks run equally many forwards on a stream, whose length is unknown beforehand: compares
/// the streams' states over the ranks before each forward. One small collective per micro-batch, only for
/// models with a collective forward.
template <Communicator C>
class CollectiveForwardCheck {
 public:
  CollectiveForwardCheck(const torch::nn::Module& model, C& comm)
      : comm_(comm), module_(comm.size() > 1 ? collective_module(model) : "") {}

  /// Throws an equal DataError on every rank if their turns differ. Collective.
  void compare(Turn mine) const {
    if (module_.empty()) return;
    require_equal<DataError>(
        comm_, {{"the stream", text(mine)}},
        module_ + " is collective in its forward, and the ranks' streams differ in length",
        "give every rank equally many batches");
  }

 private:
  static const char* text(Turn turn) {
    return turn == Turn::none   ? "exhausted"
           : turn == Turn::more ? "within a step"
                                : "at the last batch of a step";
  }

  C& comm_;
  std::string module_;
};

}  // namespace lockstep::inline v0_1::detail
