#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Creates the file `path` atomically: `fill(part)` writes the empty partial file `part` beside it, which is
/// then renamed. If `fill` throws, `path` is unchanged. Throws DataError if the folder is not writable.
template <class Fill>
void make_file_whole(const std::filesystem::path& path, Fill&& fill) {
  const std::filesystem::path part = detail::formatted("{}.{}.part", path.string(), ::getpid());
  const auto refuse = [&] {
    throw DataError(detail::formatted("{}: cannot be written: {}", path.string(), std::strerror(errno)));
  };
  if (!open_new_file(part.c_str()).open()) refuse();
  try {
    fill(part);
    if (std::rename(part.c_str(), path.c_str()) != 0) refuse();
  } catch (...) {
    ::unlink(part.c_str());
    throw;
  }
}

}  // namespace lockstep::detail
