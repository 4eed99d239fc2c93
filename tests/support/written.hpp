#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>

#include "support/temporary_folder.hpp"

/// Returns what `work` writes to a stream of this process: 1 for stdout, 2 for stderr.
template <class Work>
std::string written(int fd, Work&& work) {
  const TemporaryFolder folder;
  const auto path = folder / "written";
  std::fflush(nullptr);
  const int kept = dup(fd), file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  dup2(file, fd);
  close(file);
  std::forward<Work>(work)();
  std::fflush(nullptr);
  dup2(kept, fd);
  close(kept);
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}
