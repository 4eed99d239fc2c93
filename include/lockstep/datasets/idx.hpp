#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
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

namespace lockstep::detail {

/// Decompresses a file while reading it. Declared without zlib too, so that FileSource has one layout in all
/// translation units of a program.
class Decompressor {
 public:
  Decompressor() = default;
  Decompressor(const Decompressor&) = delete;
  Decompressor& operator=(const Decompressor&) = delete;
  virtual ~Decompressor() = default;
  /// Reads up to `count` decompressed bytes and returns their number, which is smaller only at the end.
  /// `offset` is the number of bytes read before. Throws DataError that names `path`.
  virtual std::size_t read(std::FILE* file, void* to, std::size_t count, std::uint64_t offset,
                           const std::string& path) = 0;
};

#if LOCKSTEP_HAS_ZLIB
/// Decompresses gzip with zlib.
class GzipDecompressor : public Decompressor {
 public:
  explicit GzipDecompressor(const std::string& path) {
    // 15 + 16: the largest window, in a gzip wrapper whose checksum zlib verifies.
    if (inflateInit2(&stream_, 15 + 16) != Z_OK)
      throw DataError(
          detail::formatted("{}: zlib could not be initialized: free memory and try again", path));
  }
  ~GzipDecompressor() override { inflateEnd(&stream_); }

  std::size_t read(std::FILE* file, void* to, std::size_t count, std::uint64_t offset,
                   const std::string& path) override {
    auto* out = static_cast<unsigned char*>(to);
    std::size_t got = 0;
    while (got < count) {
      if (done_ && !next_member(file, path)) return got;
      if (stream_.avail_in == 0 && !refill(file))
        throw DataError(
            detail::formatted("{}: the gzip data end early, {} bytes into the decompressed content; "
                              "fetch the file again",
                              path, offset + got));
      const auto room = static_cast<uInt>(std::min<std::size_t>(count - got, 1U << 30));
      stream_.next_out = out + got;
      stream_.avail_out = room;
      const int status = inflate(&stream_, Z_NO_FLUSH);
      got += room - stream_.avail_out;
      if (status == Z_STREAM_END)
        done_ = true;
      else if (status != Z_OK && status != Z_BUF_ERROR)
        throw DataError(detail::formatted("{}: damaged gzip data, {} bytes into the decompressed content: {}",
                                          path, offset + got, stream_.msg ? stream_.msg : "unknown format"));
    }
    return got;
  }

 private:
  /// Reads more of the file behind the input that is left, of which there is at most one byte. Returns false
  /// at the end of the file.
  bool refill(std::FILE* file) {
    if (stream_.avail_in != 0) input_[0] = *stream_.next_in;
    const std::size_t more =
        std::fread(input_.data() + stream_.avail_in, 1, input_.size() - stream_.avail_in, file);
    stream_.next_in = input_.data();
    stream_.avail_in += static_cast<uInt>(more);
    return more != 0;
  }

  /// Begins the next member, as a gzip file may have several. Returns false at the end of the file; skips
  /// zeros, with which tapes and block devices pad a file. Throws DataError for other bytes.
  bool next_member(std::FILE* file, const std::string& path) {
    do
      for (; stream_.avail_in != 0 && *stream_.next_in == 0; --stream_.avail_in) ++stream_.next_in;
    while (stream_.avail_in == 0 && refill(file));
    if (stream_.avail_in == 0) return false;
    if (stream_.avail_in == 1) refill(file);
    if (stream_.avail_in < 2 || stream_.next_in[0] != 0x1f || stream_.next_in[1] != 0x8b) {
      const std::int64_t from = std::ftell(file) - stream_.avail_in;
      std::fseek(file, 0, SEEK_END);
      throw DataError(detail::formatted(
          "{}: offset {}: found {} bytes after the gzip data, expected the end of the file, zeros or another "
          "gzip member; remove them",
          path, from, std::ftell(file) - from));
    }
    inflateReset(&stream_);
    done_ = false;
    return true;
  }

