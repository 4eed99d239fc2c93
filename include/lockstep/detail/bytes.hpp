#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace lockstep::inline v0_1::detail {

static_assert(std::endian::native == std::endian::little, "lockstep's files and messages are little-endian");

/// Returns the little-endian number at `offset`, which must lie inside `bytes`.
template <std::integral Number>
Number little_endian(std::string_view bytes, std::size_t offset = 0) {
  Number value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

/// Appends `value` in its own width, little-endian.
template <std::integral Number>
void append_little_endian(std::string& bytes, Number value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// The same with the most significant byte first.
template <std::integral Number>
Number big_endian(std::string_view bytes, std::size_t offset = 0) {
  std::array<char, sizeof(Number)> reversed;
  std::reverse_copy(bytes.data() + offset, bytes.data() + offset + sizeof(Number), reversed.begin());
  return std::bit_cast<Number>(reversed);
}
template <std::integral Number>
void append_big_endian(std::string& bytes, Number value) {
  append_little_endian(bytes, value);
  std::reverse(bytes.end() - sizeof value, bytes.end());
}

inline constexpr std::uint64_t fnv1a_basis = 0xcbf29ce484222325;

/// Returns the 64-bit FNV-1a hash of `bytes`, continued from `hash`. For comparisons over ranks: std::hash
/// may differ between processes, even of the same build.
inline std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash = fnv1a_basis) {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

/// Eight tables of 256 remainders, for a CRC of eight bytes at a time.
template <std::uint32_t polynomial>
inline constexpr auto crc_tables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? polynomial : 0U);
    tables[0][byte] = value;
  }
  for (std::size_t table = 1; table < tables.size(); ++table)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[table - 1][byte];
      tables[table][byte] = before >> 8 ^ tables[0][before & 0xFF];
    }
  return tables;
}();

/// Returns the 32-bit CRC of `bytes` for a bit-reversed polynomial.
template <std::uint32_t polynomial>
std::uint32_t crc(std::string_view bytes) {
  const auto& tables = crc_tables<polynomial>;
  std::uint32_t crc = ~0U;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    const std::uint32_t low = little_endian<std::uint32_t>(bytes) ^ crc;
    const auto high = little_endian<std::uint32_t>(bytes, 4);
    crc = tables[7][low & 0xFF] ^ tables[6][low >> 8 & 0xFF] ^ tables[5][low >> 16 & 0xFF] ^
          tables[4][low >> 24] ^ tables[3][high & 0xFF] ^ tables[2][high >> 8 & 0xFF] ^
          tables[1][high >> 16 & 0xFF] ^ tables[0][high >> 24];
  }
  for (const char byte : bytes) crc = crc >> 8 ^ tables[0][(crc ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~crc;
}

/// Returns the CRC-32 of ZIP and gzip.
inline std::uint32_t crc32(std::string_view bytes) {
  return crc<0xEDB88320>(bytes);
}

/// Returns the CRC-32C (Castagnoli) of TensorBoard's files.
inline std::uint32_t crc32c(std::string_view bytes) {
  return crc<0x82F63B78>(bytes);
}

}  // namespace lockstep::inline v0_1::detail
