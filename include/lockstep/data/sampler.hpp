#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include "lockstep/data/detail/option_checks.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/drawn_batch.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::inline v0_1 {

/// A sampler that selects this rank's samples of a dataset and their order.
///
/// 1. It is a `torch::data::samplers::Sampler<>`: `reset()` starts a pass, `next(n)` returns at most `n`
///    indices, or nullopt when the pass is over, and `save` and `load` carry epoch and position. The first
///    `reset()` after a `load` resumes the saved pass instead of starting a new one.
/// 2. `size()` returns the number of samples of this rank in the coming pass, before it starts. No member
///    communicates: the indices follow from the arguments alone.
/// 3. `set_epoch(e)` is called by every rank with the same epoch before a pass and determines the indices of
///    the pass. Epoch 0 is the default. A no-op for samplers whose order does not depend on the epoch.
/// 4. It is copyable, and `set_epoch` on one copy applies to all copies: loaders take samplers by value.
/// 5. It is not thread-safe.
template <class S>
concept Sampler = std::derived_from<S, torch::data::samplers::Sampler<>> && std::copy_constructible<S> &&
    requires(S& sampler, const S& view, std::size_t n) {
  sampler.set_epoch(n);
  sampler.reset();
  { sampler.next(n) } -> std::same_as<std::optional<std::vector<std::size_t>>>;
  { view.size() } -> std::convertible_to<std::size_t>;
};

/// A Sampler that owns the epoch and the position of its passes. DataLoader wraps any other Sampler in an
/// adapter that counts its passes and samples, and skips samples by calling `next`.
///
/// 1. `pass_epoch()` returns the epoch of the current pass, which the last `reset()`, `set_epoch` or `load`
///    on this object has set.
/// 2. `position()` returns the number of samples that this rank has consumed in the pass, including those
///    before a resume. `skip(n)` advances it as `next(n)` does, but need not compute the indices.
/// 3. `begun()` returns whether this object has started a pass since `set_epoch` was called on it or on a
///    copy. False in a copy. A DataLoader advances the epoch before a further pass over a begun epoch.
/// 4. `resumes()` returns whether the next `reset()` resumes a loaded pass.
/// 5. `rank()` returns the zero-based rank from which a DataLoader's transforms draw by default.
/// 6. `draws_base_seed()` is true if `reset()` makes the draw of LoaderOptions::draw_base_seed itself.
template <class S>
concept ResumableSampler = Sampler<S> && requires(S& sampler, const S& view, std::size_t n) {
  sampler.skip(n);
  { view.pass_epoch() } -> std::convertible_to<std::int64_t>;
  { view.position() } -> std::convertible_to<std::size_t>;
  { view.begun() } -> std::convertible_to<bool>;
  { view.resumes() } -> std::convertible_to<bool>;
  { view.rank() } -> std::convertible_to<int>;
  { view.draws_base_seed() } -> std::convertible_to<bool>;
};

/// A Sampler that knows the sample count of every rank, so that ranks with unequal counts can be weighted
/// without communication. `size_of(rank)` returns `size()` of that zero-based rank. The n-th batch of a rank,
/// counted from 0, has `min(batch, size_of(rank) - n * batch)` samples.
template <class S>
concept CountingSampler = Sampler<S> && requires(const S& view, int rank) {
  { view.size_of(rank) } -> std::convertible_to<std::size_t>;
};

/// The options of the samplers that partition a dataset over the ranks.
struct SamplerOptions {
  /// Seed of the shuffle; the same on every rank.
  std::uint64_t seed = 0;
  /// Shuffle the dataset anew in each epoch. False keeps its order.
  bool shuffle = true;
  /// Drop the tail that does not divide by the number of ranks, instead of repeating samples from the head.
  bool drop_last = false;
  /// Repeat samples from the head until all ranks have equally many, as Python does. If false, which UsageError refuses
  /// beside `drop_last`, each sample is seen exactly once: the first ranks get the tail, so ranks may differ by one sample,
  /// and ranks beyond the number of samples have none.
  bool pad = true;
  /// Start the next epoch with each further `reset()`, unless `set_epoch` was called since the last one: for
  /// loaders that do not call set_epoch, such as that of torch::data::make_data_loader. Without it, such a
  /// pass repeats the order of the last one, as in Python, and a shuffling sampler warns once.
  bool advance_epoch_on_reset = false;
};

