#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// The lines of a text file by which its writer recognizes it.
struct FileLines {
  /// The first 4096 bytes of the first line; std::nullopt if no line ends with a newline.
  std::optional<std::string> first = std::nullopt;
  /// The beginning of the text after the last newline, at most 256 bytes; empty if there is none.
  std::string unfinished = {};
  /// Where that text begins.
  std::int64_t end_of_lines = 0;
};

/// A file to which records are appended. Each record is one write, so that a killed process leaves complete
/// records. If a full disk accepts only a part of a record, that part is removed. The first error is logged
/// as a warning, and later records are dropped: the training continues.
class AppendFile {
 public:
  /// Constructs a file that drops all records.
  AppendFile() = default;
  /// Opens the file for appending; creates it and its folders where they are missing.
  AppendFile(std::filesystem::path path, Log log);

  /// Returns whether records are written.
  [[nodiscard]] bool open() const { return file_.open(); }
  /// Reads the first line and the unfinished last line of a regular file. Call it before the first append.
  [[nodiscard]] FileLines lines();
  /// Removes the text after the last newline, `read.unfinished`. Call it before the first append.
  void remove_unfinished(const FileLines& read);

  void append(std::string_view record);
  /// Warns that the file is left out, and why; drops all later records.
  void give_up(std::string_view why);

 private:
  std::filesystem::path path_;
  Log log_;
  Descriptor file_;
};

/// Returns the log of rank 0 of a group: in a group without world rank 0, the group's rank 0 logs.
inline Log group_log(const World& world) {
  return world.rank() == 0 ? world.log : world.log.all();
}

/// Keeps the regular file at `path`, if there is one, under the next free name, before another one replaces
/// it: report.1.html beside report.html. Tells the name, or warns if it cannot be kept.
void keep_copy(const std::filesystem::path& path, const Log& log);

/// Writes a file by write_file_atomically, and creates its folders. Warns of the first failure if `warned`
/// is false, and sets it.
void write_or_warn(const std::filesystem::path& path, std::string_view bytes, const Log& log, bool& warned);

}  // namespace lockstep::inline v0_1::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/append_file-inl.hpp"
#endif
