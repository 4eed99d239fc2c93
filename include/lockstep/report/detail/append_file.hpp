#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/log/log.hpp"

namespace lockstep::detail {

/// A file to which records are appended. Each record is one write, so that a killed process leaves complete
/// records. If a full disk accepts only a part of a record, that part is removed. The first error is logged
/// as a warning, and later records are dropped: the training continues.
class AppendFile {
 public:
  /// Constructs a file that drops all records.
  AppendFile() = default;
  /// Opens the file for appending, and creates it and its folders where they are missing. With `lines`,
  /// removes the text after the last newline of an existing file.
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

/// Writes a file by write_file_atomically, and creates its folders. Warns of the first failure if `warned`
/// is false, and sets it.
void write_or_warn(const std::filesystem::path& path, std::string_view bytes, const Log& log, bool& warned);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/append_file-inl.hpp"
#endif
