#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/multinomial.h>

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// Draws `num_samples` indices with probabilities in proportion to weights, anew in each epoch, and partitions
/// them over the ranks as DistributedSampler does: `torch.multinomial` over all weights, with a generator seeded
/// with seed + epoch, of which each rank gets every world-size-th index. SamplerOptions::shuffle has no effect.
///
/// A Trainer draws as many samples as the dataset has, with replacement, by the `sample_weights()` of the dataset:
///
///   struct Balanced : TensorDataset {
///     using TensorDataset::TensorDataset;
///     at::Tensor sample_weights() const { return 1 / target().bincount().index({target()}).to(at::kDouble); }
///   };
///   Trainer trainer{world, options, Net(), std::in_place_type<WeightedRandomSampler>};
///
/// Counterpart: torch.utils.data.WeightedRandomSampler.
class WeightedRandomSampler : public detail::StridedSampler {
 public:
  /// `weights` is [N], one for each sample of the dataset. Throws DataError if a weight is negative or not finite,
  /// or if too few are above 0: none, or without replacement fewer than `num_samples`. Throws UsageError unless
  /// 0 <= rank < world_size.
  WeightedRandomSampler(const at::Tensor& weights, std::size_t num_samples, int rank, int world_size,
                        const SamplerOptions& options = {}, bool replacement = true)
      : detail::StridedSampler("WeightedRandomSampler", num_samples, rank, world_size, options),
        weights_(weights.detach().to(at::kCPU, at::kDouble, /*non_blocking=*/false, /*copy=*/true)),
        replacement_(replacement) {
    const auto above = static_cast<std::size_t>(weights_.count_nonzero().item<std::int64_t>());
    if (weights_.dim() != 1 || !weights_.isfinite().logical_and(weights_.ge(0)).all().item<bool>() ||
        above < (replacement || num_samples == 0 ? std::size_t{num_samples > 0} : num_samples))
      throw DataError(detail::formatted(
          "a WeightedRandomSampler draws {} samples {} replacement from weights {}, of which {} are not 0: "
          "give a finite weight of 0 or more for each sample of the dataset, and enough that are not 0",
          num_samples, replacement ? "with" : "without", detail::describe(weights_), above));
  }
  /// Takes rank and number of ranks from a group, such as a World or a communicator.
  template <detail::RankedGroup G>
  WeightedRandomSampler(const at::Tensor& weights, std::size_t num_samples, const G& group,
                        const SamplerOptions& options = {}, bool replacement = true)
      : WeightedRandomSampler(weights, num_samples, group.rank(), group.size(), options, replacement) {}
  /// Takes the weights from `dataset.sample_weights()`, and as many samples as the dataset has. Throws DataError
  /// unless there is one weight for each sample.
  template <Dataset D, detail::RankedGroup G>
  requires requires(D& dataset) {
    { dataset.sample_weights() } -> std::convertible_to<at::Tensor>;
  }
  WeightedRandomSampler(D& dataset, const G& group, const SamplerOptions& options = {})
      : WeightedRandomSampler(dataset.sample_weights(), dataset_size(dataset), group, options) {
    if (static_cast<std::size_t>(weights_.numel()) != length())
      throw DataError(detail::formatted("a dataset of {} samples has {} sample_weights: give one for each",
                                        length(), weights_.numel()));
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    detail::StridedSampler::save(archive);
    archive.write("weights", c10::IValue(weights_hash()));
  }
  /// Throws CheckpointError as DistributedSampler, and if the weights or `replacement` differ.
  void load(torch::serialize::InputArchive& archive) override {
    detail::expect_saved("a hash of the weights", detail::read_count(archive, "weights"), weights_hash());
    detail::StridedSampler::load(archive);
  }

 protected:
  void read_order(std::size_t first, std::size_t* indices, std::size_t count) override {
    if (const std::pair key{pass_epoch(), length()}; !order_.defined() || key != drawn_) {
      order_ = at::multinomial(weights_, static_cast<std::int64_t>(length()), replacement_,
                               at::detail::createCPUGenerator(options().seed + pass_epoch()));
      drawn_ = key;
    }
    const auto* order = detail::const_data<std::int64_t>(order_);
    for (std::size_t i = 0; i < count; ++i)
      indices[i] = static_cast<std::size_t>(order[place(first + i) % length()]);
  }

 private:
  [[nodiscard]] std::int64_t weights_hash() const {
    return static_cast<std::int64_t>(detail::hash_value(replacement_, weights_));
  }

  at::Tensor weights_;  // fp64
  bool replacement_;
  at::Tensor order_;  // of all ranks; immutable once drawn, since copies of the sampler share it
  std::pair<std::int64_t, std::size_t> drawn_;  // its epoch and length
};

}  // namespace lockstep::inline v0_1
