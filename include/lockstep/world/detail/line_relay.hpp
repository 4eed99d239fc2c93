#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::inline v0_1::detail {

/// Writes to the launching process's stdout (sink 1) and stderr (sink 2) only when they have room, so that a
/// reader that stops reading (a paused terminal, a full pipe) never delays the forwarding of signals. The
/// descriptors are shared with the shell, so they are not made non-blocking; a terminal, which has room for less than it is
/// given, is opened once more.
///
/// A sink whose reader has closed it (`| head`) makes the writer `broken`. If writing fails for another
/// reason, such as a full disk, the writer drops that sink's output, writes a warning to the other sink, and
/// the run continues.
class OutputWriter {
 public:
  OutputWriter() {
    for (int sink : {1, 2})
      if (isatty(sink) == 1)
        sinks_[sink - 1].terminal = Descriptor(open(sink == 1 ? "/proc/self/fd/1" : "/proc/self/fd/2",
                                                    O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC));
  }

  void put(int sink, std::string_view bytes) {
    if (!sinks_[sink - 1].closed) sinks_[sink - 1].waiting.append(bytes);
  }
  [[nodiscard]] bool empty() const { return sinks_[0].waiting.empty() && sinks_[1].waiting.empty(); }
  [[nodiscard]] bool full(int sink) const { return sinks_[sink - 1].waiting.size() > (1u << 20); }
  /// Returns whether a reader has closed its sink. Output for that sink is dropped.
  [[nodiscard]] bool broken() const { return broken_; }

  void poll_for(std::vector<pollfd>& polled) const {
    for (int sink : {1, 2})
      if (!sinks_[sink - 1].waiting.empty()) polled.push_back({descriptor(sink), POLLOUT, 0});
  }

  /// Writes as much as possible without blocking.
  void write_ready() {
    for (int sink : {1, 2}) {
      auto& [waiting, closed, terminal] = sinks_[sink - 1];
      const int to = descriptor(sink);
      std::size_t done = 0;
      while (done < waiting.size() && !closed) {
        pollfd room{to, POLLOUT, 0};
        if (poll(&room, 1, 0) <= 0) break;
        // A ready pipe accepts this much without blocking (PIPE_BUF).
        const auto most = std::min<std::size_t>(waiting.size() - done, 4096);
        const ssize_t written = write(to, waiting.data() + done, most);
        if (written > 0) {
          done += static_cast<std::size_t>(written);
        } else if (errno == EPIPE) {
          closed = broken_ = true;
        } else if (errno == EAGAIN) {
          break;
        } else if (errno != EINTR) {
          closed = true;
          put(3 - sink, formatted("warning: {} cannot be written ({}), so that what follows is lost there\n",
                                  sink == 1 ? "stdout" : "stderr", std::strerror(errno)));
        }
      }
      waiting.erase(0, closed ? waiting.size() : done);
    }
  }

 private:
  struct Sink {
    std::string waiting;
    bool closed = false;
    Descriptor terminal = {};
  };
  [[nodiscard]] int descriptor(int sink) const {
    const Descriptor& terminal = sinks_[sink - 1].terminal;
    return terminal.open() ? terminal.get() : sink;
  }

  Sink sinks_[2];
  bool broken_ = false;
};

/// Merges the output of several ranks line by line: a line of one rank comes out as one line, with the rank in front if
/// `prefix` asks for it. Bytes pass unchanged. Stream 2i is the stdout of the i-th rank and goes to sink 1; stream 2i +
/// 1 is its stderr and goes to sink 2. The sinks share one cursor if both are terminals.
class LineRelay {
 public:
  using Clock = std::chrono::steady_clock;
  /// Writes bytes to sink 1 (stdout) or 2 (stderr).
  using Write = std::function<void(int sink, std::string_view)>;

  /// `first` is the lowest of `ranks` ranks.
  LineRelay(int first, std::size_t ranks, Prefix prefix, bool out_terminal, bool error_terminal, Write write)
      : first_(first),
        prefix_(prefix),
        terminal_{out_terminal, error_terminal},
        write_(std::move(write)),
        streams_(2 * ranks) {}

  /// Adds bytes from a stream.
  void feed(std::size_t stream, std::string_view bytes, Clock::time_point now = Clock::now()) {
    streams_[stream].pending.append(bytes);
    streams_[stream].last = now;
    flush(stream, false);
  }

  /// Ends a stream and writes the rest of its last line.
  void close(std::size_t stream) {
    flush(stream, true);
    if (auto& cursor = cursor_of(stream); cursor.open_by == stream) {
      cursor.owner_ended = true;
      flush_others(stream);
    }
  }

