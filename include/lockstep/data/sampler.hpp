#pragma once

#include <torch/data/samplers/base.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

namespace lockstep {

/// What decides which samples of a dataset this rank sees, and in which order.
///
/// 1. It is a `torch::data::samplers::Sampler<>`: `reset()` starts a pass, `next(n)` gives at most `n`
///    indices and nothing once the pass is over, `save` and `load` carry epoch and position. The first
///    `reset()` after a `load` goes on where the saved pass stood instead of starting a new one.
/// 2. `size()` is the number of samples that this rank sees in the coming pass, known before it starts. It
///    costs nothing, and no communication is needed for any of this: what a rank sees follows from the
///    arguments alone.
/// 3. `set_epoch(e)` is called by every rank with the same number before a pass; what the pass yields
///    follows from it. Epoch 0 is valid without it. Samplers whose order does not depend on the epoch ignore
///    it.
/// 4. It is copyable, and `set_epoch` on one copy holds for all: loaders take samplers by value.
/// 5. It is used by one thread at a time.
template <class S>
concept Sampler = std::derived_from<S, torch::data::samplers::Sampler<>> && std::copy_constructible<S> &&
    requires(S& sampler, const S& view, std::size_t n) {
  sampler.set_epoch(n);
  sampler.reset();
  { sampler.next(n) } -> std::same_as<std::optional<std::vector<std::size_t>>>;
  { view.size() } -> std::convertible_to<std::size_t>;
};

/// A Sampler that knows what every rank of its group is given, so that ranks with unequal shares can be
/// weighed without asking them: `size_of(rank)`, from 0, is what `size()` says on that rank, and `size_of` of
/// one's own rank is `size()`. The same on every rank; it costs nothing. A rank's n-th batch is then of
/// `min(batch, size_of(rank) - n * batch)` samples, for all ranks alike.
template <class S>
concept CountingSampler = Sampler<S> && requires(const S& view, int rank) {
  { view.size_of(rank) } -> std::convertible_to<std::size_t>;
};

/// Anything that knows a rank among several: a World, a communicator.
template <class G>
concept RankedGroup = requires(const G& group) {
  { group.rank() } -> std::convertible_to<int>;
  { group.size() } -> std::convertible_to<int>;
};

/// The options of the samplers that split a dataset among ranks.
struct SamplerOptions {
  std::uint64_t seed = 0;
  bool shuffle = true;
  /// Leave out the tail that does not divide by the number of ranks, instead of repeating samples from the
  /// head.
  bool drop_last = false;
  /// Repeat samples from the head until every rank has as many, as Python does. Without it the tail goes to
  /// the first ranks and each sample is seen exactly once; ranks may then differ by one sample, and with more
  /// ranks than samples some have none.
  bool pad = true;
};

/// The samples of each of `world_size` ranks when `length` samples are split evenly: rounded up (some are
/// repeated), or, with `drop_last`, rounded down.
inline std::size_t samples_per_rank(std::size_t length, std::size_t world_size, bool drop_last) {
  return length / world_size + (!drop_last && length % world_size != 0 ? 1 : 0);
}

/// Makes a sampler of any of the kinds here for `length` samples; what the kind does not need is not used.
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