/// Returns the number of samples of each rank when `length` samples are partitioned evenly: rounded up (some
/// samples are repeated), or rounded down with `drop_last`.
inline std::size_t samples_per_rank(std::size_t length, std::size_t world_size, bool drop_last) {
  return length / world_size + (!drop_last && length % world_size != 0 ? 1 : 0);
}

/// Constructs a sampler of any kind for `length` samples. Arguments that the kind does not need are ignored.
template <Sampler S, detail::RankedGroup G>
S make_sampler(std::size_t length, const G& group, const SamplerOptions& options = {}) {
  if constexpr (std::is_constructible_v<S, std::size_t, const G&, SamplerOptions>) {
    return S(length, group, options);
  } else if constexpr (std::is_constructible_v<S, std::size_t, const G&>) {
    return S(length, group);
  } else {
    static_assert(
        std::is_constructible_v<S, std::size_t>,
        "lockstep: a sampler is made from (length, group, SamplerOptions), (length, group) or (length)");
    return S(length);
  }
}

namespace detail {

/// The epoch of a sampler: the number is shared by all copies, the pass is each copy's own.
class SamplerEpoch {
 public:
  SamplerEpoch() = default;
  // A copy has not begun a pass: its loader starts with the epoch that is set.
  SamplerEpoch(const SamplerEpoch& other) : shared_(other.shared_), pass_(other.pass_) {}
  SamplerEpoch& operator=(const SamplerEpoch& other) {
    shared_ = other.shared_;
    pass_ = other.pass_;
    begun_.reset();
    return *this;
  }
  ~SamplerEpoch() = default;

  void set(std::int64_t number) {
    shared_->number = number;
    ++shared_->times_set;
  }
  [[nodiscard]] std::int64_t number() const { return shared_->number; }

  void enter() { pass_ = shared_->number; }
  /// Records that this copy has started a pass over the epoch that is set.
  void begin_pass() {
    enter();
    begun_ = shared_->times_set;
  }
  [[nodiscard]] std::int64_t pass() const { return pass_; }
  [[nodiscard]] bool begun() const { return begun_ == shared_->times_set; }

  /// Warns on rank 0 that the coming pass repeats the last one. Once for all copies.
  void warn_of_repetition() {
    if (std::exchange(shared_->warned, true)) return;
    Log(std::max(0, process_rank.load()))
        .warning(
            "a sampler was reset for a further pass over epoch {} without set_epoch: the pass repeats the "
            "order of the last one. Call set_epoch(epoch) before each pass, or set "
            "SamplerOptions::advance_epoch_on_reset",
            pass_);
  }

 private:
  struct Shared {
    std::int64_t number = 0;
    std::size_t times_set = 0;
    bool warned = false;
  };

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::int64_t pass_ = 0;
  std::optional<std::size_t> begun_;  // `times_set` at the last start of a pass
};

inline std::int64_t read_count(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt())
    throw CheckpointError(detail::formatted(
        "the saved sampler has no number \"{}\": load a state that a sampler of lockstep saved", key));
  return value.toInt();
}

// Throws CheckpointError if a saved setting differs: resuming in another order would repeat some samples and
// lose others.
inline void expect_saved(const char* what, std::int64_t saved, std::int64_t here) {
  if (saved != here)
    throw CheckpointError(detail::formatted(
        "the saved sampler has {} {} and this one {}: construct this one with the same dataset and options",
        what, saved, here));
}

inline void check_rank(const char* sampler, int rank, int world_size) {
  if (world_size < 1)
    throw UsageError(detail::formatted("{}: a world size of {}: give 1 or more", sampler, world_size));
  if (rank < 0 || rank >= world_size)
    throw UsageError(detail::formatted("{}: rank {} is not between 0 and {}", sampler, rank, world_size - 1));
}

/// The epoch and the position of a pass, which lockstep's samplers have in common.
class PassSampler : public torch::data::samplers::Sampler<> {
 public:
  [[nodiscard]] static bool draws_base_seed() { return false; }

  /// Has no effect on the order, which is the same in every epoch or follows from a generator.
  void set_epoch(std::int64_t epoch) {
    epoch_.set(epoch);
    epoch_.enter();
  }
  [[nodiscard]] std::int64_t pass_epoch() const { return epoch_.pass(); }
  [[nodiscard]] bool begun() const { return epoch_.begun(); }

