#pragma once

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

/// The two ends of a launching process, stdout (sink 1) and stderr (sink 2), written only when they have
/// room, so that a reader that stops reading (a paused terminal, a full pipe) never keeps signals from being
/// forwarded. The descriptors are shared with the shell and so are not made non-blocking.
class Outlet {
 public:
  void put(int sink, std::string_view bytes) { waiting_[sink - 1].append(bytes); }
  [[nodiscard]] bool full(int sink) const { return waiting_[sink - 1].size() > (1u << 20); }
  /// Whether a reader has gone away; what is put for it is dropped.
  [[nodiscard]] bool broken() const { return gone_[0] || gone_[1]; }

  void poll_for(std::vector<pollfd>& polled) const {
    for (int sink : {1, 2})
      if (!waiting_[sink - 1].empty()) polled.push_back({sink, POLLOUT, 0});
  }

  /// Writes as much as goes without blocking; returns whether something was written.
  bool write_ready() {
    bool progress = false;
    for (int sink : {1, 2}) progress = write_some(sink) || progress;
    return progress;
  }

  /// As write_ready, until no more goes.
  void flush() {
    while (write_ready()) {
    }
  }

  /// Writes everything, waiting for the readers.
  void drain() {
    while (!waiting_[0].empty() || !waiting_[1].empty()) {
      std::vector<pollfd> polled;
      poll_for(polled);
      if (poll(polled.data(), polled.size(), 1000) < 0 && errno != EINTR) return;
      write_ready();
    }
  }

 private:
  bool write_some(int sink) {
    auto& bytes = waiting_[sink - 1];
    std::size_t done = 0;
    while (done < bytes.size() && !gone_[sink - 1]) {
      pollfd room{sink, POLLOUT, 0};
      if (poll(&room, 1, 0) <= 0) break;
      // A pipe that is ready takes this much without blocking (PIPE_BUF).
      const ssize_t written =
          write(sink, bytes.data() + done, std::min<std::size_t>(bytes.size() - done, 4096));
      if (written > 0)
        done += static_cast<std::size_t>(written);
      else if (errno != EINTR && errno != EAGAIN)
        gone_[sink - 1] = true;
    }
    if (gone_[sink - 1]) bytes.clear();
    bytes.erase(0, done);
    return done > 0;
  }

  std::string waiting_[2];
  bool gone_[2] = {false, false};
};

}  // namespace lockstep::detail
