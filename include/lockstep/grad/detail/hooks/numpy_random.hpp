#pragma once

#include <cstdint>
#include <random>

namespace lockstep::detail {

/// Generates the numbers of numpy.random.RandomState(seed).randint(bound), from which Python's PowerSGD seeds
/// its random matrices: masked 32-bit outputs of the Mersenne twister, drawn until one is below the bound.
/// The seed and `drawn` are the whole state; copies are independent.
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
  /// Returns how many numbers were drawn from the twister, including rejected ones.
  [[nodiscard]] std::uint64_t drawn() const { return drawn_; }

 private:
  std::uint32_t seed_;
  std::uint64_t drawn_;
  std::mt19937 twister_;
};

}  // namespace lockstep::detail
