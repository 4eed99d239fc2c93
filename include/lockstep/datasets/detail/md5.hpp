#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Computes an MD5 sum (RFC 1321) incrementally. Detects damaged downloads; no protection from an attacker.
class Md5 {
 public:
  void update(std::string_view bytes) {
    length_ += bytes.size();
    while (!bytes.empty()) {
      const std::size_t taken = std::min(bytes.size(), block_.size() - filled_);
      std::memcpy(block_.data() + filled_, bytes.data(), taken);
      filled_ += taken;
      bytes.remove_prefix(taken);
      if (filled_ == block_.size()) digest_block();
    }
  }

  /// Returns the sum as 32 hexadecimal digits. The object must not be used afterwards.
  [[nodiscard]] std::string hex() {
    const std::uint64_t bits = length_ * 8;
    update(std::string_view("\x80", 1));
    while (filled_ != 56) update(std::string_view("\0", 1));
    std::string size;
    for (int i = 0; i < 8; ++i) size += static_cast<char>(bits >> 8 * i & 0xff);
    update(size);
    std::string text;
    for (const std::uint32_t word : state_)
      for (int i = 0; i < 4; ++i) text += detail::formatted("{:02x}", word >> 8 * i & 0xff);
    return text;
  }

 private:
  void digest_block() {
    // RFC 1321 defines its table by the sine.
    static const auto sines = [] {
      std::array<std::uint32_t, 64> table{};
      for (std::size_t i = 0; i < 64; ++i)
        table[i] = static_cast<std::uint32_t>(std::fabs(std::sin(static_cast<double>(i + 1))) * 4294967296.0);
      return table;
    }();
    static constexpr std::array<std::array<int, 4>, 4> turns{
        {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}}};
    std::array<std::uint32_t, 16> words{};
    for (std::size_t i = 0; i < 64; ++i) words[i / 4] |= std::uint32_t{block_[i]} << 8 * (i % 4);
    auto [a, b, c, d] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::size_t round = i / 16;
      const std::uint32_t mixed = round == 0   ? (b & c) | (~b & d)
                                  : round == 1 ? (b & d) | (c & ~d)
                                  : round == 2 ? b ^ c ^ d
                                               : c ^ (b | ~d);
      const std::size_t word = (round == 0   ? i
                                : round == 1 ? 5 * i + 1
                                : round == 2 ? 3 * i + 5
                                             : 7 * i) %
                               16;
      const std::uint32_t turned = b + std::rotl(a + mixed + sines[i] + words[word], turns[round][i % 4]);
      a = d, d = c, c = b, b = turned;
    }
    state_ = {state_[0] + a, state_[1] + b, state_[2] + c, state_[3] + d};
    filled_ = 0;
  }

  std::array<std::uint32_t, 4> state_{0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
  std::array<unsigned char, 64> block_{};
  std::size_t filled_ = 0;
  std::uint64_t length_ = 0;
};

}  // namespace lockstep::detail
