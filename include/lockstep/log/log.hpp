#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

enum class Level { debug, info, warning, error };

/// A logger that knows its rank. By default rank 0 alone speaks; `all()` gives one through which every rank does,
/// with its rank in front. Each line is one write, so that lines of several processes never tear.
class Log {
 public:
  Log() = default;
  explicit Log(int rank) : rank_(rank) {}

  /// The same logger, heard from every rank.
  [[nodiscard]] Log all() const {
    Log copy = *this;
    copy.every_rank_ = true;
    return copy;
  }

  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    if (speaks()) write(fmt::format(text, std::forward<Args>(args)...));
  }

 private:
  [[nodiscard]] bool speaks() const { return every_rank_ || rank_ == 0; }
  void write(std::string_view text) const {
    const std::string line = every_rank_ ? fmt::format("[rank {}] {}\n", rank_, text) : fmt::format("{}\n", text);
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  }

  int rank_ = 0;
  bool every_rank_ = false;
};

}  // namespace lockstep
