#pragma once

#include <torch/data/samplers/base.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
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
