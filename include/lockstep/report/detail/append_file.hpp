#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::detail {

/// A file that grows by whole records. Each record is one write, so that a killed process leaves whole
/// records; a record of which a full disk took only a part is cut off again. An error is warned of once, and
/// later records are dropped: a record is never worth the training.
class AppendFile {
 public:
  /// Writes nothing at all.
  AppendFile() = default;
  /// Opens the file for appending, and creates it and its folders where they are missing. If the file does
  /// not end with a newline and holds `lines`, the text after the last newline is cut off.
  AppendFile(std::filesystem::path path, Log log, bool lines);

  /// Returns whether records are written.
  [[nodiscard]] bool open() const { return file_.open(); }
  /// Returns the first line of the file as it was opened, std::nullopt if it was empty.
  [[nodiscard]] const std::optional<std::string>& first_line() const { return first_line_; }

  void append(std::string_view record);
  /// Warns that the file is left out, and why; drops all later records.
  void give_up(std::string_view why);

 private:
  void open_lines();

  std::filesystem::path path_;
  Log log_;
  Descriptor file_;
  std::optional<std::string> first_line_;
};

/// Warns that the file is not written, and why.
void warn_of_unwritten(const Log& log, const std::filesystem::path& path, std::string_view why);

/// Writes a file by write_file_atomically, and creates its folders. Warns of the first failure if `warned` is false,
/// and sets it.
void write_or_warn(const std::filesystem::path& path, std::string_view bytes, const Log& log, bool& warned);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/append_file-inl.hpp"
#endif
