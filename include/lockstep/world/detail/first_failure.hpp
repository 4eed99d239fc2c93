#pragma once

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

#include "lockstep/detail/format.hpp"
#include "lockstep/world/detail/report.hpp"

namespace lockstep::detail {

/// The first failure among the processes of this host.
struct RankFailure {
  std::string text;  ///< one sentence that names the rank
  int code = 1;      ///< the launching process's exit code
  FailureKind kind = FailureKind::error;
};

/// A process that failed, with its own report or one derived from its exit status.
struct Suspect {
  std::size_t child = 0;
  FailureReport report;
  bool killed = false;  ///< by an external SIGKILL, which is never a consequence
};

inline std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? detail::formatted("SIG{}", name) : detail::formatted("signal {}", number);
}

/// Returns the Suspect of a process that ended with `status` and without a report.
inline Suspect suspect_by_status(std::size_t child, int status) {
  Suspect suspect;
  suspect.child = child;
  suspect.report.when = monotonic_nanoseconds();
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    suspect.killed = number == SIGKILL;
    suspect.report.code = 128 + number;
    suspect.report.text = detail::formatted("died ({}{})", signal_name(number),
                                            suspect.killed ? ", perhaps for lack of memory" : "");
  } else {
    suspect.report.code = WEXITSTATUS(status);
    suspect.report.text = detail::formatted("ended with exit code {}", WEXITSTATUS(status));
  }
  return suspect;
}

/// Decides which of several failures was the first. A rank that dies makes other ranks fail, and their
/// reports may arrive before its death is seen. So a killed process ranks before all others, a cause before a
/// consequence, and otherwise the earlier failure first. A consequence waits for its cause.
class FirstFailure {
 public:
  using Clock = std::chrono::steady_clock;

  /// `cause_delay` is how long a consequence waits for a cause.
  explicit FirstFailure(std::chrono::milliseconds cause_delay) : cause_delay_(cause_delay) {}

  void add(Suspect suspect, Clock::time_point now = Clock::now()) {
    if (suspects_.empty()) since_ = now;
    suspects_.push_back(std::move(suspect));
  }

  [[nodiscard]] bool open() const { return !suspects_.empty(); }

  /// Returns the first failure once it is decided. `last` means that no process is left that could fail.
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
  // A death may be seen shortly after the report that it caused.
  static constexpr std::chrono::milliseconds settling{50};

  std::chrono::milliseconds cause_delay_;
  std::vector<Suspect> suspects_;
  Clock::time_point since_;
};

/// Describes a failure in a sentence. `gone` lists the ranks that had ended earlier with exit code 0: they
/// may still be the cause.
inline RankFailure describe_failure(FailureReport report, int rank, pid_t pid, std::vector<int> gone) {
  const auto cause = report.kind == FailureKind::peer ? cause_of(report.text) : -1;
  if (std::erase(gone, cause) > 0) report.text = early_end_text(cause);
  auto text = headline(report, detail::formatted("rank {} (pid {})", rank, pid));
  if (!gone.empty() && report.kind != FailureKind::usage) {
    text += gone.size() > 1 ? "; ranks " : "; rank ";
    for (std::size_t i = 0; i < std::min<std::size_t>(gone.size(), 4); ++i)
      text += detail::formatted("{}{}", i > 0 ? ", " : "", gone[i]);
    if (gone.size() > 4) text += detail::formatted(" and {} more", gone.size() - 4);
    text += " had ended by then, with exit code 0";
  }
  return {text, report.code, report.kind};
}

}  // namespace lockstep::detail
