#pragma once

#include <array>
#include <bit>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>

#include "lockstep/data/detail/strided_sampler.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

struct RandomSamplerOptions {
  /// Generator to draw from, as in Python's DataLoader(generator=g). Undefined means the default generator,
  /// which `torch::manual_seed` seeds.
  at::Generator generator = {};
  /// Draw a number before each pass, as a DataLoader does. False gives the order of Python's bare
  /// RandomSampler.
  bool draw_base_seed = true;
};

/// Shuffles a dataset in the order of Python's `DataLoader(shuffle=True)`, for one process. Each of several
/// processes sees all samples, in orders that differ if their generators do.
///
/// Each pass draws the loader's base seed and then a seed from the default generator, and permutes with a new
/// generator made from the latter. With RandomSamplerOptions::generator, the pass draws the permutation from
/// that generator directly, and draws it once more, only to advance the generator, when the pass is read to
/// its end. Passes therefore differ without `set_epoch`, which is ignored.
///
/// Counterpart: torch.utils.data.RandomSampler.
class RandomSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Tells DataLoader that this sampler draws the base seed.
  static constexpr bool draws_base_seed = true;

  /// Throws DataError if the dataset is empty, as Python does.
  explicit RandomSampler(std::size_t length, RandomSamplerOptions options = {})
      : length_(length), options_(std::move(options)) {
    check_length();
  }

  /// Has no effect on the order, which follows from the generator's state.
  void set_epoch(std::size_t epoch) {
    epoch_.set(epoch);
    epoch_.enter();
  }
  [[nodiscard]] std::size_t pass_epoch() const { return epoch_.pass(); }
  [[nodiscard]] bool begun() const { return epoch_.begun(); }

  /// Starts a pass, and makes all its draws except the last.
  void reset(std::optional<std::size_t> new_length = std::nullopt) override {
    if (new_length && *new_length != length_) {
      length_ = *new_length;
      check_length();
      resumed_ = false;
    }
    if (!resumed_) begin();
    resumed_ = false;
    epoch_.begin_pass();
  }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    detail::check_batch_size(batch_size);
    if (!order_.defined()) begin();
    resumed_ = false;
    const std::size_t count = std::min(batch_size, length_ - position_);
    if (count < batch_size && !ended_) {
      ended_ = true;
      if (options_.generator.defined()) permute(options_.generator);
    }
    if (count == 0) return std::nullopt;
    std::vector<std::size_t> indices(count);
    std::copy_n(order_.const_data_ptr<std::int64_t>() + position_, count, indices.begin());
    position_ += count;
    return indices;
  }

  /// Returns the number of samples of the pass. A resumed pass counts only its remaining samples.
  [[nodiscard]] std::size_t size() const { return length_ - skipped_; }
  /// Returns the number of samples returned in this pass.
  [[nodiscard]] std::size_t position() const { return position_; }
  /// Skips the next `count` samples of the pass.
  void skip(std::size_t count) {
    if (count > 0) next(count);  // which also makes the draw at the end of a pass
  }
  [[nodiscard]] bool resumes() const { return resumed_; }
  /// Returns this process's rank: the sampler itself is not distributed.
  [[nodiscard]] int rank() const { return std::max(0, detail::process_rank.load()); }

  /// Writes the generator state from which this pass's permutation was drawn, and the position. To resume,
  /// also restore the default generator, which this sampler does not own.
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("length", c10::IValue(static_cast<std::int64_t>(length_)));
    archive.write("position", c10::IValue(static_cast<std::int64_t>(position_)));
    archive.write("drawn", c10::IValue(static_cast<std::int64_t>(order_.defined())));
    if (order_.defined()) archive.write("state", state_, /*is_buffer=*/true);
    if (options_.generator.defined())
      archive.write("generator", options_.generator.get_state(), /*is_buffer=*/true);
  }

  /// Throws CheckpointError if the saved length differs, or one of the two samplers has its own generator and
  /// the other does not.
  void load(torch::serialize::InputArchive& archive) override {
    detail::expect_saved("length", detail::read_count(archive, "length"), static_cast<std::int64_t>(length_));
    at::Tensor now;
    const bool own = archive.try_read("generator", now, /*is_buffer=*/true);
    if (own != options_.generator.defined())
      throw CheckpointError(
          detail::formatted("the saved RandomSampler drew from {} generator and this one draws from {}",
                            own ? "its own" : "the default", own ? "the default" : "its own"));
    order_ = at::Tensor();
    position_ = skipped_ = 0;
    resumed_ = detail::read_count(archive, "drawn") != 0;
    if (resumed_) {
      archive.read("state", state_, /*is_buffer=*/true);
      at::Generator again = at::detail::createCPUGenerator();
      again.set_state(state_);
      order_ = permute(again);
      position_ = static_cast<std::size_t>(detail::read_count(archive, "position"));
      skipped_ = std::min(position_, length_);
      ended_ = position_ >= length_;
    }
    if (own) options_.generator.set_state(now);
  }

 private:
  void check_length() const {
    if (length_ == 0) throw DataError("a RandomSampler needs at least one sample, and the dataset has none");
  }

  static std::int64_t draw_seed(const at::Generator& generator) {
    return at::empty({}, at::TensorOptions().dtype(at::kLong).device(at::kCPU))
        .random_(generator.defined() ? std::optional(generator) : std::nullopt)
        .item<std::int64_t>();
  }

  at::Tensor permute(const at::Generator& generator) const {
    return at::randperm(static_cast<std::int64_t>(length_), generator,
                        at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  }

  void begin() {
    order_ = at::Tensor();  // never holds two orders at once
    if (options_.draw_base_seed) draw_seed(options_.generator);
    at::Generator generator = options_.generator;
    if (!generator.defined())
      generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(draw_seed(generator)));
    state_ = generator.get_state();
    order_ = permute(generator);
    position_ = skipped_ = 0;
    ended_ = false;
  }

  std::size_t length_;
  RandomSamplerOptions options_;
  detail::SamplerEpoch epoch_;
  at::Tensor order_, state_;
  std::size_t position_ = 0;
  std::size_t skipped_ = 0;  // returned before the pass was resumed
  bool resumed_ = false;
  bool ended_ = false;  // `next` asked for more samples than remained
};

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

/// Partitions and shuffles a dataset over the ranks without storing the order: constant memory, and constant
/// time per index. Follows DistributedSampler except for the order, which is a KeyedPermutation for each
/// (seed, epoch).
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
