#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/files.hpp"
#include "lockstep/report/detail/append_file.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void warn_of_unwritten(const Log& log, const std::filesystem::path& path,
                                       std::string_view why) {
  log.warning("could not write '{}': {}; the training continues without it", path.string(), why);
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

LOCKSTEP_INLINE AppendFile::AppendFile(std::filesystem::path path, Log log, bool lines)
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
  else if (lines && S_ISREG(status.st_mode) && status.st_size > 0)
    open_lines();
}

LOCKSTEP_INLINE void AppendFile::open_lines() {
  const auto newline_from = [&](off_t begin, off_t end) -> off_t {
    std::array<char, 4096> block{};
    for (; begin < end; begin += static_cast<off_t>(block.size())) {
      const ssize_t got = ::pread(file_.get(), block.data(), block.size(), begin);
      if (got <= 0) return -1;
      if (const void* found = std::memchr(block.data(), '\n', static_cast<std::size_t>(got)))
        return begin + (static_cast<const char*>(found) - block.data());
    }
    return -1;
  };
  const off_t size = ::lseek(file_.get(), 0, SEEK_END);
  char last = '\n';
  if (::pread(file_.get(), &last, 1, size - 1) == 1 && last != '\n') {
    off_t end = size;
    while (end > 0 && ::pread(file_.get(), &last, 1, end - 1) == 1 && last != '\n') --end;
    if (::ftruncate(file_.get(), end) != 0) return give_up(std::strerror(errno));
    if (end == 0) return;
  }
  const off_t newline = newline_from(0, size);
  std::string line(static_cast<std::size_t>(std::max<off_t>(newline, 0)), '\0');
  if (newline < 0 || ::pread(file_.get(), line.data(), line.size(), 0) != newline)
    return give_up("its first line cannot be read");
  first_line_ = std::move(line);
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
  warn_of_unwritten(log_, path_, reason);
}

}  // namespace lockstep::detail
