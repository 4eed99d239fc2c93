#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace lockstep::inline v0_1::detail {

/// One step of SplitMix64: a bijection of 64 bits that turns counters into noise.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Returns the state of a device's default generator, which `torch::manual_seed` seeds and dropout uses.
inline at::Tensor default_generator_state(const at::Device& device = at::kCPU) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}
inline void set_default_generator_state(const at::Tensor& state, const at::Device& device = at::kCPU) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

namespace detail {

/// A group with a rank and a size: a World, a communicator.
template <class G>
concept RankedGroup = requires(const G& group) {
  { group.rank() } -> std::convertible_to<int>;
  { group.size() } -> std::convertible_to<int>;
};

}  // namespace detail

/// The key of a random generator: each (epoch, rank, stream) of a seed has its own draws. `stream` numbers
/// the concurrent users of random numbers on a rank, such as the workers, or the batches of a loader.
struct GeneratorKey {
  /// The seed of the run.
  std::uint64_t seed = 0;
  /// The zero-based epoch.
  std::int64_t epoch = 0;
  std::uint32_t rank = 0;
  std::uint64_t stream = 0;
  bool operator==(const GeneratorKey&) const = default;
};

/// Returns a 64-bit seed for `key`, for generators other than LibTorch's. Equal keys have equal seeds;
/// different keys collide with probability 2^-64.
constexpr std::uint64_t seed_of(const GeneratorKey& key) {
  std::uint64_t hash = detail::mix_bits(key.seed);
  for (const std::uint64_t part :
       {static_cast<std::uint64_t>(key.epoch), static_cast<std::uint64_t>(key.rank), key.stream})
    hash = detail::mix_bits(hash ^ part);
  return hash;
}

/// Returns a CPU generator seeded with seed + rank, as the tutorials do by `generator.manual_seed(3407 + rank)`. Rank 0
/// of the next seed draws the same numbers as rank 1 of this seed; `keyed_generator` avoids that.
inline at::Generator rank_generator(std::uint64_t seed, int rank) {
  return at::detail::createCPUGenerator(seed + static_cast<std::uint64_t>(rank));
}
/// Returns the generator of this process's rank in `group`.
template <detail::RankedGroup G>
at::Generator rank_generator(std::uint64_t seed, const G& group) {
  return rank_generator(seed, group.rank());
}

/// Returns a CPU generator for `key`: the same in every run and different for every key.
///
/// LibTorch's seeding keeps 32 bits of a seed, with which a collision is expected among 77,000 hashed seeds.
/// This function fills the whole state of the Mersenne twister and stores the key in it, so that the states
/// of two keys differ even if their hashes collide.
inline at::Generator keyed_generator(const GeneratorKey& key) {
  at::mt19937_data_pod state{};
  state.seed_ = seed_of(key);
  state.seeded_ = true;
  state.left_ = 1;  // the first draw generates the first block of numbers
  state.next_ = 0;
  std::uint64_t counter = state.seed_;
  for (std::size_t i = 0; i < state.state_.size(); i += 2) {
    const std::uint64_t noise = detail::mix_bits(counter++);
    state.state_[i] = static_cast<std::uint32_t>(noise);
    state.state_[i + 1] = static_cast<std::uint32_t>(noise >> 32);
  }
  std::size_t at = 1;  // the twister uses only one bit of word 0
  for (const std::uint64_t part :
       {key.seed, static_cast<std::uint64_t>(key.epoch), static_cast<std::uint64_t>(key.rank), key.stream}) {
    state.state_[at++] = static_cast<std::uint32_t>(part);
    state.state_[at++] = static_cast<std::uint32_t>(part >> 32);
  }
  at::mt19937 engine;
  engine.set_data(state);
  at::Generator generator = at::detail::createCPUGenerator();
  generator.get<at::CPUGeneratorImpl>()->set_engine(engine);
  return generator;
}

}  // namespace lockstep::inline v0_1
