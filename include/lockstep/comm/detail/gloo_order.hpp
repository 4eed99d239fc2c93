#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <type_traits>

/// The order in which Gloo's ring adds, so that sums in shared memory have the bits of sums over Gloo.
namespace lockstep::inline v0_1::detail {

/// Returns the bytes of a chunk of Gloo's ring of `ranks` ranks (at least 2) over `bytes` bytes of elements of
/// `element` bytes. Element e is in chunk c = e * element / chunk_bytes; its sum is x_c + (x_(c+1) + ( ... + x_(c-1))),
/// rank numbers modulo the number of ranks. A reduce to a root has other chunks than an all-reduce of the same bytes.
inline std::size_t gloo_chunk_bytes(std::size_t bytes, std::size_t element, std::size_t ranks,
                                    bool to_root = false) {
  constexpr std::size_t longest_segment = 1 << 20;
  const auto ceil_to = [](std::size_t value, std::size_t step) { return (value + step - 1) / step * step; };
  const auto parts = [](std::size_t value, std::size_t size) { return (value + size - 1) / size; };
  if (bytes == 0) return 0;
  const std::size_t longest = element * std::max<std::size_t>(1, longest_segment / element);
  if (to_root) {
    const std::size_t segment = ceil_to(std::min(parts(bytes, 2 * ranks), longest), element);
    return ceil_to(std::max(parts(bytes, segment), 2 * ranks), ranks) / ranks * segment;
  }
  const std::size_t segments = ceil_to(std::max(parts(bytes, longest), 2 * ranks), ranks);
  return segments / ranks * ceil_to(parts(bytes, segments), element);
}

/// Combines `bytes` bytes of `count` (at least 2) inputs: out = in[count-1] op ( ... (in[1] op in[0])). The output may
/// be one of the inputs.
using Fold = void (*)(char* out, const char* const* in, std::size_t count, std::size_t bytes);

// Of a NaN and a number, the local one: as std::min and std::max, which Gloo takes.
struct LeastElement {
  template <class T>
  T operator()(T local, T received) const {
    return std::min(local, received);
  }
};
struct GreatestElement {
  template <class T>
  T operator()(T local, T received) const {
    return std::max(local, received);
  }
};

template <class T, class Op>
void combine(char* out, const char* local, const char* received, std::size_t bytes) {
  std::size_t i = 0;
  const auto run = [&](auto a, auto b) {
    for (; i + sizeof a <= bytes; i += sizeof a) {
      std::memcpy(&a, local + i, sizeof a);
      std::memcpy(&b, received + i, sizeof b);
      a = static_cast<decltype(a)>(Op()(a, b));
      std::memcpy(out + i, &a, sizeof a);
    }
  };
  // Compilers vectorize a loop over arrays of this type at any level of optimization, without instructions that only
  // some processors have.
  if constexpr (std::is_arithmetic_v<T> &&
                (std::is_same_v<Op, std::plus<>> || std::is_same_v<Op, std::multiplies<>>)) {
    using Vector [[gnu::vector_size(16)]] = T;
    run(Vector{}, Vector{});
  }
  run(T{}, T{});
}

/// The Fold of one dtype and operation. Sums and products of integers are those of unsigned ones, which may overflow.
template <class T, class Op>
void fold(char* out, const char* const* in, std::size_t count, std::size_t bytes) {
  if (count == 2) return combine<T, Op>(out, in[1], in[0], bytes);
  alignas(64) std::array<char, 4096> tile;  // stays in the first cache
  for (std::size_t begin = 0; begin < bytes; begin += tile.size()) {
    const std::size_t size = std::min(tile.size(), bytes - begin);
    combine<T, Op>(tile.data(), in[1] + begin, in[0] + begin, size);
    for (std::size_t i = 2; i + 1 < count; ++i) combine<T, Op>(tile.data(), in[i] + begin, tile.data(), size);
    combine<T, Op>(out + begin, in[count - 1] + begin, tile.data(), size);
  }
}

}  // namespace lockstep::inline v0_1::detail
