#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep {

/// What a training run is, beside its policies. Equal on every rank, which `Trainer::fit` checks.
struct TrainerOptions {
  /// Passes over the dataset, or optimizer steps: one of the two; 1 epoch where neither is given.
  std::optional<std::int64_t> epochs = std::nullopt;
  std::optional<std::int64_t> steps = std::nullopt;
  /// Samples a rank and a step: the global batch is `batch_size` times the world size.
  std::int64_t batch_size = 32;
  /// The learning rate of the default optimizer, plain SGD.
  double lr = 1e-3;
  /// Seeds the model's initial values (equal on every rank), what is drawn while training (`seed + rank`) and
  /// the sampler.
  std::uint64_t seed = 0;
  bool shuffle = true;
  /// Leaves out the samples at the end that do not fill all ranks, instead of repeating some of the first.
  bool drop_last = false;
  /// Threads a rank that load ahead; 0 loads in the training thread.
  std::int64_t workers = 0;
  /// Whether rank 0 says how training goes.
  bool progress = true;
};

namespace detail {
template <class... Args>
[[noreturn]] void refuse_option(fmt::format_string<Args...> text, Args&&... args) {
  throw UsageError(fmt::format(text, std::forward<Args>(args)...));
}
}  // namespace detail

/// The options themselves; throws UsageError that names the option, at the first value that cannot train.
inline const TrainerOptions& validated(const TrainerOptions& options) {
  using detail::refuse_option;
  if (options.epochs && options.steps)
    refuse_option("both epochs ({}) and steps ({}) are given: give one of them", *options.epochs,
                  *options.steps);
  if (options.epochs && *options.epochs < 0)
    refuse_option("epochs is {}: give the number of passes over the dataset, 0 or more", *options.epochs);
  if (options.steps && *options.steps < 0)
    refuse_option("steps is {}: give a number of steps, 0 or more", *options.steps);
  if (options.batch_size < 1)
    refuse_option("batch size is {}: give the samples a rank and a step, 1 or more", options.batch_size);
  if (!std::isfinite(options.lr) || options.lr < 0)
    refuse_option("learning rate is {}: give a finite number, 0 or more", options.lr);
  if (options.workers < 0)
    refuse_option("workers is {}: give a number of threads, 0 or more", options.workers);
  return options;
}

}  // namespace lockstep
