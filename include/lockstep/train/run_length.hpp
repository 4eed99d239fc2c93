#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/data/same_dataset.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer_options.hpp"

namespace lockstep {

/// Where a run that starts at some epoch and step ends.
class RunLength {
 public:
  /// Throws DataError where there are steps to do and no samples to do them with.
  RunLength(const TrainerOptions& options, std::int64_t steps_in_epoch, std::int64_t epoch, std::int64_t step)
      : steps_in_epoch_(steps_in_epoch) {
    if (options.steps)
      last_step_ = step + *options.steps;
    else
      last_epoch_ = epoch + options.epochs.value_or(1);
    if (steps_in_epoch == 0 && !reached(epoch, step))
      throw DataError("the dataset has no samples to train on");
  }

  /// Whether `epoch` whole epochs and `step` steps, counted from the trainer's first, are enough.
  [[nodiscard]] bool reached(std::int64_t epoch, std::int64_t step) const {
    return last_epoch_ ? epoch >= *last_epoch_ : step >= *last_step_;
  }
  /// The epoch counted `epoch`, from 0, that starts after `step` steps; the last may be cut short.
  [[nodiscard]] EpochPlan plan(std::int64_t epoch, std::int64_t step) const {
    if (last_epoch_) return {epoch, *last_epoch_, steps_in_epoch_};
    const std::int64_t left = *last_step_ - step;
    return {epoch, epoch + (left + steps_in_epoch_ - 1) / steps_in_epoch_, std::min(steps_in_epoch_, left)};
  }

 private:
  std::int64_t steps_in_epoch_;
  std::optional<std::int64_t> last_epoch_, last_step_;
};

/// Compares what each rank is about to do: the same dataset, by its length and, where it lies in memory, by a
/// fingerprint (others may draw their samples anew each time); equally many batches of equal size, so that no
/// rank waits for another that has none left. Collective. Throws one and the same MismatchError on every
/// rank.
template <Gathering C, Dataset D>
void check_same_run(D& dataset, std::size_t samples, const TrainerOptions& options, C& comm) {
  if (comm.size() == 1) return;
  if constexpr (std::same_as<std::remove_cv_t<D>, TensorDataset>)
    check_same_dataset(comm, dataset);
  else
    check_same_dataset(comm, dataset_size(dataset));
  auto text = [](const std::optional<std::int64_t>& number) {
    return number ? std::to_string(*number) : "none";
  };
  const std::string mine =
      fmt::format("{} samples an epoch in batches of {} (epochs {}, steps {}, seed {})", samples,
                  options.batch_size, text(options.epochs), text(options.steps), options.seed);
  const std::vector<std::string> all = comm.all_gather_bytes(mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw MismatchError(
          fmt::format("the ranks would not train alike: rank 0 on {}, rank {} on {}; give every rank the "
                      "same options, and a "
                      "sampler that gives each the same number of samples, such as DistributedSampler",
                      all[0], rank, all[rank]));
}

}  // namespace lockstep
