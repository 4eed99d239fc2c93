#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "lockstep/data/detail/option_checks.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"

namespace lockstep::inline v0_1 {

class DistributedSampler;
class CpuComm;
struct Fp32;

namespace detail {

/// The policies of a Trainer by default.
using DefaultSampler = DistributedSampler;
using DefaultComm = CpuComm;    ///< See DefaultSampler.
using DefaultPrecision = Fp32;  ///< See DefaultSampler.

}  // namespace detail

inline namespace LOCKSTEP_DEVICES {
template <class... Policies>
class Trainer;
}  // namespace LOCKSTEP_DEVICES

/// The options of a Trainer besides its policies. All but `num_workers` and `progress` must be equal on every
/// rank: the constructor compares `ddp`, `Trainer::fit` the others, and both throw MismatchError.
struct TrainerOptions {
  /// Length of each `fit` in epochs or in optimizer `steps`. Set at most one of the two. Default: 1 epoch.
  std::optional<std::int64_t> epochs = std::nullopt;
  std::optional<std::int64_t> steps = std::nullopt;
  /// Samples per rank and micro-batch.
  std::int64_t batch_size = 32;
  /// Micro-batches per rank and optimizer step. Their gradients accumulate and are reduced once, with the
  /// last micro-batch. The rest at the end of an epoch forms a step of its own.
  std::int64_t accumulate = 1;
  /// Learning rate of the default optimizer, plain SGD. Default: 1e-3. UsageError beside an OptimizerFactory.
  std::optional<double> lr = std::nullopt;
  /// Seeds the model's initial values (equal on every rank), the generators during training (`seed + rank`)
  /// and the sampler.
  std::uint64_t seed = 0;
  bool shuffle = true;  ///< Of the sampler.
  /// Drops the last samples that do not fill all ranks, instead of repeating some of the first samples.
  bool drop_last = false;
  /// Repeats some of the first samples so that every rank has the same number, as Python does. If false, each
  /// sample occurs exactly once per epoch, and the last steps still weigh every sample equally. False is refused beside
  /// `drop_last`, and for a model whose forward communicates (synchronized batch norm), as a rank may have no forward in the
  /// last step.
  bool pad = true;
  /// Loader threads per rank; 0 loads in the training thread.
  std::int64_t num_workers = 0;
  bool progress = true;
  /// Whether the ranks compare their parameters after each epoch; see check_same_parameters.
  bool compare_parameters = true;
  DdpOptions ddp = {};
};

/// Returns `options`. Throws UsageError that names the first invalid option.
inline const TrainerOptions& validated(const TrainerOptions& options) {
  if (options.epochs && options.steps)
    throw UsageError(detail::formatted("both epochs ({}) and steps ({}) are given: give one of them",
                                       *options.epochs, *options.steps));
  const auto at_least = [](std::int64_t least, const char* name, std::int64_t value, const char* advice) {
    if (value < least) throw UsageError(detail::formatted("{} is {}: give {}", name, value, advice));
  };
  at_least(0, "epochs", options.epochs.value_or(0), "the number of passes over the dataset, 0 or more");
  at_least(0, "steps", options.steps.value_or(0), "a number of steps, 0 or more");
  detail::check_batch_size(options.batch_size);
  at_least(1, "accumulate", options.accumulate, "1 or more micro-batches per step");
  if (options.accumulate > std::numeric_limits<std::int64_t>::max() / options.batch_size)
    throw UsageError(detail::formatted(
        "accumulate is {} at a batch size of {}, more samples per step than can be counted: give less",
        options.accumulate, options.batch_size));
  if (options.lr && (!std::isfinite(*options.lr) || *options.lr < 0))
    throw UsageError(detail::formatted("learning rate is {}: give a finite number, 0 or more", *options.lr));
  detail::check_tail(options.drop_last, options.pad);
  detail::check_workers(options.num_workers);
  return options;
}

}  // namespace lockstep::inline v0_1
