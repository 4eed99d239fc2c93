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

#include <fmt/format.h>

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

namespace lockstep {

/// The bytes of a file from its beginning, decompressed where the file is gzipped (told by its first two
/// bytes, not by its name). Every failure is a DataError that names the file and the offset.
class FileSource {
 public:
  explicit FileSource(const std::filesystem::path& path) : path_(path.string()) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error))
      throw DataError(fmt::format("{}: {}", path_, error ? error.message() : "not a file"));
    size_ = std::filesystem::file_size(path, error);
    file_.reset(std::fopen(path_.c_str(), "rb"));
    if (!file_) throw DataError(fmt::format("{}: cannot be opened: {}", path_, std::strerror(errno)));
    std::array<unsigned char, 2> magic{};
    const std::size_t got = std::fread(magic.data(), 1, magic.size(), file_.get());
    std::rewind(file_.get());
    if (got == magic.size() && magic[0] == 0x1f && magic[1] == 0x8b) open_gzip();
  }

  /// Reads up to `count` bytes; fewer only at the end.
  std::size_t read(void* to, std::size_t count) {
    const std::size_t got = gzipped() ? read_gzip(to, count) : std::fread(to, 1, count, file_.get());
    if (got < count && std::ferror(file_.get()))
      throw DataError(
          fmt::format("{}: reading failed at offset {}: {}", path_, offset_ + got, std::strerror(errno)));
    offset_ += got;
    return got;
  }

  /// Bytes read so far, counted after decompression.
  [[nodiscard]] std::uint64_t offset() const { return offset_; }
  /// The most bytes the file can hold after decompression: its size, or what deflate's best ratio makes of
  /// it.
  [[nodiscard]] std::uint64_t capacity() const { return gzipped() ? size_ * 1032 : size_; }
  [[nodiscard]] const std::string& path() const { return path_; }

#if LOCKSTEP_HAS_ZLIB
  [[nodiscard]] bool gzipped() const {
    return inflater_ != nullptr;
  }

 private:
  struct Inflater {
    z_stream stream{};
    std::array<unsigned char, 1 << 16> input;
    bool done = false;
    ~Inflater() { inflateEnd(&stream); }
  };

  void open_gzip() {
    inflater_ = std::make_unique<Inflater>();
    // 15 + 16: the largest window, in a gzip wrapper whose checksum zlib verifies.
    if (inflateInit2(&inflater_->stream, 15 + 16) != Z_OK)
      throw DataError(fmt::format("{}: zlib could not be started", path_));
  }

  std::size_t read_gzip(void* to, std::size_t count) {
    z_stream& stream = inflater_->stream;
    auto* out = static_cast<unsigned char*>(to);
    std::size_t got = 0;
    while (got < count) {
      if (stream.avail_in == 0) {
        stream.next_in = inflater_->input.data();
        stream.avail_in =
            static_cast<uInt>(std::fread(inflater_->input.data(), 1, inflater_->input.size(), file_.get()));
        if (stream.avail_in == 0) {
          if (inflater_->done) return got;
          throw DataError(
              fmt::format("{}: the gzip data end early, {} bytes into the decompressed content; "
                          "fetch the file again",
                          path_, offset_ + got));
        }
      }
      // A gzip file may be several streams one after the other.
      if (inflater_->done) {
        inflateReset(&stream);
        inflater_->done = false;
      }
      const auto room = static_cast<uInt>(std::min<std::size_t>(count - got, 1U << 30));
      stream.next_out = out + got;
      stream.avail_out = room;
      const int status = inflate(&stream, Z_NO_FLUSH);
      got += room - stream.avail_out;
      if (status == Z_STREAM_END)
        inflater_->done = true;
      else if (status != Z_OK && status != Z_BUF_ERROR)
        throw DataError(fmt::format("{}: damaged gzip data, {} bytes into the decompressed content: {}",
                                    path_, offset_ + got, stream.msg ? stream.msg : "unknown format"));
    }
    return got;
  }

  std::unique_ptr<Inflater> inflater_;
#else
  [[nodiscard]] bool gzipped() const {
    return false;
  }

 private:
  void open_gzip() {
    throw DataError(
        fmt::format("{}: the file is gzipped and this program was built without zlib; decompress it "
                    "with gunzip, or build with zlib installed",
                    path_));
  }
  std::size_t read_gzip(void*, std::size_t) {
    return 0;
  }
#endif

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  std::uint64_t size_ = 0, offset_ = 0;
};

}  // namespace lockstep
