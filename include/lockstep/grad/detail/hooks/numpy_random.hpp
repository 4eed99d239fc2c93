#pragma once

#include <cstdint>
#include <random>

namespace lockstep::detail {

/// The numbers of numpy.random.RandomState(seed).randint(bound), of which Python's PowerSGD makes the seeds
/// of its random matrices: 32 bits of the Mersenne twister, masked, until they are below the bound. A copy
/// goes on by itself; `drawn` and the seed are its whole state.
class NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed, std::uint64_t drawn = 0)
      : seed_(seed), drawn_(drawn), twister_(seed) {
    twister_.discard(drawn);
  }

  std::uint32_t randint(std::uint32_t bound) {
    std::uint32_t mask = bound - 1;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    for (;;) {
      ++drawn_;
      const auto value = static_cast<std::uint32_t>(twister_()) & mask;
      if (value < bound) return value;
    }
  }

  [[nodiscard]] std::uint32_t seed() const { return seed_; }
  /// The numbers taken from the twister so far.
  [[nodiscard]] std::uint64_t drawn() const { return drawn_; }

 private:
  std::uint32_t seed_;
  std::uint64_t drawn_;
  std::mt19937 twister_;
};

}  // namespace lockstep::detail
