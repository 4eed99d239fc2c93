#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// Throws UsageError unless a file can be created at `path`. Call it before training, to fail early. Leaves
/// an existing file unchanged. Refuses an existing path that is not a regular file, such as a device.
/// `option`: the command-line option that gave the path, named first in the error. Not collective.
void require_writable(const std::filesystem::path& path,
                      std::optional<std::string_view> option = std::nullopt);

/// Writes `bytes` to `path` atomically: to `path`.lockstep.tmp beside it, which is synced and then renamed. After a
/// crash, a full disk or a kill the previous content remains; the next call removes a temporary file that a killed
/// process has left. Keeps the permissions of the file that it replaces. A symbolic link stays a link; its target is
/// replaced. Waits up to 60 s for another process that writes the same file. Throws CheckpointError if writing fails or
/// if `path` exists and is not a regular file. Not collective: call it on one rank.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// Returns the content of a regular file. Does not block on a pipe. Throws CheckpointError if `path` is not a
/// regular file, is empty, or cannot be read. Not collective.
std::string read_file(const std::filesystem::path& path);

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/detail/files-inl.hpp"
#endif
