#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/files.hpp"
#include "lockstep/report/detail/append_file.hpp"

namespace lockstep::inline v0_1::detail {

LOCKSTEP_INLINE void keep_copy(const std::filesystem::path& path, const Log& log) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return;
  for (int number = 1;; ++number) {
    const auto copy =
        path.parent_path() / formatted("{}.{}{}", path.stem().string(), number, path.extension().string());
    // A second name, since the new file comes by a rename; a file system without links gets a copy.
    std::filesystem::create_hard_link(path, copy, error);
    if (error && error != std::errc::file_exists) {
      std::filesystem::copy_file(path, copy, error);
      std::error_code ignored;
      if (error && error != std::errc::file_exists) std::filesystem::remove(copy, ignored);
    }
    if (!error) return log.info("the earlier '{}' is now '{}'", path.string(), copy.string());
    if (error == std::errc::file_exists) continue;
    return log.warning("the earlier '{}' could not be kept as '{}': {}; it is replaced", path.string(),
                       copy.string(), error.message());
  }
}

LOCKSTEP_INLINE void write_or_warn(const std::filesystem::path& path, std::string_view bytes, const Log& log,
                                   bool& warned) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  try {
    write_file_atomically(path, bytes);
  } catch (const CheckpointError& failure) {
    if (!std::exchange(warned, true)) log.warning("{}; the training continues without it", failure.what());
  }
}

LOCKSTEP_INLINE AppendFile::AppendFile(std::filesystem::path path, Log log)
    : path_(std::move(path)), log_(log) {
  std::error_code error;
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), error);
  // O_RDWR: the file is read back, and opening a pipe does not wait for its reader.
  file_ = Descriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  struct ::stat status {};
  if (!file_.open() || ::fstat(file_.get(), &status) != 0)
    give_up(std::strerror(errno));
  else if (!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode))
    give_up("it is no regular file");
}

LOCKSTEP_INLINE FileLines AppendFile::lines() {
  FileLines read;
  struct ::stat status {};
  if (!file_.open() || ::fstat(file_.get(), &status) != 0 || !S_ISREG(status.st_mode)) return read;
  const off_t size = status.st_size;
  const auto text_at = [&](off_t begin, off_t end) {
    std::string text(static_cast<std::size_t>(end - begin), '\0');
    if (::pread(file_.get(), text.data(), text.size(), begin) == end - begin) return text;
    give_up("it cannot be read");
    return std::string();
  };
  constexpr off_t block = 4096;
  off_t newline = -1;  // the first one
  for (off_t begin = 0; newline < 0 && begin < size; begin += block) {
    const std::string text = text_at(begin, std::min(begin + block, size));
    if (text.empty()) return {};
    if (const auto at = text.find('\n'); at != std::string::npos) newline = begin + static_cast<off_t>(at);
  }
  off_t end = newline < 0 ? 0 : size;  // after the last newline
  for (bool found = false; !found && end > 0;) {
    const off_t begin = std::max<off_t>(end - block, 0);
    const std::string text = text_at(begin, end);
    if (text.empty()) return {};
    const auto at = text.rfind('\n');
    found = at != std::string::npos;
    end = found ? begin + static_cast<off_t>(at) + 1 : begin;
  }
  if (newline >= 0) read.first = text_at(0, std::min(newline, block));
  read.unfinished = text_at(end, std::min<off_t>(end + 256, size));
  read.end_of_lines = end;
  return read;
}

LOCKSTEP_INLINE void AppendFile::remove_unfinished(const FileLines& read) {
  if (file_.open() && !read.unfinished.empty() && ::ftruncate(file_.get(), read.end_of_lines) != 0)
    give_up(std::strerror(errno));
}

LOCKSTEP_INLINE void AppendFile::append(std::string_view record) {
  if (!file_.open()) return;
  const off_t before = ::lseek(file_.get(), 0, SEEK_END);
  if (write_all(file_.get(), record)) return;
  const int reason = errno;
  if (before >= 0 && ::ftruncate(file_.get(), before) != 0) errno = reason;
  give_up(std::strerror(reason));
}

LOCKSTEP_INLINE void AppendFile::give_up(std::string_view why) {
  const std::string reason(why);  // strerror's memory
  file_ = Descriptor();
  log_.warning("could not write '{}': {}; the training continues without it", path_.string(), reason);
}

}  // namespace lockstep::inline v0_1::detail