  z_stream stream_{};
  std::array<unsigned char, 1 << 16> input_;
  bool done_ = false;  // whether a member has ended
};
#endif

/// Reads a file from its beginning, and decompresses it if it is gzipped (detected by its first two bytes,
/// not its name). Throws DataError that names the file and, while reading, the offset.
class FileSource {
 public:
  explicit FileSource(const std::filesystem::path& path) : path_(path.string()) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error))
      throw DataError(detail::formatted("{}: {}", path_, error ? error.message() : "not a file"));
    size_ = std::filesystem::file_size(path, error);
    file_.reset(std::fopen(path_.c_str(), "rb"));
    if (!file_) throw DataError(detail::formatted("{}: cannot be opened: {}", path_, std::strerror(errno)));
    std::array<unsigned char, 2> magic{};
    const std::size_t got = std::fread(magic.data(), 1, magic.size(), file_.get());
    std::rewind(file_.get());
    if (got == magic.size() && magic[0] == 0x1f && magic[1] == 0x8b) open_gzip();
  }

  /// Reads up to `count` bytes and returns their number, which is smaller only at the end.
  std::size_t read(void* to, std::size_t count) {
    const std::size_t got = gzipped() ? decompressor_->read(file_.get(), to, count, offset_, path_)
                                      : std::fread(to, 1, count, file_.get());
    if (got < count && std::ferror(file_.get()))
      throw DataError(detail::formatted("{}: reading failed at offset {}: {}", path_, offset_ + got,
                                        std::strerror(errno)));
    offset_ += got;
    return got;
  }

  /// Returns the number of bytes read so far, after decompression.
  [[nodiscard]] std::uint64_t offset() const { return offset_; }
  /// Returns an upper bound of the decompressed size: the file size, times deflate's best ratio if gzipped.
  [[nodiscard]] std::uint64_t capacity() const { return gzipped() ? size_ * 1032 : size_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool gzipped() const { return decompressor_ != nullptr; }

 private:
  void open_gzip() {
#if LOCKSTEP_HAS_ZLIB
    decompressor_ = std::make_unique<GzipDecompressor>(path_);
#else
    throw DataError(
        detail::formatted("{}: the file is gzipped and this program was built without zlib; decompress it "
                          "with gunzip, or build with zlib installed",
                          path_));
#endif
  }

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  std::unique_ptr<Decompressor> decompressor_;
  std::uint64_t size_ = 0, offset_ = 0;
};

}  // namespace lockstep::detail

namespace lockstep {

/// The properties that `read_idx` requires of a file; unset ones are not checked. `content` describes the
/// expected data in errors.
struct IdxExpectation {
  /// The dtype of the elements.
  std::optional<at::ScalarType> dtype{};
  /// The number of dimensions.
  std::optional<int> dimensions{};
  std::string_view content = "data";
};

}  // namespace lockstep

