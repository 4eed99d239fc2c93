#pragma once

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Writes to the launching process's stdout (sink 1) and stderr (sink 2) only when they have room, so that a
/// reader that stops reading (a paused terminal, a full pipe) never delays the forwarding of signals. The
/// descriptors are shared with the shell, so they are not made non-blocking.
///
/// A sink whose reader has closed it (`| head`) makes the writer `broken`. If writing fails for another
/// reason, such as a full disk, the writer drops that sink's output, writes a warning to the other sink, and
/// the run continues.
class OutputWriter {
 public:
  void put(int sink, std::string_view bytes) {
    if (!lost_[sink - 1]) waiting_[sink - 1].append(bytes);
  }
  [[nodiscard]] bool empty() const { return waiting_[0].empty() && waiting_[1].empty(); }
  [[nodiscard]] bool full(int sink) const { return waiting_[sink - 1].size() > (1u << 20); }
  /// Returns whether a reader has closed its sink. Output for that sink is dropped.
  [[nodiscard]] bool broken() const { return gone_[0] || gone_[1]; }

  void poll_for(std::vector<pollfd>& polled) const {
    for (int sink : {1, 2})
      if (!waiting_[sink - 1].empty()) polled.push_back({sink, POLLOUT, 0});
  }

  /// Writes as much as possible without blocking. Returns whether it wrote anything.
  bool write_ready() {
    bool progress = false;
    for (int sink : {1, 2}) progress = write_some(sink) || progress;
    return progress;
  }

  /// Calls write_ready() until it writes nothing.
  void flush() {
    while (write_ready()) {
    }
  }

 private:
  bool write_some(int sink) {
    auto& bytes = waiting_[sink - 1];
    std::size_t done = 0;
    while (done < bytes.size() && !gone_[sink - 1] && !lost_[sink - 1]) {
      pollfd room{sink, POLLOUT, 0};
      if (poll(&room, 1, 0) <= 0) break;
      // A ready pipe accepts this much without blocking (PIPE_BUF).
      const ssize_t written =
          write(sink, bytes.data() + done, std::min<std::size_t>(bytes.size() - done, 4096));
      if (written > 0)
        done += static_cast<std::size_t>(written);
      else if (errno == EPIPE)
        gone_[sink - 1] = true;
      else if (errno != EINTR && errno != EAGAIN)
        lose(sink, errno);
    }
    if (gone_[sink - 1] || lost_[sink - 1]) bytes.clear();
    bytes.erase(0, std::min(done, bytes.size()));
    return done > 0;
  }

  void lose(int sink, int reason) {
    lost_[sink - 1] = true;
    put(3 - sink,
        detail::formatted("warning: {} cannot be written ({}), so that what follows is lost there\n",
                          sink == 1 ? "stdout" : "stderr", std::strerror(reason)));
  }

  std::string waiting_[2];
  bool gone_[2] = {false, false};  // the reader has closed it
  bool lost_[2] = {false, false};  // writing failed
};

}  // namespace lockstep::detail
