#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/data/sampler.hpp"

namespace lockstep::detail {

/// How the samples of an epoch fall to the ranks and to the steps. Each optimizer step takes up to
/// `accumulate` micro-batches of up to `batch_size` samples from every rank; at the end of the epoch ranks
/// may have fewer and smaller ones, or none. It follows from the samplers alone, so that every rank knows all
/// of it without asking.
class EpochPartition {
 public:
  /// `samples[r]` is what rank r sees in the epoch. `batch_size` and `accumulate` are at least 1.
  EpochPartition(const std::vector<std::size_t>& samples, std::int64_t batch_size, std::int64_t accumulate)
      : ranks_(static_cast<std::int64_t>(samples.size())), batch_(batch_size), accumulate_(accumulate) {
    for (const std::size_t size : samples) {
      const auto count = static_cast<std::int64_t>(size);
      const auto same =
          std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& k) { return k.samples == count; });
      if (same == kinds_.end())
        kinds_.push_back({count, 1});
      else
        ++same->ranks;
    }
  }

  /// Optimizer steps in the epoch, for all ranks alike: as many as the rank with the most samples needs.
  [[nodiscard]] std::int64_t steps() const {
    std::int64_t most = 0;
    for (const Kind& kind : kinds_) most = std::max(most, kind.samples);
    return divide_up(most, batch_ * accumulate_);
  }

  /// Whether every rank has as many micro-batches as the others in each step.
  [[nodiscard]] bool equal_micro_batches() const {
    return std::all_of(kinds_.begin(), kinds_.end(), [&](const Kind& kind) {
      return divide_up(kind.samples, batch_) == divide_up(kinds_[0].samples, batch_);
    });
  }

  /// Samples of all ranks in a step; steps count from 0.
  [[nodiscard]] std::int64_t samples_in_step(std::int64_t step) const {
    std::int64_t sum = 0;
    for (const Kind& kind : kinds_) sum += kind.ranks * in_step(kind.samples, step);
    return sum;
  }

  /// Micro-batches in a step of a rank that sees `samples` in the epoch: none where it has run out.
  [[nodiscard]] std::int64_t micro_batches(std::int64_t samples, std::int64_t step) const {
    return divide_up(in_step(samples, step), batch_);
  }

  /// Samples in micro-batch `micro`, from 0, of that rank and step.
  [[nodiscard]] std::int64_t micro_size(std::int64_t samples, std::int64_t step, std::int64_t micro) const {
    return std::clamp<std::int64_t>(in_step(samples, step) - micro * batch_, 0, batch_);
  }

  /// What the mean loss of `micro` samples in a step is divided by, so that the sum over micro-batches,
  /// averaged over ranks, is the mean over all samples of the step. Where all of them are equally many it is
  /// the number of micro-batches exactly, as in Python's `loss / accumulate`; 1 where each rank has one.
  [[nodiscard]] double divisor(std::int64_t micro_samples, std::int64_t step) const {
    return static_cast<double>(samples_in_step(step)) / static_cast<double>(micro_samples * ranks_);
  }

 private:
  // Ranks that see equally many samples: there are rarely more than two kinds.
  struct Kind {
    std::int64_t samples, ranks;
  };

  static std::int64_t divide_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }
  [[nodiscard]] std::int64_t in_step(std::int64_t samples, std::int64_t step) const {
    const std::int64_t whole = batch_ * accumulate_;
    return std::clamp<std::int64_t>(samples - step * whole, 0, whole);
  }

  std::int64_t ranks_, batch_, accumulate_;
  std::vector<Kind> kinds_;
};

/// What each rank of `group` sees in the coming pass, by rank: from the sampler where it knows, and otherwise
/// as much as this rank.
template <Sampler S, RankedGroup G>
std::vector<std::size_t> samples_of_ranks(const S& sampler, const G& group) {
  std::vector<std::size_t> samples(static_cast<std::size_t>(group.size()), sampler.size());
  if constexpr (CountingSampler<S>) {
    for (int rank = 0; rank < group.size(); ++rank)
      samples[static_cast<std::size_t>(rank)] = sampler.size_of(rank);
  }
  return samples;
}

}  // namespace lockstep::detail
