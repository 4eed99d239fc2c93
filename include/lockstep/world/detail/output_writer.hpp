#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::detail {

/// The two ends of a launching process, stdout (sink 1) and stderr (sink 2), written only when they have
/// room, so that a reader that stops reading (a paused terminal, a full pipe) never keeps signals from being
/// forwarded. The descriptors are shared with the shell and so are not made non-blocking.
///
/// A reader that has gone away (`| head`) makes it `broken`. Where writing fails for another reason, such as
/// a full disk, that end is given up: the other one is told why, and the run goes on.
class OutputWriter {
 public:
  void put(int sink, std::string_view bytes) {
    if (!lost_[sink - 1]) waiting_[sink - 1].append(bytes);
  }
  [[nodiscard]] bool empty() const { return waiting_[0].empty() && waiting_[1].empty(); }
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

 private:
  bool write_some(int sink) {
    auto& bytes = waiting_[sink - 1];
    std::size_t done = 0;
    while (done < bytes.size() && !gone_[sink - 1] && !lost_[sink - 1]) {
      pollfd room{sink, POLLOUT, 0};
      if (poll(&room, 1, 0) <= 0) break;
      // A pipe that is ready takes this much without blocking (PIPE_BUF).
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
    put(3 - sink, fmt::format("warning: {} cannot be written ({}), so that what follows is lost there\n",
                              sink == 1 ? "stdout" : "stderr", std::strerror(reason)));
  }

  std::string waiting_[2];
  bool gone_[2] = {false, false};  // nobody reads it any more
  bool lost_[2] = {false, false};  // it cannot be written
};

}  // namespace lockstep::detail
