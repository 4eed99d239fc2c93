#pragma once

#include <numeric>

#include "lockstep/data/detail/strided_sampler.hpp"

namespace lockstep {

/// Partitions a dataset into one block of consecutive samples per rank, with no sample repeated or dropped.
/// The concatenated results of the ranks are in the dataset's order.
///
/// Blocks differ by at most one sample, the longer ones first. With more ranks than samples some blocks are
/// empty. Therefore sum and count a metric and reduce it once, at the end: a collective in each step would
/// hang.
class EvaluationSampler : public torch::data::samplers::Sampler<> {
 public:
  static constexpr bool draws_base_seed = false;

  /// Throws UsageError unless 0 <= rank < world_size.
  EvaluationSampler(std::size_t length, int rank, int world_size)
      : length_(length),
        rank_(static_cast<std::size_t>(rank)),
        world_size_(static_cast<std::size_t>(world_size)) {
    detail::check_rank("EvaluationSampler", rank, world_size);
  }

  template <RankedGroup G>
  EvaluationSampler(std::size_t length, const G& group)
      : EvaluationSampler(length, group.rank(), group.size()) {}

  /// Has no effect on the order, which is the same in every epoch.
  void set_epoch(std::size_t epoch) {
    epoch_.set(epoch);
    epoch_.enter();
  }
  [[nodiscard]] std::size_t pass_epoch() const { return epoch_.pass(); }
  [[nodiscard]] bool begun() const { return epoch_.begun(); }

  void reset(std::optional<std::size_t> new_length = std::nullopt) override {
    if (new_length) length_ = *new_length;
    if (!resumed_) position_ = skipped_ = 0;
    resumed_ = false;
    epoch_.begin_pass();
  }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    detail::check_batch_size(batch_size);
    resumed_ = false;
    const std::size_t share = share_of(rank_);
    const std::size_t count = std::min(batch_size, share - std::min(position_, share));
    if (count == 0) return std::nullopt;
    std::vector<std::size_t> indices(count);
    std::iota(indices.begin(), indices.end(), first() + position_);
    position_ += count;
    return indices;
  }

  /// Returns the number of samples of this rank, which may differ by one between ranks. A resumed pass counts
  /// only its remaining samples.
  [[nodiscard]] std::size_t size() const { return size_of(rank()); }
  /// Returns `size()` of any rank from 0 to world size - 1.
  [[nodiscard]] std::size_t size_of(int rank) const {
    const std::size_t share = share_of(static_cast<std::size_t>(rank));
    return share - std::min(skipped_, share);
  }
  /// Returns the index of the first sample of this rank's block.
  [[nodiscard]] std::size_t first() const {
    return rank_ * (length_ / world_size_) + std::min(rank_, length_ % world_size_);
  }
  [[nodiscard]] std::size_t position() const { return position_; }
  /// Skips this rank's next `count` samples of the pass.
  void skip(std::size_t count) {
    resumed_ = false;
    position_ += std::min(count, share_of(rank_) - std::min(position_, share_of(rank_)));
  }
  /// Returns whether the next `reset()` resumes a loaded pass.
  [[nodiscard]] bool resumes() const { return resumed_; }
  [[nodiscard]] int rank() const { return static_cast<int>(rank_); }

  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("length", c10::IValue(static_cast<std::int64_t>(length_)));
    archive.write("world_size", c10::IValue(static_cast<std::int64_t>(world_size_)));
    archive.write("position", c10::IValue(static_cast<std::int64_t>(position_)));
  }

  /// Throws CheckpointError if the saved length or world size differs.
  void load(torch::serialize::InputArchive& archive) override {
    detail::expect_saved("length", detail::read_count(archive, "length"), static_cast<std::int64_t>(length_));
    detail::expect_saved("world size", detail::read_count(archive, "world_size"),
                         static_cast<std::int64_t>(world_size_));
    position_ = skipped_ = static_cast<std::size_t>(detail::read_count(archive, "position"));
    resumed_ = true;
  }

 private:
  [[nodiscard]] std::size_t share_of(std::size_t rank) const {
    return length_ / world_size_ + (rank < length_ % world_size_ ? 1 : 0);
  }

  std::size_t length_, rank_, world_size_;
  detail::SamplerEpoch epoch_;
  std::size_t position_ = 0;
  std::size_t skipped_ = 0;  // by each rank, before the pass was resumed
  bool resumed_ = false;
};

}  // namespace lockstep
