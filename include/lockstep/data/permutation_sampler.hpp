#pragma once

#include <array>
#include <bit>

#include "lockstep/data/detail/strided_sampler.hpp"
#include "lockstep/data/generator.hpp"

namespace lockstep {

/// A keyed permutation of 0 .. length - 1 that is computed, not stored. Evaluating an index takes a few
/// nanoseconds.
///
/// A Feistel network is a bijection of w bits for any round function. w is the smallest width that holds the
/// length, but at least 6: narrower networks do not reach all orders evenly. A value at or above the length
/// is encrypted again until it falls below (less than twice on average for lengths of 33 or more), which
/// leaves a bijection of 0 .. length - 1.
class KeyedPermutation {
 public:
  KeyedPermutation(std::size_t length, std::uint64_t key) : length_(length) {
    const int bits = length > 64 ? static_cast<int>(std::bit_width(length - 1)) : 6;
    low_bits_ = bits / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
    for (std::uint64_t& round_key : keys_) round_key = key = detail::mix_bits(key);
  }

  /// Returns the value at index `i` < length.
  [[nodiscard]] std::size_t operator()(std::size_t i) const {
    std::uint64_t value = i;
    do value = encrypt(value);
    while (value >= length_);
    return static_cast<std::size_t>(value);
  }

  [[nodiscard]] std::size_t length() const { return length_; }

 private:
  [[nodiscard]] std::uint64_t encrypt(std::uint64_t value) const {
    std::uint64_t low = value & low_mask_, high = value >> low_bits_;
    for (std::size_t round = 0; round < keys_.size(); round += 2) {
      high ^= detail::mix_bits(low ^ keys_[round]) & high_mask_;
      low ^= detail::mix_bits(high ^ keys_[round + 1]) & low_mask_;
    }
    return high << low_bits_ | low;
  }

  std::size_t length_;
  int low_bits_;
  std::uint64_t low_mask_, high_mask_;
  std::array<std::uint64_t, 8> keys_;
};

/// Shuffles any number of samples in constant memory and time. Equal to DistributedSampler except for the
/// order, which is a KeyedPermutation for each (seed, epoch) and not Python's.
class PermutationSampler : public detail::StridedSampler {
 public:
  /// Throws UsageError unless 0 <= rank < world_size.
  PermutationSampler(std::size_t length, int rank, int world_size, const SamplerOptions& options = {})
      : detail::StridedSampler("PermutationSampler", length, rank, world_size, options) {}

  template <RankedGroup G>
  PermutationSampler(std::size_t length, const G& group, const SamplerOptions& options = {})
      : PermutationSampler(length, group.rank(), group.size(), options) {}

 protected:
  void read_order(std::size_t first, std::size_t* indices, std::size_t count) override {
    const KeyedPermutation order(length(), seed_of({.seed = options().seed, .epoch = pass_epoch()}));
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t at = place(first + i) % length();
      indices[i] = options().shuffle ? order(at) : at;
    }
  }
};

}  // namespace lockstep
