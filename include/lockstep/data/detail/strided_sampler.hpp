#pragma once

#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>

#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

inline std::int64_t read_count(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt())
    throw CheckpointError(
        detail::formatted("the saved sampler has no number \"{}\": it is not a sampler of lockstep", key));
  return value.toInt();
}

// Throws CheckpointError if a saved setting differs: resuming in another order would repeat some samples and
// lose others.
inline void expect_saved(const char* what, std::int64_t saved, std::int64_t here) {
  if (saved != here)
    throw CheckpointError(detail::formatted(
        "the saved sampler has {} {} and this one {}: make it with the same dataset and options", what, saved,
        here));
}

inline void check_rank(const char* sampler, int rank, int world_size) {
  if (world_size < 1)
    throw UsageError(
        detail::formatted("{}: a world size of {} makes no sense, it is at least 1", sampler, world_size));
  if (rank < 0 || rank >= world_size)
    throw UsageError(detail::formatted("{}: rank {} is not between 0 and {}", sampler, rank, world_size - 1));
}

inline void check_batch_size(std::size_t batch_size) {
  if (batch_size == 0)
    throw UsageError("batch_size is 0: give at least 1");
}

/// The base of the samplers that order all samples anew each epoch and partition them with a stride: of the
/// order `o`, rank r of R gets o[r], o[r + R], o[r + 2R], ... If the length is not a multiple of R, the order
/// is repeated from its head as needed, or its tail is dropped (`drop_last`), or only the first ranks get a
/// last sample (`pad = false`).
///
/// The position is saved as the number of samples that all ranks together have consumed, so `load` can resume
/// an epoch that was saved with another number of ranks (all at the same step): no sample is lost or seen
/// twice.
class StridedSampler : public torch::data::samplers::Sampler<> {
 public:
  static constexpr bool draws_base_seed = false;

  /// Sets the epoch that the next `reset()` of this sampler and of all its copies starts. This sampler starts
  /// the epoch at once, unless it resumes a loaded one.
  void set_epoch(std::size_t epoch) {
    epoch_.set(epoch);
    if (!resumes()) begin();
  }
  /// Returns the epoch that the next `reset()` starts.
  [[nodiscard]] std::size_t epoch() const { return epoch_.number(); }
  [[nodiscard]] std::size_t pass_epoch() const { return epoch_.pass(); }
  [[nodiscard]] bool begun() const { return epoch_.begun(); }

  /// Starts a pass over the current epoch, or resumes the one that was just loaded.
  void reset(std::optional<std::size_t> new_length = std::nullopt) override {
    if (new_length && *new_length != length_) {
      length_ = *new_length;
      resumed_ = false;
    }
    if (resumes())
      resumed_ = false;
    else
      begin();
    epoch_.begin_pass();
  }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    check_batch_size(batch_size);
    resumed_ = false;
    const std::size_t count = std::min(batch_size, size() - position_);
    if (count == 0) return std::nullopt;
    std::vector<std::size_t> indices(count);
    read_order(position_, indices.data(), count);
    position_ += count;
    return indices;
  }

  /// Skips this rank's next `count` samples of the pass.
  void skip(std::size_t count) {
    resumed_ = false;
    position_ += std::min(count, size() - position_);
  }

  /// Returns the number of this rank's samples in the pass: equal on every rank, unless both `pad` and
  /// `drop_last` are false. For a resumed pass, counts only the remaining samples.
  [[nodiscard]] std::size_t size() const { return size_of(rank_); }
  /// Returns `size()` of any rank from 0 to world size - 1.
  [[nodiscard]] std::size_t size_of(int rank) const {
    const std::size_t left = length_ - std::min(skipped_, length_);
    const auto ranks = static_cast<std::size_t>(world_size_);
    if (options_.pad || options_.drop_last) return samples_per_rank(left, ranks, options_.drop_last);
    return left / ranks + (static_cast<std::size_t>(rank) < left % ranks ? 1 : 0);
  }
  /// Returns the number of samples that this rank has consumed in this pass, including those before a resume.
  [[nodiscard]] std::size_t position() const {
    return skipped_ / static_cast<std::size_t>(world_size_) + position_;
  }

  /// Returns whether a loaded pass has not been resumed yet; the next `reset()` resumes it.
  [[nodiscard]] bool resumes() const { return resumed_ && epoch_.pass() == epoch_.number(); }

  [[nodiscard]] std::size_t length() const { return length_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int world_size() const { return world_size_; }
  [[nodiscard]] const SamplerOptions& options() const { return options_; }

  /// Writes the epoch and the position. They are equal on all ranks at the same step, except that without
  /// `pad` a rank with one sample less does not count the last samples of the other ranks: keep rank 0's
  /// archive.
  void save(torch::serialize::OutputArchive& archive) const override {
    auto write = [&](const char* key, std::size_t value) {
      archive.write(key, c10::IValue(static_cast<std::int64_t>(value)));
    };
    write("length", length_);
    write("seed", options_.seed);
    write("shuffle", options_.shuffle);
    write("drop_last", options_.drop_last);
    write("pad", options_.pad);
    write("epoch", epoch_.pass());
    write("consumed", std::min(length_, skipped_ + position_ * static_cast<std::size_t>(world_size_)));
  }

  /// Restores what `save` wrote. Throws CheckpointError if length, seed, shuffle, drop_last or pad differ
  /// from the saved ones.
  void load(torch::serialize::InputArchive& archive) override {
    expect_saved("length", read_count(archive, "length"), static_cast<std::int64_t>(length_));
    expect_saved("seed", read_count(archive, "seed"), static_cast<std::int64_t>(options_.seed));
    expect_saved("shuffle", read_count(archive, "shuffle"), options_.shuffle);
    expect_saved("drop_last", read_count(archive, "drop_last"), options_.drop_last);
    expect_saved("pad", read_count(archive, "pad"), options_.pad);
    epoch_.set(static_cast<std::size_t>(read_count(archive, "epoch")));
    const auto consumed = static_cast<std::size_t>(read_count(archive, "consumed"));
    begin();
    skipped_ = consumed;
    resumed_ = true;
  }

 protected:
  StridedSampler(const char* name, std::size_t length, int rank, int world_size,
                 const SamplerOptions& options)
      : options_(options), length_(length), rank_(rank), world_size_(world_size) {
    check_rank(name, rank, world_size);
  }
  // Copies share the epoch. No move: it would leave a sampler without an epoch.
  StridedSampler(const StridedSampler&) = default;
  StridedSampler& operator=(const StridedSampler&) = default;

  /// Writes the dataset indices of this rank's samples `first` to `first + count - 1` of the pass.
  virtual void read_order(std::size_t first, std::size_t* indices, std::size_t count) = 0;

  /// Returns the place of this rank's sample `i` in the whole order, before wrapping at the length.
  [[nodiscard]] std::size_t place(std::size_t i) const {
    return skipped_ + static_cast<std::size_t>(rank_) + i * static_cast<std::size_t>(world_size_);
  }
  [[nodiscard]] std::size_t skipped() const { return skipped_; }

 private:
  void begin() {
    epoch_.enter();
    position_ = skipped_ = 0;
    resumed_ = false;
  }

  SamplerOptions options_;
  std::size_t length_;
  int rank_, world_size_;
  SamplerEpoch epoch_;
  std::size_t skipped_ = 0;   // samples that all ranks consumed before this pass was resumed
  std::size_t position_ = 0;  // samples that this rank has consumed since then
  bool resumed_ = false;
};

}  // namespace lockstep::detail
