#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cstddef>
#include <cstdint>

#include "lockstep/data/sampler.hpp"

namespace lockstep::detail {

/// A step of SplitMix64: a bijection of 64 bits that turns counters into noise.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace lockstep::detail

namespace lockstep {

/// Who draws: of one seed, every other (epoch, rank, stream) has draws of its own. A stream is what runs
/// beside others on a rank: a worker, or the batches of a loader by number.
struct GeneratorKey {
  std::uint64_t seed = 0;
  std::uint64_t epoch = 0;
  std::uint32_t rank = 0;
  std::uint64_t stream = 0;
  bool operator==(const GeneratorKey&) const = default;
};

/// A 64-bit seed for `key`, for generators that are not LibTorch's: equal keys have equal seeds, and others
/// differ but for a chance of 2^-64.
constexpr std::uint64_t seed_of(const GeneratorKey& key) {
  std::uint64_t hash = detail::mix_bits(key.seed);
  for (const std::uint64_t part : {key.epoch, static_cast<std::uint64_t>(key.rank), key.stream})
    hash = detail::mix_bits(hash ^ part);
  return hash;
}

/// The CPU generator of the tutorials: seeded with seed + rank, as `generator.manual_seed(3407 + rank)` is in
/// Python. The next seed's rank 0 draws the same as this one's rank 1; `keyed_generator` has no such
/// neighbours.
inline at::Generator rank_generator(std::uint64_t seed, int rank) {
  return at::detail::createCPUGenerator(seed + static_cast<std::uint64_t>(rank));
}
template <RankedGroup G>
at::Generator rank_generator(std::uint64_t seed, const G& group) {
  return rank_generator(seed, group.rank());
}
/// The same for tensors on `device`, such as torch::rand(sizes, generator, options) on a GPU; a generator of
/// its own, beside the device's default one.
inline at::Generator rank_generator(std::uint64_t seed, int rank, const at::Device& device) {
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(seed + static_cast<std::uint64_t>(rank));
  return generator;
}

/// A CPU generator for `key`, the same in every run; no two keys share one.
///
/// LibTorch's own seeding keeps 32 bits of a seed, so that among 77,000 hashed seeds two are expected to
/// meet. Here the whole state of the Mersenne twister is filled instead, and holds the key itself: states of
/// two keys differ even where their hashes meet.
inline at::Generator keyed_generator(const GeneratorKey& key) {
  at::mt19937_data_pod state{};
  state.seed_ = seed_of(key);
  state.seeded_ = true;
  state.left_ = 1;  // the first draw makes the first block of numbers
  state.next_ = 0;
  std::uint64_t counter = state.seed_;
  for (std::size_t i = 0; i < state.state_.size(); i += 2) {
    const std::uint64_t noise = detail::mix_bits(counter++);
    state.state_[i] = static_cast<std::uint32_t>(noise);
    state.state_[i + 1] = static_cast<std::uint32_t>(noise >> 32);
  }
  std::size_t at = 1;  // of word 0 the twister uses one bit only
  for (const std::uint64_t part : {key.seed, key.epoch, static_cast<std::uint64_t>(key.rank), key.stream}) {
    state.state_[at++] = static_cast<std::uint32_t>(part);
    state.state_[at++] = static_cast<std::uint32_t>(part >> 32);
  }
  at::mt19937 engine;
  engine.set_data(state);
  at::Generator generator = at::detail::createCPUGenerator();
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  return generator;
}

/// The generator of one worker of one rank in one epoch.
inline at::Generator worker_generator(std::uint64_t seed, std::size_t epoch, int rank, std::size_t worker) {
  return keyed_generator({seed, epoch, static_cast<std::uint32_t>(rank), worker});
}

}  // namespace lockstep
