#pragma once

#include <unistd.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <string>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::detail {

/// For how long the launcher of this process has been stopped.
class LauncherWatch {
 public:
  /// Looks at the launcher. Returns why rank `rank` ends once it has been stopped for heartbeat_timeout(): it then relays no
  /// output, and reaps nobody.
  std::optional<Failure> look(int rank) {
    if (report_descriptor() < 0) return std::nullopt;
    const auto now = std::chrono::steady_clock::now();
    std::string status;
    std::getline(std::ifstream(formatted("/proc/{}/stat", getppid())), status);
    // Behind the name, which may contain anything. Time in which this process itself was stopped does not count.
    const bool stopped = status.find(") T ") != std::string::npos && now - looked_ < 4 * report_interval;
    looked_ = now;
    if (!stopped) stopped_since_ = now;
    if (now - stopped_since_ < heartbeat_) return std::nullopt;
    const auto time = std::chrono::floor<std::chrono::seconds>(now - stopped_since_).count();
    return Failure{
        .kind = FailureKind::timed_out,
        .rank = rank,
        .pid = getpid(),
        .message = formatted(
            "its launcher (pid {}) has been stopped for {} s (LOCKSTEP_HEARTBEAT_TIMEOUT), and holds "
            "back the output of its ranks: continue it in time (`kill -CONT {}`)",
            getppid(), time, getppid()),
        .time = monotonic_nanoseconds()};
  }

 private:
  const Milliseconds heartbeat_ = heartbeat_timeout();
  std::chrono::steady_clock::time_point looked_{}, stopped_since_ = std::chrono::steady_clock::now();
};

}  // namespace lockstep::detail
