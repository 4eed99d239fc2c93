#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "lockstep/datasets/detail/data_file.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

// The CMake target defines LOCKSTEP_HAS_ZLIB to 0 or 1; without it, zlib is used where its header is found
// (link with -lz).
#ifndef LOCKSTEP_HAS_ZLIB
#if __has_include(<zlib.h>)
#define LOCKSTEP_HAS_ZLIB 1
#else
#define LOCKSTEP_HAS_ZLIB 0
#endif
#endif
#if LOCKSTEP_HAS_ZLIB
#include <zlib.h>
#endif

namespace lockstep::inline v0_1 {

/// The properties that `read_idx` requires of a file; unset ones are not checked. `content` describes the
/// expected data in errors.
struct IdxExpectation {
  /// The dtype of the elements.
  std::optional<at::ScalarType> dtype{};
  /// The number of dimensions.
  std::optional<int> dimensions{};
  std::string_view content = "data";
};

namespace detail {

inline bool is_gzipped(std::string_view file) {
  return file.starts_with("\x1f\x8b");
}

/// Decompresses at most `limit` bytes of a gzip file, with its checksum if it has no more. The file may be a
/// concatenation of several members, with zeros between and after them, as tapes and block devices leave.
/// Throws DataError that names `path`.
inline std::string gunzip([[maybe_unused]] std::string_view file, [[maybe_unused]] std::uint64_t limit,
                          const std::string& path) {
#if LOCKSTEP_HAS_ZLIB
  z_stream stream{};
  // 15 + 16: the largest window, in a gzip wrapper whose checksum zlib verifies.
  if (inflateInit2(&stream, 15 + 16) != Z_OK)
    throw DataError(detail::formatted("{}: zlib could not be initialized: free memory and try again", path));
  const std::unique_ptr<z_stream, int (*)(z_stream*)> end(&stream, inflateEnd);
  std::string out;
  std::uint64_t read = 0, got = 0;
  for (int status = Z_OK; got < limit;) {
    if (status == Z_STREAM_END) {
      const std::size_t next = file.find_first_not_of('\0', read);
      if (next == std::string_view::npos) break;
      read = next;
      if (!is_gzipped(file.substr(read)))
        throw DataError(
            detail::formatted("{}: offset {}: found {} bytes after the gzip data, expected the end of the "
                              "file, zeros or another gzip member; remove them",
                              path, read, file.size() - read));
      inflateReset(&stream);
    }
    if (got == out.size()) out.resize(std::min(limit, std::max<std::uint64_t>(2 * got, 1 << 16)));
    stream.next_in = reinterpret_cast<unsigned char*>(const_cast<char*>(file.data() + read));
    stream.avail_in = static_cast<uInt>(std::min<std::uint64_t>(file.size() - read, 1U << 30));
    stream.next_out = reinterpret_cast<unsigned char*>(out.data() + got);
    stream.avail_out = static_cast<uInt>(std::min<std::uint64_t>(out.size() - got, 1U << 30));
    const uInt in = stream.avail_in, room = stream.avail_out;
    status = inflate(&stream, Z_NO_FLUSH);
    read += in - stream.avail_in;
    got += room - stream.avail_out;
    if (status == Z_BUF_ERROR && read == file.size())
      throw DataError(detail::formatted(
          "{}: the gzip data end early, {} bytes into the decompressed content; fetch the file again", path,
          got));
    if (status != Z_STREAM_END && status != Z_OK && status != Z_BUF_ERROR)
      throw DataError(detail::formatted("{}: damaged gzip data, {} bytes into the decompressed content: {}",
                                        path, got, stream.msg ? stream.msg : "unknown format"));
  }
  out.resize(got);
  return out;
#else
  throw DataError(
      detail::formatted("{}: the file is gzipped and this program was built without zlib; decompress it with "
                        "gunzip, or build with zlib installed",
                        path));
#endif
}

struct IdxType {
  unsigned char code;
  at::ScalarType dtype;
  std::string_view name;
};

inline constexpr std::array<IdxType, 6> idx_types{{{0x08, at::kByte, "uint8"},
                                                   {0x09, at::kChar, "int8"},
                                                   {0x0B, at::kShort, "int16"},
                                                   {0x0C, at::kInt, "int32"},
                                                   {0x0D, at::kFloat, "float32"},
                                                   {0x0E, at::kDouble, "float64"}}};

inline std::string_view idx_name(at::ScalarType dtype) {
  for (const auto& type : idx_types)
    if (type.dtype == dtype) return type.name;
  return "elements that IDX does not know";
}

/// Converts `count` numbers from big-endian.
template <class Unsigned>
void from_big_endian(void* data, std::size_t count) {
  auto* bytes = static_cast<char*>(data);
  for (std::size_t i = 0; i < count; ++i, bytes += sizeof(Unsigned)) {
    const auto value = big_endian<Unsigned>({bytes, sizeof(Unsigned)});
    std::memcpy(bytes, &value, sizeof(Unsigned));
  }
}

inline std::string idx_shape(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const auto size : sizes) text += detail::formatted("{}{}", text.empty() ? "" : "x", size);
  return text.empty() ? "scalar" : text;
}

}  // namespace detail

