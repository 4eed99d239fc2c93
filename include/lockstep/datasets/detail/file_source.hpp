#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

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
      throw DataError(detail::formatted("{}: zlib could not be started", path));
  }
  ~GzipDecompressor() override { inflateEnd(&stream_); }

  std::size_t read(std::FILE* file, void* to, std::size_t count, std::uint64_t offset,
                   const std::string& path) override {
    auto* out = static_cast<unsigned char*>(to);
    std::size_t got = 0;
    while (got < count) {
      if (stream_.avail_in == 0) {
        stream_.next_in = input_.data();
        stream_.avail_in = static_cast<uInt>(std::fread(input_.data(), 1, input_.size(), file));
        if (stream_.avail_in == 0) {
          if (done_) return got;
          throw DataError(
              detail::formatted("{}: the gzip data end early, {} bytes into the decompressed content; "
                                "fetch the file again",
                                path, offset + got));
        }
      }
      // A gzip file may be a concatenation of several streams.
      if (done_) {
        inflateReset(&stream_);
        done_ = false;
      }
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
  z_stream stream_{};
  std::array<unsigned char, 1 << 16> input_;
  bool done_ = false;
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