  /// Starts a pass, or resumes the one that was just loaded.
  void reset(std::optional<std::size_t> new_length = std::nullopt) override {
    if (new_length && *new_length != length_) {
      length_ = *new_length;
      resumed_ = false;
    }
    if (!resumes()) start();
    resumed_ = false;
    epoch_.begin_pass();
  }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    check_batch_size(static_cast<std::int64_t>(batch_size));
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

  /// Returns the number of this rank's samples in the pass. For a resumed pass, counts only the remaining samples.
  [[nodiscard]] virtual std::size_t size() const = 0;
  /// Returns the number of samples that this rank has consumed in this pass, including those before a resume.
  [[nodiscard]] std::size_t position() const { return skipped_ + position_; }
  /// Returns whether a loaded pass has not been resumed yet; the next `reset()` resumes it.
  [[nodiscard]] virtual bool resumes() const { return resumed_; }
  [[nodiscard]] std::size_t length() const { return length_; }

 protected:
  explicit PassSampler(std::size_t length) : length_(length) {}

  /// Writes the dataset indices of this rank's samples `first` to `first + count - 1` of the pass.
  virtual void read_order(std::size_t first, std::size_t* indices, std::size_t count) = 0;
  /// Starts a new pass.
  virtual void start() { begin(); }

  void begin() {
    position_ = skipped_ = 0;
    resumed_ = false;
  }
  /// Resumes a loaded pass after `skipped` samples. Throws CheckpointError if it has only `most`.
  void resume(std::int64_t skipped, std::size_t most) {
    if (skipped < 0 || static_cast<std::size_t>(skipped) > most)
      throw CheckpointError(detail::formatted(
          "the saved sampler stands at sample {} of {}: the checkpoint is damaged", skipped, most));
    begin();
    skipped_ = static_cast<std::size_t>(skipped);
    resumed_ = true;
  }
  void enter(std::int64_t epoch) {
    epoch_.set(epoch);
    epoch_.enter();
  }
  static void write_count(torch::serialize::OutputArchive& archive, const char* key, std::size_t value) {
    archive.write(key, c10::IValue(static_cast<std::int64_t>(value)));
  }

  std::size_t length_;
  SamplerEpoch epoch_;
  std::size_t skipped_ = 0;   // samples that were consumed before this pass was resumed
  std::size_t position_ = 0;  // samples that this rank has consumed since then
  bool resumed_ = false;
};

/// The base of the samplers that order all samples anew each epoch and partition them with a stride: of the order `o`,
/// rank r of R gets o[r], o[r + R], o[r + 2R], ... If the length is not a multiple of R, the order is repeated from its
/// head as needed, or its tail is dropped (`drop_last`), or only the first ranks get a last sample (`pad = false`).
///
/// Saves the number of samples that all ranks together have consumed, so that another number of ranks can
/// resume the epoch: no sample is lost or seen twice.
class StridedSampler : public PassSampler {
 public:
  /// Every rank resumes from rank 0's archive: it alone counts the last samples that only some ranks have.
  static constexpr bool resumes_from_rank_zero = true;