/// Reads the tensor in an IDX file (the format of MNIST), plain or gzipped: any number of dimensions and any
/// sizes, of uint8, int8, int16, int32, float32 or float64. Throws DataError with the file, the offset and
/// the expectation if the file is truncated, has trailing data or does not match `expected`.
inline at::Tensor read_idx(const std::filesystem::path& path, const IdxExpectation& expected = {}) {
  const std::string file = detail::as_data_file([&] { return read_file(path); });
  const bool gzipped = detail::is_gzipped(file);
  // An upper bound of the content's size, by deflate's best ratio.
  const std::uint64_t capacity = gzipped ? file.size() * 1032 : file.size();
  std::string content;  // of a gzipped file: as much as was asked for
  const auto read = [&](std::uint64_t size) -> std::string_view {
    if (!gzipped) return std::string_view(file).substr(0, size);
    return content = detail::gunzip(file, size, path.string());
  };
  auto refuse = [&](std::uint64_t offset, const std::string& found, const std::string& wanted) {
    throw DataError(
        detail::formatted("{}: offset {}: found {}, expected {}", path.string(), offset, found, wanted));
  };

  const std::string header(read(4 + 4 * 255));  // at most
  if (header.size() < 4)
    refuse(header.size(), "the end of the file", "the four bytes with which an IDX file begins");
  const auto byte = [&](std::size_t i) {
    return static_cast<unsigned>(static_cast<unsigned char>(header[i]));
  };
  const detail::IdxType* type = nullptr;
  for (const auto& known : detail::idx_types)
    if (byte(2) == known.code) type = &known;
  if (byte(0) != 0 || byte(1) != 0 || !type)
    refuse(0, detail::formatted("bytes {:02x} {:02x} {:02x} {:02x}", byte(0), byte(1), byte(2), byte(3)),
           "the beginning of an IDX file: 00 00, a type (08, 09, 0b to 0e), a number of dimensions");
  if (expected.dtype && type->dtype != *expected.dtype)
    refuse(2, detail::formatted("{} elements", type->name),
           detail::formatted("{} of {}", expected.content, detail::idx_name(*expected.dtype)));
  const unsigned dimensions = byte(3);
  if (expected.dimensions && dimensions != static_cast<unsigned>(*expected.dimensions))
    refuse(3, detail::formatted("{} dimensions", dimensions),
           detail::formatted("{}, which have {}", expected.content, *expected.dimensions));

  const std::uint64_t begin = 4 + 4 * std::uint64_t{dimensions}, width = c10::elementSize(type->dtype);
  if (header.size() < begin)
    refuse(header.size(), "the end of the file", detail::formatted("the sizes of {} dimensions", dimensions));
  std::vector<std::int64_t> sizes;
  std::uint64_t bytes = width;
  // The strides of an empty tensor are products, too, and must fit 64 bits: at::empty's error has no file.
  std::uint64_t strides = width;
  bool too_long = false, no_strides = false;
  for (unsigned d = 0; d < dimensions; ++d) {
    const std::uint64_t size = detail::big_endian<std::uint32_t>(header, 4 + 4 * d);
    sizes.push_back(static_cast<std::int64_t>(size));
    no_strides = no_strides || (size != 0 && strides > std::numeric_limits<std::int64_t>::max() / size);
    strides *= no_strides ? 1 : std::max<std::uint64_t>(size, 1);
    // A size beyond the file's capacity also guards against overflow of 64 bits; a later 0 still makes the
    // tensor empty.
    too_long = size != 0 && (too_long || bytes > capacity / size);
    bytes = too_long ? width : bytes * size;
  }
  // Checked before the allocation: a damaged header can announce any size.
  if (too_long || begin + bytes > capacity)
    refuse(4,
           detail::formatted("a header that promises {} {} elements", detail::idx_shape(sizes), type->name),
           detail::formatted(
               "at most the {} bytes that the file can hold; it is truncated or not what it says", capacity));

  if (no_strides)
    refuse(4, detail::formatted("the sizes {}", detail::idx_shape(sizes)),
           "sizes whose product without zeros fits 63 bits");

  const std::string_view whole = read(begin + bytes + 1);
  if (whole.size() < begin + bytes)
    refuse(whole.size(), "the end of the file",
           detail::formatted("{} bytes in all, for {} {} elements", begin + bytes, detail::idx_shape(sizes),
                             type->name));
  if (whole.size() > begin + bytes)
    refuse(
        begin + bytes, "more bytes",
        detail::formatted("the end of the file after {} {} elements", detail::idx_shape(sizes), type->name));
  at::Tensor tensor;
  try {
    tensor = at::empty(sizes, at::TensorOptions().dtype(type->dtype));
  } catch (const c10::Error&) {
    refuse(4, detail::formatted("a header of {} {} elements", detail::idx_shape(sizes), type->name),
           detail::formatted("no more than there is memory for: {} bytes could not be allocated", bytes));
  }
  if (bytes > 0) std::memcpy(tensor.mutable_data_ptr(), whole.data() + begin, bytes);

  const auto count = static_cast<std::size_t>(tensor.numel());
  if (width == 2) detail::from_big_endian<std::uint16_t>(tensor.data_ptr(), count);
  if (width == 4) detail::from_big_endian<std::uint32_t>(tensor.data_ptr(), count);
  if (width == 8) detail::from_big_endian<std::uint64_t>(tensor.data_ptr(), count);
  return tensor;
}

/// Writes a contiguous uint8 CPU tensor as an IDX file, atomically. Throws DataError for another tensor, or
/// if writing fails.
inline void write_idx(const std::filesystem::path& path, const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kByte || !tensor.is_contiguous() || !tensor.device().is_cpu())
    throw DataError(
        detail::formatted("{}: only contiguous uint8 tensors on the CPU are written as IDX", path.string()));
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(tensor.dim())};
  for (const auto size : tensor.sizes()) detail::append_big_endian(bytes, static_cast<std::uint32_t>(size));
  // An empty tensor has no address.
  if (tensor.numel() > 0) bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  detail::as_data_file([&] { write_file_atomically(path, bytes); });
}

}  // namespace lockstep::inline v0_1
