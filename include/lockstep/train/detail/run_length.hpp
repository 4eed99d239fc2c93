#pragma once

#include "lockstep/data/dataset.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer_options.hpp"

namespace lockstep::inline v0_1::detail {

/// The end of a run that starts at a given epoch and step.
class RunLength {
 public:
  /// `steps_in_epoch` is nullopt for a stream, whose length is unknown. Throws DataError if there are steps
  /// to run but no samples.
  RunLength(const TrainerOptions& options, std::optional<std::int64_t> steps_in_epoch, std::int64_t epoch,
            std::int64_t step)
      : steps_in_epoch_(steps_in_epoch) {
    const auto after = [](std::int64_t begin, std::int64_t count) {  // any count may mean: without an end
      return begin + std::min(count, std::numeric_limits<std::int64_t>::max() - begin);
    };
    if (options.steps)
      last_step_ = after(step, *options.steps);
    else
      last_epoch_ = after(epoch, options.epochs.value_or(1));
    if (steps_in_epoch == 0 && !reached(epoch, step))
      throw DataError("the dataset has no samples to train on");
  }

  /// Returns whether the run ends at this position: after `epoch` whole epochs and `step` steps, counted over
  /// the trainer's life.
  [[nodiscard]] bool reached(std::int64_t epoch, std::int64_t step) const {
    return last_epoch_ ? epoch >= *last_epoch_ : step >= *last_step_;
  }
  /// Returns whether a run of a number of steps ends after `step`, within an epoch or not.
  [[nodiscard]] bool ends_at(std::int64_t step) const { return last_step_ == step; }
  /// Returns the plan of the zero-based `epoch`, which starts after `step` steps. For a stream, a run of a
  /// number of steps plans this epoch as the last one, with all remaining steps as an upper bound.
  [[nodiscard]] EpochPlan plan(std::int64_t epoch, std::int64_t step) const {
    if (last_epoch_) return {epoch, *last_epoch_, steps_in_epoch_};
    const std::int64_t left = *last_step_ - step;
    if (!steps_in_epoch_) return {epoch, epoch + 1, left};
    return {epoch, epoch + left / *steps_in_epoch_ + (left % *steps_in_epoch_ != 0),
            std::min(*steps_in_epoch_, left)};
  }

 private:
  std::optional<std::int64_t> steps_in_epoch_, last_epoch_, last_step_;
};

// Returns "26 samples an epoch" or, if ranks differ, "26 (2 ranks), 25 (1 rank) samples an epoch".
inline std::string samples_text(const std::vector<std::size_t>& of_ranks) {
  std::string text;
  for (std::size_t i = 0, end = 0; i < of_ranks.size(); i = end) {
    while (end < of_ranks.size() && of_ranks[end] == of_ranks[i]) ++end;
    text += detail::formatted("{}{}", text.empty() ? "" : ", ", of_ranks[i]);
    if (end - i < of_ranks.size())
      text += detail::formatted(" ({} {})", end - i, end - i == 1 ? "rank" : "ranks");
  }
  return text + " samples an epoch";
}

/// Compares the options of a run and `data`, a description of its data, over the ranks. Collective.
template <Communicator C>
void check_same_plan(const std::string& data, const TrainerOptions& options, C& comm) {
  if (comm.size() == 1) return;
  const auto number = [](const std::optional<std::int64_t>& given) {
    return given ? std::to_string(*given) : "none";
  };
  const auto flag = [](bool on) { return on ? "true" : "false"; };
  require_equal(
      comm,
      {{"batch_size", std::to_string(options.batch_size)},
       {"accumulate", std::to_string(options.accumulate)},
       {"epochs", number(options.epochs)},
       {"steps", number(options.steps)},
       {"seed", std::to_string(options.seed)},
       {"lr", options.lr ? detail::formatted("{}", *options.lr) : "none"},
       {"shuffle", flag(options.shuffle)},
       {"drop_last", flag(options.drop_last)},
       {"pad", flag(options.pad)},
       {"compare_parameters", flag(options.compare_parameters)},
       {"the data", data}},
      "the ranks would train differently",
      "give every rank the same options, and a sampler that gives each rank the same number of samples or "
      "knows the number of each by size_of(rank), such as DistributedSampler");
}

/// Compares the dataset, the samples of each rank and the options over the ranks. Compares the dataset by its
/// length and, for a TensorDataset, by a fingerprint: other datasets may draw their samples anew each time.
/// Collective. Throws an equal MismatchError on every rank.
template <Communicator C, Dataset D>
void check_same_run(D& dataset, const std::vector<std::size_t>& samples_of_ranks,
                    const TrainerOptions& options, C& comm) {
  if (comm.size() == 1) return;
  if constexpr (std::same_as<std::remove_cv_t<D>, TensorDataset>)
    check_same_dataset(comm, dataset);
  else
    check_same_dataset(comm, dataset_size(dataset));
  check_same_plan(samples_text(samples_of_ranks), options, comm);
}

/// Logs one warning if the ranks have constructed the model with different values. DistributedDataParallel
/// then broadcasts rank 0's, as Python does, and the other ranks' are lost. Call it before that. Collective;
/// sends 8 bytes per parameter.
template <Communicator Comm>
void warn_of_unequal_values(const torch::nn::Module& module, const DdpOptions& options, Comm& comm,
                            const World& world) {
  if (comm.size() == 1) return;
  std::vector<NamedTensor> parameters = unique_parameters(module);
  std::erase_if(parameters, [&](const NamedTensor& parameter) {
    return std::find(options.ignored.begin(), options.ignored.end(), parameter.name) != options.ignored.end();
  });
  const std::vector<std::string> digests =
      agree(comm, [&] { return parameters.empty() ? std::string() : digest_of(parameters); });
  // Every rank has taken part in the collective, whatever its options: DistributedDataParallel compares them,
  // and the models.
  if (!options.init_sync || comm.rank() != 0) return;
  std::size_t first = 0, culprit = 0, differing = 0;
  for (const std::string& sums : digests)
    if (sums.size() != digests[0].size()) return;  // another model, which is an error
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto other = std::find_if(digests.begin(), digests.end(), [&](const std::string& sums) {
      return sums.compare(8 * i, 8, digests[0], 8 * i, 8) != 0;
    });
    if (other == digests.end() || differing++ > 0) continue;
    first = i;
    culprit = static_cast<std::size_t>(other - digests.begin());
  }
  if (differing == 0) return;
  // In a group without world rank 0, the group's rank 0 logs.
  const Log log = world.rank() == 0 ? world.log : world.log.all();
  const RankNames name_of(comm);
  log.warning(
      "the model's initial values differ between the ranks ({} of {} parameters, first '{}' on rank {}): "
      "rank {}'s are used; call torch::manual_seed with one seed on every rank before constructing the "
      "model, or pass std::in_place_type of it, so that the Trainer seeds and constructs it",
      differing, parameters.size(), parameters[first].name, name_of(culprit), name_of(0));
}

}  // namespace lockstep::inline v0_1::detail
