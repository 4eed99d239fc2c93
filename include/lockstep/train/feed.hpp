#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/train/epoch_shares.hpp"
#include "lockstep/train/loss.hpp"
#include "lockstep/train/stream.hpp"

namespace lockstep::detail {

// A feed gives this rank its micro-batches, step by step: `begin_epoch(e)`, then for each step `begin_step()`
// and `next()` until that gives nothing. `last()` says whether the one just given is this rank's last in the
// step, which is when gradients are reduced. `weigh` gives a loss its weight in the step. Feeds whose
// `counts_beforehand` is true know all ranks' samples in every step.

/// The batches of a loader, whose sampler knows what every rank has.
template <class Loader>
class LoaderFeed {
 public:
  using Batch = typename Loader::Batch;
  static constexpr bool counts_beforehand = true;
  static constexpr bool repeats = true;

  /// Both must outlive it.
  LoaderFeed(Loader& loader, const EpochShares& shares)
      : loader_(loader), shares_(shares), own_(static_cast<std::int64_t>(loader.sampler().size())) {}

  void begin_epoch(std::int64_t epoch) {
    pass_.reset();
    loader_.set_epoch(static_cast<std::size_t>(epoch));
    step_ = -1;
  }
  /// Draws the first batch already: that comes before whatever else a step begins with, as in a loop by hand.
  void begin_step() {
    ++step_;
    micro_ = 0;
    micros_ = shares_.micro_batches(own_, step_);
    if (micros_ > 0) draw();
  }
  Batch* next() {
    if (micro_ == micros_) return nullptr;
    if (micro_ > 0) draw();
    samples_ = shares_.micro_size(own_, step_, micro_++);
    return &**pass_;
  }
  [[nodiscard]] bool last() const { return micro_ == micros_; }
  void end_epoch() { pass_.reset(); }  // the workers stop

  [[nodiscard]] LocalLoss weigh(const at::Tensor& mean, const Batch& batch) const {
    return lockstep::weigh(mean, batch, samples_, shares_.divisor(samples_, step_));
  }
  [[nodiscard]] LocalLoss weigh(const Mean& mean, const Batch&) const { return lockstep::weigh(mean); }

  /// Samples of all ranks in this step.
  [[nodiscard]] double samples(int /*ranks*/) const {
    return static_cast<double>(shares_.samples_in_step(step_));
  }
  /// Whether this rank had data in this step.
  [[nodiscard]] bool had_data() const { return micros_ > 0; }

 private:
  void draw() {
    if (pass_)
      ++*pass_;
    else
      pass_.emplace(loader_.begin());
    if (*pass_ == std::default_sentinel)
      throw DataError(
          fmt::format("the sampler ended before step {} of the epoch, of the {} samples that it announced",
                      step_ + 1, own_));
  }

  Loader& loader_;
  const EpochShares& shares_;
  std::optional<typename Loader::Iterator> pass_;
  std::int64_t own_;
  std::int64_t step_ = -1, micro_ = 0, micros_ = 0, samples_ = 0;
};

/// The batches of a stream. To know a rank's last micro-batch as such, the one after it is asked for first.
template <BatchStream Stream>
class StreamFeed {
 public:
  using Batch = BatchFrom<Stream>;
  static constexpr bool counts_beforehand = false;
  static constexpr bool repeats = RepeatableStream<Stream>;

  StreamFeed(Stream& stream, std::int64_t accumulate) : stream_(stream), accumulate_(accumulate) {}

  void begin_epoch(std::int64_t epoch) {
    if constexpr (repeats) stream_.set_epoch(static_cast<std::size_t>(epoch));
    ahead_.reset();
    ended_ = false;
  }
  void begin_step() {
    micro_ = 0;
    samples_ = 0;
  }
  Batch* next() {
    if (micro_ == accumulate_) return nullptr;
    if (!ahead_) draw();
    batch_ = std::exchange(ahead_, std::nullopt);
    if (!batch_) return nullptr;
    if (++micro_ < accumulate_) draw();
    if constexpr (Countable<Batch>) samples_ += static_cast<double>(samples_in(*batch_));
    return &*batch_;
  }
  [[nodiscard]] bool last() const { return !ahead_; }
  void end_epoch() { batch_.reset(); }

  [[nodiscard]] LocalLoss weigh(const at::Tensor& mean, const Batch& batch) const {
    return lockstep::weigh(mean, batch);
  }
  [[nodiscard]] LocalLoss weigh(const Mean& mean, const Batch&) const { return lockstep::weigh(mean); }

  /// An estimate: as many on each rank.
  [[nodiscard]] double samples(int ranks) const { return samples_ * ranks; }
  [[nodiscard]] bool had_data() const { return micro_ > 0; }

 private:
  // A batch of no samples has no mean loss: it is passed over.
  static bool empty(const Batch& batch) {
    if constexpr (Countable<Batch>)
      return samples_in(batch) == 0;
    else
      return false;
  }
  void draw() {
    if (ended_) return;  // a stream that has said so is not asked again
    do ahead_ = stream_.next();
    while (ahead_ && empty(*ahead_));
    ended_ = !ahead_;
  }

  Stream& stream_;
  std::int64_t accumulate_;
  std::int64_t micro_ = 0;
  double samples_ = 0;
  std::optional<Batch> batch_, ahead_;
  bool ended_ = false;
};

}  // namespace lockstep::detail