  /// Sets the epoch that the next `reset()` of this sampler and of all its copies starts. This sampler starts
  /// the epoch at once, unless it resumes a loaded one.
  void set_epoch(std::int64_t epoch) {
    epoch_.set(epoch);
    if (!resumes()) begin_epoch();
  }
  /// Returns the epoch that the next `reset()` starts.
  [[nodiscard]] std::int64_t epoch() const { return epoch_.number(); }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    if (position_ == 0) ++passes_;
    auto indices = PassSampler::next(batch_size);
    // For loaders of others: lockstep's says which batch the program has.
    const auto batches = [&](std::size_t samples) { return (samples + batch_size - 1) / batch_size; };
    drawn_batch = {};
    if (indices)
      drawn_batch = {batches(position_), batches(size_of(world_size_ - 1)), world_size_, 0, passes_};
    return indices;
  }
  [[nodiscard]] std::size_t size() const override { return size_of(rank_); }
  /// Returns `size()` of any rank from 0 to world size - 1.
  [[nodiscard]] std::size_t size_of(int rank) const {
    const std::size_t left = length_ - std::min(skipped_, length_);
    const auto ranks = static_cast<std::size_t>(world_size_);
    if (options_.pad) return samples_per_rank(left, ranks, options_.drop_last);
    return left / ranks + (static_cast<std::size_t>(rank) < left % ranks ? 1 : 0);
  }
  [[nodiscard]] std::size_t position() const {
    return skipped_ / static_cast<std::size_t>(world_size_) + position_;
  }
  [[nodiscard]] bool resumes() const override { return resumed_ && epoch_.pass() == epoch_.number(); }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int world_size() const { return world_size_; }
  [[nodiscard]] const SamplerOptions& options() const { return options_; }

  /// Writes the epoch and the position.
  void save(torch::serialize::OutputArchive& archive) const override {
    write_count(archive, "length", length_);
    write_count(archive, "seed", options_.seed);
    write_count(archive, "shuffle", options_.shuffle);
    write_count(archive, "drop_last", options_.drop_last);
    write_count(archive, "pad", options_.pad);
    write_count(archive, "epoch", epoch_.pass());
    write_count(archive, "consumed",
                std::min(length_, skipped_ + position_ * static_cast<std::size_t>(world_size_)));
  }

  /// Throws CheckpointError if length, seed, shuffle, drop_last or pad differ from the saved ones.
  void load(torch::serialize::InputArchive& archive) override {
    expect_saved("length", read_count(archive, "length"), static_cast<std::int64_t>(length_));
    expect_saved("seed", read_count(archive, "seed"), static_cast<std::int64_t>(options_.seed));
    expect_saved("shuffle", read_count(archive, "shuffle"), options_.shuffle);
    expect_saved("drop_last", read_count(archive, "drop_last"), options_.drop_last);
    expect_saved("pad", read_count(archive, "pad"), options_.pad);
    const std::int64_t epoch = read_count(archive, "epoch");
    resume(read_count(archive, "consumed"), length_);
    enter(epoch);
  }

 protected:
  StridedSampler(const char* name, std::size_t length, int rank, int world_size,
                 const SamplerOptions& options)
      : PassSampler(length), options_(options), rank_(rank), world_size_(world_size) {
    check_rank(name, rank, world_size);
    check_tail(options.drop_last, options.pad);
  }

  void start() override {
    if (epoch_.begun()) follow_last_pass();
    begin_epoch();
  }

  /// Returns the place of this rank's sample `i` in the whole order, before wrapping at the length.
  [[nodiscard]] std::size_t place(std::size_t i) const {
    return skipped_ + static_cast<std::size_t>(rank_) + i * static_cast<std::size_t>(world_size_);
  }

 private:
  void begin_epoch() {
    epoch_.enter();
    begin();
  }

  void follow_last_pass() {
    if (options_.advance_epoch_on_reset)
      epoch_.set(epoch_.pass() + 1);
    else if (options_.shuffle && position_ > 0)
      epoch_.warn_of_repetition();
  }

  SamplerOptions options_;
  int rank_, world_size_;
  std::size_t passes_ = 0;
};

}  // namespace detail

/// Partitions a dataset over the ranks with the indices of Python's sampler: `torch.randperm` seeded with
/// seed + epoch, padded from the head to a multiple of the world size (or its tail dropped), of which each
/// rank gets every world-size-th index.
///
/// The first `next` of an epoch draws the permutation and keeps only this rank's part: 8 bytes per sample, 4
/// below 2^31 samples, none without `shuffle`. An empty dataset gives empty passes, as in Python.
///
/// Counterpart: torch.utils.data.DistributedSampler.
class DistributedSampler : public detail::StridedSampler {
 public:
  /// Throws UsageError unless 0 <= rank < world_size, and for `drop_last` without `pad`.
  DistributedSampler(std::size_t length, int rank, int world_size, const SamplerOptions& options = {})
      : detail::StridedSampler("DistributedSampler", length, rank, world_size, options) {}

  /// Takes rank and number of ranks from a group, such as a World or a communicator.
  template <detail::RankedGroup G>
  DistributedSampler(std::size_t length, const G& group, const SamplerOptions& options = {})
      : DistributedSampler(length, group.rank(), group.size(), options) {}

  /// Starts or resumes a pass. Frees the permutation of any other pass, so that copies do not keep it alive.
  void reset(std::optional<std::size_t> new_length = std::nullopt) override {
    detail::StridedSampler::reset(new_length);
    if (key() != key_) order_ = at::Tensor();
  }

