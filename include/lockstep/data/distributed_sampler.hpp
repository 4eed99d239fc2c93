#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>

#include <limits>

#include "lockstep/data/detail/strided_sampler.hpp"

namespace lockstep {

/// Partitions a dataset over the ranks with the indices of Python's sampler: `torch.randperm` seeded with
/// seed + epoch, padded from the head to a multiple of the world size (or its tail dropped), of which each
/// rank gets every world-size-th index.
///
/// Construction does no work. The first `next` of an epoch draws the permutation and keeps only this rank's
/// part: 8 bytes per sample, 4 below 2^31 samples, none without `shuffle`. An empty dataset gives empty
/// passes, as in Python.
///
/// Counterpart: torch.utils.data.DistributedSampler.
class DistributedSampler : public detail::StridedSampler {
 public:
  /// Throws UsageError unless 0 <= rank < world_size.
  DistributedSampler(std::size_t length, int rank, int world_size, const SamplerOptions& options = {})
      : detail::StridedSampler("DistributedSampler", length, rank, world_size, options) {}

  template <RankedGroup G>
  DistributedSampler(std::size_t length, const G& group, const SamplerOptions& options = {})
      : DistributedSampler(length, group.rank(), group.size(), options) {}

  /// Starts or resumes a pass, and frees the permutation of another one, so that copies made afterwards do
  /// not keep it.
  void reset(std::optional<std::size_t> new_length = std::nullopt) override {
    detail::StridedSampler::reset(new_length);
    if (key() != key_) order_ = at::Tensor();
  }

  /// Draws this epoch's permutation now instead of at the first `next`.
  void prepare() {
    if (!options().shuffle || size() == 0) return;
    if (order_.defined() && key() == key_) return;
    order_ = at::Tensor();  // never holds two orders at once
    // The draws do not depend on the dtype. With half the bytes, a shuffle beyond the caches is twice as
    // fast.
    if (length() <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
      order_ = draw<std::int32_t>();
    else
      order_ = draw<std::int64_t>();
    key_ = key();
  }

 protected:
  void read_order(std::size_t first, std::size_t* indices, std::size_t count) override {
    if (!options().shuffle) {
      for (std::size_t i = 0; i < count; ++i) indices[i] = place(first + i) % length();
      return;
    }
    prepare();
    if (order_.scalar_type() == at::kInt)
      std::copy_n(order_.const_data_ptr<std::int32_t>() + first, count, indices);
    else
      std::copy_n(order_.const_data_ptr<std::int64_t>() + first, count, indices);
  }

 private:
  struct Key {
    std::size_t epoch, length, skipped;
    bool operator==(const Key&) const = default;
  };
  [[nodiscard]] Key key() const { return {pass_epoch(), length(), skipped()}; }

  template <class Index>
  [[nodiscard]] at::Tensor draw() const {
    const auto type = at::TensorOptions().dtype(c10::CppTypeToScalarType<Index>::value).device(at::kCPU);
    const auto generator = at::detail::createCPUGenerator(options().seed + pass_epoch());
    const at::Tensor whole = at::randperm(static_cast<std::int64_t>(length()), generator, type);
    at::Tensor own = at::empty({static_cast<std::int64_t>(size())}, type);
    const Index* from = whole.const_data_ptr<Index>();
    Index* to = own.mutable_data_ptr<Index>();
    std::size_t k = place(0) % length();
    for (std::size_t i = 0, n = size(); i < n; ++i) {
      to[i] = from[k];
      k += static_cast<std::size_t>(world_size());
      if (k >= length()) k %= length();
    }
    return own;
  }

  at::Tensor order_;  // this rank's part; immutable once made, since copies of the sampler share it
  Key key_{};
};

}  // namespace lockstep
