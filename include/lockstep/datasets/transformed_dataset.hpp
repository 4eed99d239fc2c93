#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <ATen/core/Generator.h>

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/data/loader.hpp"

namespace lockstep::inline v0_1 {

/// A dataset whose samples pass through a transform, for a Trainer and for `evaluate`, which construct their
/// loaders without one:
///
///   TransformedDataset data{ImageFolder(folder), Compose{RandomResizedCrop{224}, ToTensor{}}};
///   trainer.fit(data, loss, OnEpochStart{[&](const EpochPlan& plan) {
///     data.set_epoch(static_cast<std::uint64_t>(plan.epoch));
///   }});
///
/// The draws of a sample follow from (seed, epoch, index), so that they are the same at any number of workers
/// and ranks. `get` is thread-safe if that of the dataset is; call `set_epoch` between epochs.
template <IndexedDataset D>
class TransformedDataset {
 public:
  /// `seed` makes the draws of a run repeatable.
  TransformedDataset(D dataset, Transform transform, std::uint64_t seed = 0)
      : dataset_(std::move(dataset)), transform_(std::move(transform)), seed_(seed) {}

  [[nodiscard]] std::size_t size() { return dataset_size(dataset_); }

  /// Returns sample `index`, transformed.
  [[nodiscard]] Example get(std::size_t index) {
    at::Generator generator = keyed_generator({.seed = seed_, .epoch = epoch_, .stream = index});
    return transform_(dataset_.get(index), generator);
  }

  /// Sets the epoch from which the draws follow.
  void set_epoch(std::int64_t epoch) { epoch_ = epoch; }

  /// Returns the dataset without the transform.
  [[nodiscard]] const D& dataset() const { return dataset_; }

 private:
  D dataset_;
  Transform transform_;
  std::uint64_t seed_;
  std::int64_t epoch_ = 0;
};

}  // namespace lockstep::inline v0_1
