#pragma once

#include <fmt/format.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/world/detail/report.hpp"

namespace lockstep::detail {

/// The first failure among the processes of this host.
struct RankFailure {
  std::string text;  ///< one sentence naming the rank
  int code = 1;      ///< what the launching process should exit with
  FailureKind kind = FailureKind::error;
};

/// One process that failed, by what it reported or by how it ended.
struct Suspect {
  std::size_t child = 0;
  FailureReport report;
  bool killed = false;  ///< by a SIGKILL from outside: never a consequence
};

inline std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

/// The suspect that a process is which ended with `status` without a report.
inline Suspect suspect_by_status(std::size_t child, int status) {
  Suspect suspect;
  suspect.child = child;
  suspect.report.when = monotonic_nanoseconds();
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    suspect.killed = number == SIGKILL;
    suspect.report.code = 128 + number;
    suspect.report.text =
        fmt::format("died ({}{})", signal_name(number), suspect.killed ? ", perhaps for lack of memory" : "");
  } else {
    suspect.report.code = WEXITSTATUS(status);
    suspect.report.text = fmt::format("ended with exit code {}", WEXITSTATUS(status));
  }
  return suspect;
}

/// Decides which of several failures was the first. A rank that dies makes others fail, and their reports may
/// come before its end is seen: so a killed process counts before all, a cause before a consequence, and the
/// earlier of two equals; and a consequence waits for its cause.
class FirstFailure {
 public:
  using Clock = std::chrono::steady_clock;

  /// `cause_delay`: how long consequences wait for a cause.
  explicit FirstFailure(std::chrono::milliseconds cause_delay) : cause_delay_(cause_delay) {}

  void add(Suspect suspect, Clock::time_point now = Clock::now()) {
    if (suspects_.empty()) since_ = now;
    suspects_.push_back(std::move(suspect));
  }

  [[nodiscard]] bool open() const { return !suspects_.empty(); }

  /// The first failure, once it can be told; `last` says that nobody is left who could report another.
  [[nodiscard]] std::optional<Suspect> first(bool last, Clock::time_point now = Clock::now()) const {
    if (suspects_.empty()) return std::nullopt;
    const auto place = [](const Suspect& suspect) {
      const int order = suspect.killed ? 0 : suspect.report.kind == FailureKind::peer ? 2 : 1;
      return std::pair(order, suspect.report.when);
    };
    const auto& earliest =
        *std::min_element(suspects_.begin(), suspects_.end(),
                          [&](const auto& a, const auto& b) { return place(a) < place(b); });
    const auto wait = earliest.report.kind == FailureKind::peer ? cause_delay_ : settling;
    if (!earliest.killed && !last && now - since_ < wait) return std::nullopt;
    return earliest;
  }

 private:
  // A death may be on its way to us behind a report that it caused.
  static constexpr std::chrono::milliseconds settling{50};

  std::chrono::milliseconds cause_delay_;
  std::vector<Suspect> suspects_;
  Clock::time_point since_;
};

/// The sentence on a failure. `gone` are the ranks that had ended well before it: they are not at fault by
/// their exit code, and yet perhaps the cause.
inline RankFailure describe_failure(FailureReport report, int rank, pid_t pid, std::vector<int> gone) {
  const auto cause = report.kind == FailureKind::peer ? cause_of(report.text) : -1;
  if (std::erase(gone, cause) > 0) report.text = early_end_text(cause);
  auto text = headline(report, fmt::format("rank {} (pid {})", rank, pid));
  if (!gone.empty() && report.kind != FailureKind::usage) {
    text += gone.size() > 1 ? "; ranks " : "; rank ";
    for (std::size_t i = 0; i < std::min<std::size_t>(gone.size(), 4); ++i)
      text += fmt::format("{}{}", i > 0 ? ", " : "", gone[i]);
    if (gone.size() > 4) text += fmt::format(" and {} more", gone.size() - 4);
    text += " had ended by then, with exit code 0";
  }
  return {text, report.code, report.kind};
}

}  // namespace lockstep::detail
