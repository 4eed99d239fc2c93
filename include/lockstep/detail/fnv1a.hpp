#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep::detail {

/// Returns the 64-bit FNV-1a hash of `bytes`. For comparisons over ranks: std::hash may differ between
/// processes, even of the same build.
inline std::uint64_t fnv1a(std::string_view bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

}  // namespace lockstep::detail