namespace lockstep::detail {

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

inline std::uint32_t big_endian_u32(const unsigned char* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 |
         bytes[3];
}

/// Converts from big-endian by shifts, which the compiler turns into a byte swap where one is needed.
template <class Unsigned>
void from_big_endian(void* data, std::size_t count) {
  auto* bytes = static_cast<unsigned char*>(data);
  for (std::size_t i = 0; i < count; ++i, bytes += sizeof(Unsigned)) {
    Unsigned value = 0;
    for (std::size_t b = 0; b < sizeof(Unsigned); ++b) value = static_cast<Unsigned>(value << 8 | bytes[b]);
    std::memcpy(bytes, &value, sizeof(Unsigned));
  }
}

inline std::string idx_shape(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const auto size : sizes) text += detail::formatted("{}{}", text.empty() ? "" : "x", size);
  return text.empty() ? "scalar" : text;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Reads the tensor in an IDX file (the format of MNIST), plain or gzipped: any number of dimensions and any
/// sizes, of uint8, int8, int16, int32, float32 or float64. Throws DataError with the file, the offset and
/// the expectation if the file is truncated, has trailing data or does not match `expected`.
inline at::Tensor read_idx(const std::filesystem::path& path, const IdxExpectation& expected = {}) {
  detail::FileSource file(path);
  auto refuse = [&](std::uint64_t offset, const std::string& found, const std::string& wanted) {
    throw DataError(
        detail::formatted("{}: offset {}: found {}, expected {}", file.path(), offset, found, wanted));
  };

  std::array<unsigned char, 4> header{};
  if (const auto got = file.read(header.data(), 4); got < 4)
    refuse(got, "the end of the file", "the four bytes with which an IDX file begins");
  const detail::IdxType* type = nullptr;
  for (const auto& known : detail::idx_types)
    if (header[2] == known.code) type = &known;
  if (header[0] != 0 || header[1] != 0 || !type)
    refuse(0,
           detail::formatted("bytes {:02x} {:02x} {:02x} {:02x}", header[0], header[1], header[2], header[3]),
           "the beginning of an IDX file: 00 00, a type (08, 09, 0b to 0e), a number of dimensions");
  if (expected.dtype && type->dtype != *expected.dtype)
    refuse(2, detail::formatted("{} elements", type->name),
           detail::formatted("{} of {}", expected.content, detail::idx_name(*expected.dtype)));
  const int dimensions = header[3];
  if (expected.dimensions && dimensions != *expected.dimensions)
    refuse(3, detail::formatted("{} dimensions", dimensions),
           detail::formatted("{}, which have {}", expected.content, *expected.dimensions));

  std::vector<unsigned char> encoded(4 * static_cast<std::size_t>(dimensions));
  if (const auto got = file.read(encoded.data(), encoded.size()); got < encoded.size())
    refuse(4 + got, "the end of the file", detail::formatted("the sizes of {} dimensions", dimensions));
  std::vector<std::int64_t> sizes;
  const std::uint64_t begin = file.offset(), width = c10::elementSize(type->dtype);
  std::uint64_t bytes = width;
  // The strides of an empty tensor are products, too, and must fit 64 bits: at::empty's error has no file.
  std::uint64_t strides = width;
  bool too_long = false, no_strides = false;
  for (int d = 0; d < dimensions; ++d) {
    const std::uint64_t size = detail::big_endian_u32(&encoded[4 * static_cast<std::size_t>(d)]);
    sizes.push_back(static_cast<std::int64_t>(size));
    no_strides = no_strides || (size != 0 && strides > std::numeric_limits<std::int64_t>::max() / size);
    strides *= no_strides ? 1 : std::max<std::uint64_t>(size, 1);
    // A size beyond the file's capacity also guards against overflow of 64 bits; a later 0 still makes the
    // tensor empty.
    too_long = size != 0 && (too_long || bytes > file.capacity() / size);
    bytes = too_long ? width : bytes * size;
  }
  // Checked before the allocation: a damaged header can announce any size.
  if (too_long || begin + bytes > file.capacity())
    refuse(
        4, detail::formatted("a header that promises {} {} elements", detail::idx_shape(sizes), type->name),
        detail::formatted("at most the {} bytes that the file can hold; it is truncated or not what it says",
                          file.capacity()));

  if (no_strides)
    refuse(4, detail::formatted("the sizes {}", detail::idx_shape(sizes)),
           "sizes whose product without zeros fits 63 bits");

  at::Tensor tensor;
  try {
    tensor = at::empty(sizes, at::TensorOptions().dtype(type->dtype));
  } catch (const c10::Error&) {
    refuse(4, detail::formatted("a header of {} {} elements", detail::idx_shape(sizes), type->name),
           detail::formatted("no more than there is memory for: {} bytes could not be allocated", bytes));
  }
  if (const auto got = file.read(tensor.data_ptr(), bytes); got < bytes)
    refuse(begin + got, "the end of the file",
           detail::formatted("{} bytes in all, for {} {} elements", begin + bytes, detail::idx_shape(sizes),
                             type->name));
  unsigned char beyond = 0;
  if (file.read(&beyond, 1) != 0)
    refuse(
        begin + bytes, "more bytes",
        detail::formatted("the end of the file after {} {} elements", detail::idx_shape(sizes), type->name));

  const auto count = static_cast<std::size_t>(tensor.numel());
  if (width == 2) detail::from_big_endian<std::uint16_t>(tensor.data_ptr(), count);
  if (width == 4) detail::from_big_endian<std::uint32_t>(tensor.data_ptr(), count);
  if (width == 8) detail::from_big_endian<std::uint64_t>(tensor.data_ptr(), count);
  return tensor;
}

/// Writes a contiguous uint8 CPU tensor as an IDX file. Throws DataError for another tensor, or if writing
/// fails.
inline void write_idx(const std::filesystem::path& path, const at::Tensor& tensor) {
  if (tensor.scalar_type() != at::kByte || !tensor.is_contiguous() || !tensor.device().is_cpu())
    throw DataError(
        detail::formatted("{}: only contiguous uint8 tensors on the CPU are written as IDX", path.string()));
  std::string header{'\0', '\0', '\x08', static_cast<char>(tensor.dim())};
  for (const auto size : tensor.sizes())
    for (int shift = 24; shift >= 0; shift -= 8) header += static_cast<char>(size >> shift & 0xff);
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool written = file && std::fwrite(header.data(), 1, header.size(), file) == header.size() &&
                 // An empty tensor has no address to write from.
                 (tensor.numel() == 0 ||
                  std::fwrite(tensor.const_data_ptr(), 1, tensor.nbytes(), file) == tensor.nbytes());
  const int reason = errno;
  if (file && std::fclose(file) != 0) written = false;
  if (!written)
    throw DataError(detail::formatted("{}: cannot be written: {}", path.string(),
                                      std::strerror(reason ? reason : errno)));
}

}  // namespace lockstep