  /// Draws this epoch's permutation, unless it is drawn.
  void prepare() {
    if (!options().shuffle || size() == 0) return;
    if (order_.defined() && key() == key_) return;
    order_ = at::Tensor();  // never holds two orders at once
    // The draws do not depend on the dtype. Half the bytes halve the time of a shuffle beyond the caches.
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
      std::copy_n(detail::const_data<std::int32_t>(order_) + first, count, indices);
    else
      std::copy_n(detail::const_data<std::int64_t>(order_) + first, count, indices);
  }

 private:
  struct Key {
    std::int64_t epoch;
    std::size_t length, skipped;
    bool operator==(const Key&) const = default;
  };
  [[nodiscard]] Key key() const { return {pass_epoch(), length(), skipped_}; }

  template <class Index>
  [[nodiscard]] at::Tensor draw() const {
    const auto type = at::TensorOptions().dtype(c10::CppTypeToScalarType<Index>::value).device(at::kCPU);
    const auto generator = at::detail::createCPUGenerator(options().seed + pass_epoch());
    const at::Tensor whole = at::randperm(static_cast<std::int64_t>(length()), generator, type);
    at::Tensor own = at::empty({static_cast<std::int64_t>(size())}, type);
    const Index* from = detail::const_data<Index>(whole);
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

/// Partitions a dataset into one block of consecutive samples per rank, with no sample repeated or dropped.
/// The concatenated results of the ranks are in the dataset's order.
///
/// Blocks differ by at most one sample, the longer ones first, and may be empty. Reduce the sum and the count
/// of a metric once, at the end: a collective in each step would hang.
class EvaluationSampler : public detail::PassSampler {
 public:
  /// Every rank resumes from rank 0's archive.
  static constexpr bool resumes_from_rank_zero = true;

  /// Throws UsageError unless 0 <= rank < world_size.
  EvaluationSampler(std::size_t length, int rank, int world_size)
      : PassSampler(length),
        rank_(static_cast<std::size_t>(rank)),
        world_size_(static_cast<std::size_t>(world_size)) {
    detail::check_rank("EvaluationSampler", rank, world_size);
  }

  /// Takes rank and number of ranks from a group, such as a World or a communicator.
  template <detail::RankedGroup G>
  EvaluationSampler(std::size_t length, const G& group)
      : EvaluationSampler(length, group.rank(), group.size()) {}

  [[nodiscard]] std::size_t size() const override { return size_of(rank()); }
  /// Returns `size()` of any rank from 0 to `world_size()` - 1.
  [[nodiscard]] std::size_t size_of(int rank) const {
    const std::size_t block = block_size(static_cast<std::size_t>(rank));
    return block - std::min(skipped_, block);
  }
  /// Returns the index of the first sample of this rank's block.
  [[nodiscard]] std::size_t first() const {
    return rank_ * (length_ / world_size_) + std::min(rank_, length_ % world_size_);
  }
  [[nodiscard]] int rank() const { return static_cast<int>(rank_); }
  [[nodiscard]] int world_size() const { return static_cast<int>(world_size_); }

  void save(torch::serialize::OutputArchive& archive) const override {
    write_count(archive, "length", length_);
    write_count(archive, "world_size", world_size_);
    write_count(archive, "epoch", epoch_.pass());
    write_count(archive, "position", position());
  }

  /// Throws CheckpointError if the saved length or world size differs.
  void load(torch::serialize::InputArchive& archive) override {
    detail::expect_saved("length", detail::read_count(archive, "length"), static_cast<std::int64_t>(length_));
    detail::expect_saved("world size", detail::read_count(archive, "world_size"),
                         static_cast<std::int64_t>(world_size_));
    const std::int64_t epoch = detail::read_count(archive, "epoch");
    // Rank 0's position, which may be one more than this rank's block holds.
    resume(detail::read_count(archive, "position"), block_size(0));
    enter(epoch);
  }

 protected:
  void read_order(std::size_t begin, std::size_t* indices, std::size_t count) override {
    std::iota(indices, indices + count, first() + skipped_ + begin);
  }

 private:
  [[nodiscard]] std::size_t block_size(std::size_t rank) const {
    return length_ / world_size_ + (rank < length_ % world_size_ ? 1 : 0);
  }

  std::size_t rank_, world_size_;
};

/// Options of RandomSampler.
struct RandomSamplerOptions {
  /// Generator to draw from, as in Python's DataLoader(generator=g). Undefined means the default generator,
  /// which `torch::manual_seed` seeds.
  at::Generator generator = {};
  /// Draw a number from `generator` before each pass, as Python's DataLoader(generator=g) does. False gives the order of
  /// Python's bare RandomSampler; a DataLoader then draws from the default generator itself, as Python's does.
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
class RandomSampler : public detail::PassSampler {
 public:
  /// Tells a DataLoader whether this sampler draws the base seed in its place.
  [[nodiscard]] bool draws_base_seed() const { return options_.draw_base_seed; }

  /// Throws DataError if the dataset is empty, as Python does.
  explicit RandomSampler(std::size_t length, RandomSamplerOptions options = {})
      : PassSampler(length), options_(std::move(options)) {
    check_length();
  }

  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    if (!order_.defined()) start();
    auto indices = PassSampler::next(batch_size);
    if ((!indices || indices->size() < batch_size) && !std::exchange(ended_, true) &&
        options_.generator.defined())
      permute(options_.generator);
    return indices;
  }
  void skip(std::size_t count) {
    if (count > 0) next(count);  // which also makes the draw at the end of a pass
  }

  [[nodiscard]] std::size_t size() const override { return length_ - skipped_; }
  [[nodiscard]] int rank() const { return std::max(0, detail::process_rank.load()); }

  /// Writes the generator state of this pass and the position. To resume, also restore the default generator.
  void save(torch::serialize::OutputArchive& archive) const override {
    write_count(archive, "length", length_);
    write_count(archive, "epoch", epoch_.pass());
    write_count(archive, "position", position());
    write_count(archive, "drawn", order_.defined());
    write_count(archive, "ended", ended_);
    if (order_.defined()) archive.write("state", state_, /*is_buffer=*/true);
    if (!options_.generator.defined()) return;
    at::Tensor state = options_.generator.get_state();
    if (order_.defined()) {  // a copy that has read ahead may have made the draw at the end of the pass
      at::Generator here = at::detail::createCPUGenerator();
      here.set_state(state_);
      permute(here);
      const at::Tensor inside = here.get_state();
      permute(here);
      const at::Tensor at_end = here.get_state();
      if (state.equal(inside) || state.equal(at_end)) state = ended_ ? at_end : inside;
    }
    archive.write("generator", state, /*is_buffer=*/true);
  }

  /// Throws CheckpointError if the saved length differs, or only one sampler has a generator of its own.
  void load(torch::serialize::InputArchive& archive) override {
    detail::expect_saved("length", detail::read_count(archive, "length"), static_cast<std::int64_t>(length_));
    at::Tensor now;
    const bool own = archive.try_read("generator", now, /*is_buffer=*/true);
    if (own != options_.generator.defined())
      throw CheckpointError(
          detail::formatted("the saved RandomSampler drew from {} generator and this one draws from {}: set "
                            "RandomSamplerOptions::generator in both or in neither",
                            own ? "its own" : "the default", own ? "the default" : "its own"));
    const bool ended = detail::read_count(archive, "ended") != 0;
    const std::int64_t epoch = detail::read_count(archive, "epoch");
    at::Tensor state, order;
    try {
      at::Generator again = at::detail::createCPUGenerator();
      if (own) again.set_state(now);
      if (detail::read_count(archive, "drawn") != 0) {
        archive.read("state", state, /*is_buffer=*/true);
        again.set_state(state);
        order = permute(again);
      }
    } catch (const c10::Error&) {
      throw CheckpointError("the saved RandomSampler has no state of a generator: the checkpoint is damaged");
    }
    if (order.defined())
      resume(detail::read_count(archive, "position"), length_);
    else
      begin();
    state_ = state;
    order_ = order;
    ended_ = ended;
    enter(epoch);
    if (own) options_.generator.set_state(now);
  }

 protected:
  void read_order(std::size_t first, std::size_t* indices, std::size_t count) override {
    std::copy_n(detail::const_data<std::int64_t>(order_) + skipped_ + first, count, indices);
  }

  /// Makes all draws of a pass except the last.
  void start() override {
    check_length();
    order_ = at::Tensor();  // never holds two orders at once
    if (options_.draw_base_seed) draw_seed(options_.generator);
    at::Generator generator = options_.generator;
    if (!generator.defined())
      generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(draw_seed(generator)));
    state_ = generator.get_state();
    order_ = permute(generator);
    ended_ = false;
    begin();
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

  RandomSamplerOptions options_;
  at::Tensor order_, state_;
  bool ended_ = false;  // `next` asked for more samples than remained
};

}  // namespace lockstep::inline v0_1
