#pragma once

#include <cstddef>

/// Returns the number of bytes that is measured after `bytes`: four times as many, and 25 MiB, DDP's bucket by default.
inline std::size_t size_after(std::size_t bytes) {
  constexpr std::size_t bucket = std::size_t{25} << 20;
  if (bytes == bucket) return std::size_t{64} << 20;
  return bytes < bucket && 4 * bytes > bucket ? bucket : 4 * bytes;
}