  /// Call it periodically. Shows an idle partial line on a terminal (a question, a bar), and ends an idle
  /// open line that keeps other ranks waiting.
  void tick(Clock::time_point now = Clock::now()) {
    for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
      auto& cursor = cursor_of(stream);
      const bool idle = now - streams_[stream].last >= idle_line;
      if (cursor.open_by == stream && idle) flush_others(stream);
      if (terminal_[stream % 2] && idle && cursor.open_by == none && !streams_[stream].pending.empty())
        flush(stream, true);
    }
  }

  /// Returns whether so much is pending from this stream that it should not be read for now.
  [[nodiscard]] bool full(std::size_t stream) const { return streams_[stream].pending.size() > (1u << 20); }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  static constexpr std::size_t longest_held = 1u << 16;

  struct Stream {
    std::string pending;
    Clock::time_point last;
  };
  struct Cursor {
    std::size_t open_by = none;  // the stream whose line has begun and not ended
    bool owner_ended = false;    // ... and never will
    bool redrawn = false;        // the line ended in a carriage return: the next line overwrites it
  };

  Cursor& cursor_of(std::size_t stream) { return cursors_[terminal_[0] && terminal_[1] ? 0 : stream % 2]; }

  [[nodiscard]] std::size_t line_length(std::size_t stream, std::string_view text) const {
    const auto end = terminal_[stream % 2] ? text.find_first_of("\n\r") : text.find('\n');
    if (end == std::string_view::npos) return 0;
    return text.substr(end, 2) == "\r\n" ? end + 2 : end + 1;
  }

  void flush(std::size_t stream, bool with_partial_line) {
    auto& cursor = cursor_of(stream);
    auto& pending = streams_[stream].pending;
    if (pending.empty()) return;
    if (cursor.open_by != none && cursor.open_by != stream) {
      if (!cursor.owner_ended && !with_partial_line) return;
      break_line(cursor);
    }
    std::string out;
    std::string_view rest = pending;
    while (const auto length = line_length(stream, rest)) {
      begin_line(stream, rest.substr(0, length), out);
      out += rest.substr(0, length);
      cursor.redrawn = rest[length - 1] == '\r';
      cursor.open_by = none;
      rest.remove_prefix(length);
    }
    if (!rest.empty() && (with_partial_line || rest.size() > longest_held || cursor.open_by == stream)) {
      begin_line(stream, rest, out);
      out += rest;
      cursor.open_by = stream;
      cursor.owner_ended = false;
      rest = {};
    }
    pending.erase(0, pending.size() - rest.size());
    if (!out.empty()) write_(1 + static_cast<int>(stream % 2), out);
    if (cursor.open_by == none) flush_others(stream);
  }

  void begin_line(std::size_t stream, std::string_view line, std::string& out) {
    auto& cursor = cursor_of(stream);
    if (cursor.open_by == stream) return;
    if (cursor.redrawn && line == "\n") return;  // the end of a bar, or of a "\r\n" that was split
    // Erase a bar before other output replaces it; a redrawn bar needs no erasing.
    if (cursor.redrawn && line.back() != '\r') out += "\r\x1b[K";
    const int rank = first_ + static_cast<int>(stream / 2);
    if (prefix_ == Prefix::never || (prefix_ == Prefix::automatic && rank == 0)) return;
    const auto text = formatted("[rank {}] ", rank);
    if (!line.starts_with(text)) out += text;
  }

  // Ends the line that another stream has left open.
  void break_line(Cursor& cursor) {
    write_(1 + static_cast<int>(cursor.open_by % 2), "\n");
    cursor = {};
  }

  // Writes the whole lines of the other streams that share a cursor, and bytes that are too many to be held back for
  // the end of one, after the end of the line that `owner` has left open, if it has.
  void flush_others(std::size_t owner) {
    for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
      auto& cursor = cursor_of(stream);
      const auto& pending = streams_[stream].pending;
      const bool waits = pending.size() > longest_held || line_length(stream, pending) > 0;
      if (stream == owner || &cursor != &cursor_of(owner) || !waits) continue;
      if (cursor.open_by == owner) break_line(cursor);
      if (cursor.open_by == none) flush(stream, false);
    }
  }

  int first_;
  Prefix prefix_;
  bool terminal_[2];
  Write write_;
  std::vector<Stream> streams_;
  Cursor cursors_[2];
};

}  // namespace lockstep::inline v0_1::detail
