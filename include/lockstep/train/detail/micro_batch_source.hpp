#pragma once

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/detail/epoch_partition.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep::inline v0_1::detail {

// A micro-batch source yields this rank's micro-batches, step by step. Call `begin_epoch(e)`, then for each
// step `begin_step()` and `next()` until it returns null. `last()` returns whether the current micro-batch is
// this rank's last in the step. `weigh` weights a loss by its share of the step. A source whose
// `counts_beforehand` is true knows all ranks' samples in every step. Between steps, `save(archive)` writes the
// data position; a source constructed with that archive resumes the epoch there.

/// Yields the batches of a loader, whose sampler knows the samples of every rank.
template <class Loader>
class LoaderMicroBatchSource {
 public:
  using Batch = typename Loader::Batch;
  static constexpr bool counts_beforehand = true;
  static constexpr bool repeats = true;

  /// `loader` must outlive the source. Batches are copied to `device`. If `saved` is not null, the loader's
  /// sampler resumes the saved epoch.
  template <class Group>
  LoaderMicroBatchSource(Loader& loader, const c10::Device& device, std::int64_t batch_size,
                         std::int64_t accumulate, const Group& group, torch::serialize::InputArchive* saved)
      : loader_(loader), batches_(loader, device), whole_(local_partition(batch_size, accumulate, group)) {
    if (saved) loader_.sampler().load(*saved);
    first_ = local_partition(batch_size, accumulate, group);
  }

  /// Returns the partition of a whole epoch. `first_partition` is that of the first, possibly resumed, epoch;
  /// call it before `begin_epoch`.
  [[nodiscard]] const EpochPartition& partition() const { return whole_.partition; }
  [[nodiscard]] const EpochPartition& first_partition() const { return first_->partition; }

  void begin_epoch(std::int64_t epoch) {
    pass_.reset();
    loader_.set_epoch(epoch);
    now_ = first_ ? *std::exchange(first_, std::nullopt) : whole_;
    step_ = -1;
    given_ = 0;
  }
  /// Draws the step's first batch, so that it is loaded before other work of the step, as in a hand-written loop.
  void begin_step() {
    ++step_;
    micro_ = 0;
    micros_ = now_.partition.micro_batches(now_.samples, step_);
    if (micros_ > 0) draw();
  }
  Batch* next() {
    if (micro_ == micros_) return nullptr;
    if (micro_ > 0) draw();
    samples_ = now_.partition.micro_size(now_.samples, step_, micro_++);
    given_ += static_cast<std::size_t>(samples_);
    return &**pass_;
  }
  [[nodiscard]] bool last() const { return micro_ == micros_; }
  void end_epoch() { pass_.reset(); }  // the workers stop

  [[nodiscard]] LocalLoss weigh(const at::Tensor& mean, const Batch& batch) const {
    return lockstep::weigh(mean, batch, samples_, now_.partition.divisor(samples_, step_));
  }
  [[nodiscard]] LocalLoss weigh(const Mean& mean, const Batch&) const { return lockstep::weigh(mean); }

  [[nodiscard]] double samples(int /*ranks*/) const {
    return static_cast<double>(now_.partition.samples_in_step(step_));
  }
  [[nodiscard]] bool had_data() const { return micros_ > 0; }

  void save(torch::serialize::OutputArchive& archive) const {
    loader_.save(archive, given_);
    if constexpr (requires { std::remove_cvref_t<decltype(loader_.sampler())>::resumes_from_rank_zero; })
      archive.write("from_rank_zero", c10::IValue(true));
  }

 private:
  struct LocalPartition {
    EpochPartition partition;
    std::int64_t samples;  // of this rank
  };
  template <class Group>
  LocalPartition local_partition(std::int64_t batch_size, std::int64_t accumulate, const Group& group) const {
    return {EpochPartition(samples_of_ranks(loader_.sampler(), group), batch_size, accumulate),
            static_cast<std::int64_t>(loader_.sampler().size())};
  }

  void draw() {
    if (pass_)
      ++*pass_;
    else
      pass_.emplace(batches_.begin());
    if (*pass_ == std::default_sentinel)
      throw DataError(detail::formatted(
          "the sampler ended before step {} of the epoch, of the {} samples that it announced", step_ + 1,
          now_.samples));
  }

  Loader& loader_;
  StagedBatches<Loader> batches_;
  LocalPartition whole_;
  std::optional<LocalPartition> first_;
  LocalPartition now_ = whole_;
  std::optional<StagedPass<Loader>> pass_;
  std::size_t given_ = 0;  // samples that this rank has consumed in this epoch
  std::int64_t step_ = -1, micro_ = 0, micros_ = 0, samples_ = 0;
};

/// Yields the batches of a stream. Draws one batch ahead, to know whether a micro-batch is the last of its step.
template <BatchStream Stream, class ForwardCheck>
class StreamMicroBatchSource {
 public:
  using Batch = BatchFrom<Stream>;
  static constexpr bool counts_beforehand = false;
  static constexpr bool repeats = RepeatableStream<Stream>;

  /// `stream` must outlive the source. If `saved` is not null, the saved epoch is resumed: a repeatable
  /// stream is read again up to the saved position, and any other stream continues with its next batch.
  /// Throws CheckpointError if the epoch was saved with another number of ranks.
  StreamMicroBatchSource(Stream& stream, ForwardCheck check, std::int64_t accumulate, int ranks,
                         torch::serialize::InputArchive* saved)
      : stream_(stream), check_(std::move(check)), accumulate_(accumulate), ranks_(ranks) {
    if (!saved) return;
    if (const std::int64_t then = read_integer(*saved, "ranks"); then != ranks)
      throw CheckpointError(detail::formatted(
          "the checkpoint was saved inside an epoch of a stream on {} ranks, and this run has {}: resume it "
          "on {} ranks, or load a checkpoint that was saved between epochs",
          then, ranks, then));
    if (repeats) skip_ = read_length(*saved, "batches");
  }

  void begin_epoch(std::int64_t epoch) {
    if constexpr (repeats) stream_.set_epoch(epoch);
    ahead_.reset();
    ended_ = false;
    for (given_ = 0; given_ < skip_ && !ended_; ++given_) {
      draw();
      ahead_.reset();
    }
    skip_ = 0;
  }
  void begin_step() {
    micro_ = 0;
    samples_ = 0;
  }
  Batch* next() {
    if (micro_ > 0 && last()) return nullptr;
    if (!ahead_) draw();
    batch_ = std::exchange(ahead_, std::nullopt);
    if (batch_ && ++micro_ < accumulate_) draw();
    check_.compare(!batch_ ? Turn::none : last() ? Turn::last_of_step : Turn::more);
    if (!batch_) return nullptr;
    ++given_;
    if constexpr (Countable<Batch>) samples_ += static_cast<double>(samples_in(*batch_));
    return &*batch_;
  }
  [[nodiscard]] bool last() const { return !ahead_; }
  void end_epoch() { batch_.reset(); }

  [[nodiscard]] LocalLoss weigh(const at::Tensor& mean, const Batch& batch) const {
    return lockstep::weigh(mean, batch);
  }
  [[nodiscard]] LocalLoss weigh(const Mean& mean, const Batch&) const { return lockstep::weigh(mean); }

  /// Estimates the number of samples of all ranks in this step, assuming equally many on each rank.
  [[nodiscard]] double samples(int ranks) const { return samples_ * ranks; }
  [[nodiscard]] bool had_data() const { return micro_ > 0; }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("ranks", c10::IValue(static_cast<std::int64_t>(ranks_)));
    archive.write("batches", c10::IValue(given_));
  }

 private:
  // An empty batch has no mean loss and is skipped.
  static bool empty(const Batch& batch) {
    if constexpr (Countable<Batch>)
      return samples_in(batch) == 0;
    else
      return false;
  }
  void draw() {
    if (ended_) return;  // do not call `next` after the end of the stream
    do ahead_ = stream_.next();
    while (ahead_ && empty(*ahead_));
    ended_ = !ahead_;
  }

  Stream& stream_;
  ForwardCheck check_;
  std::int64_t accumulate_;
  int ranks_;
  std::int64_t skip_ = 0, given_ = 0;  // batches of this rank: to skip on resume, and consumed in this epoch
  std::int64_t micro_ = 0;
  double samples_ = 0;
  std::optional<Batch> batch_, ahead_;
  bool ended_ = false;
};

}  // namespace lockstep::inline v0_1::detail
