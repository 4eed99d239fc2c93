#pragma once

#include <torch/data/samplers/base.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

namespace lockstep {

/// A sampler that selects this rank's samples of a dataset and their order.
///
/// 1. It is a `torch::data::samplers::Sampler<>`: `reset()` starts a pass, `next(n)` returns at most `n`
///    indices, or nullopt when the pass is over, and `save` and `load` carry epoch and position. The first
///    `reset()` after a `load` resumes the saved pass instead of starting a new one.
/// 2. `size()` returns the number of samples of this rank in the coming pass, before it starts. No member
///    communicates: the indices follow from the arguments alone.
/// 3. `set_epoch(e)` is called by every rank with the same epoch before a pass and determines what the pass
///    yields. Epoch 0 is the default. A no-op for samplers whose order does not depend on the epoch.
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
/// 1. `pass_epoch()` returns the epoch of the current pass: that of the last `reset()`, `set_epoch` or `load`
///    on this object.
/// 2. `position()` returns the number of samples that this rank has consumed in the pass, including those
///    before a resume. `skip(n)` advances it as `next(n)` does, but need not compute the indices.
/// 3. `begun()` returns whether this object has started a pass since `set_epoch` was called on it or on a
///    copy. False in a copy. A DataLoader advances the epoch before a further pass over a begun epoch.
/// 4. `resumes()` returns whether the next `reset()` resumes a loaded pass.
/// 5. `rank()` returns the zero-based rank from which a DataLoader's transforms draw by default.
/// 6. `draws_base_seed` is true if `reset()` makes the draw of LoaderOptions::draw_base_seed itself.
template <class S>
concept ResumableSampler = Sampler<S> && requires(S& sampler, const S& view, std::size_t n) {
  sampler.skip(n);
  { view.pass_epoch() } -> std::convertible_to<std::size_t>;
  { view.position() } -> std::convertible_to<std::size_t>;
  { view.begun() } -> std::convertible_to<bool>;
  { view.resumes() } -> std::convertible_to<bool>;
  { view.rank() } -> std::convertible_to<int>;
  { S::draws_base_seed } -> std::convertible_to<bool>;
};

/// A Sampler that knows the sample count of every rank, so that ranks with unequal counts can be weighted
/// without communication. `size_of(rank)` returns `size()` of that zero-based rank. The n-th batch of a rank,
/// counted from 0, has `min(batch, size_of(rank) - n * batch)` samples.
template <class S>
concept CountingSampler = Sampler<S> && requires(const S& view, int rank) {
  { view.size_of(rank) } -> std::convertible_to<std::size_t>;
};

/// A group with a rank and a size: a World, a communicator.
template <class G>
concept RankedGroup = requires(const G& group) {
  { group.rank() } -> std::convertible_to<int>;
  { group.size() } -> std::convertible_to<int>;
};

/// The options of the samplers that partition a dataset over the ranks.
struct SamplerOptions {
  std::uint64_t seed = 0;
  bool shuffle = true;
  /// Drop the tail that does not divide by the number of ranks, instead of repeating samples from the head.
  bool drop_last = false;
  /// Repeat samples from the head until all ranks have equally many, as Python does. Without padding the
  /// first ranks get the tail and each sample is seen exactly once; ranks may then differ by one sample, and
  /// ranks beyond the number of samples have none.
  bool pad = true;
};

/// Returns the number of samples of each rank when `length` samples are partitioned evenly: rounded up (some
/// samples are repeated), or rounded down with `drop_last`.
inline std::size_t samples_per_rank(std::size_t length, std::size_t world_size, bool drop_last) {
  return length / world_size + (!drop_last && length % world_size != 0 ? 1 : 0);
}

/// Constructs a sampler of any kind for `length` samples. Arguments that the kind does not need are ignored.
template <Sampler S, RankedGroup G>
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

}  // namespace lockstep

namespace lockstep::detail {

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

  /// Sets the epoch that the next pass of every copy belongs to.
  void set(std::size_t number) {
    shared_->number = number;
    ++shared_->times_set;
  }
  [[nodiscard]] std::size_t number() const { return shared_->number; }

  /// Makes the epoch that is set the epoch of this copy's pass.
  void enter() { pass_ = shared_->number; }
  /// Records that this copy has started a pass over the epoch that is set.
  void begin_pass() {
    enter();
    begun_ = shared_->times_set;
  }
  [[nodiscard]] std::size_t pass() const { return pass_; }
  [[nodiscard]] bool begun() const { return begun_ == shared_->times_set; }

 private:
  struct Shared {
    std::size_t number = 0, times_set = 0;
  };

  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::size_t pass_ = 0;
  std::optional<std::size_t> begun_;  // `times_set` at the last start of a pass
};

}  // namespace lockstep::detail
