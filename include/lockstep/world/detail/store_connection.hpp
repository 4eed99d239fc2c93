#pragma once

#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

/// The address at which a store listens, its secret, what determines the address, see
/// Environment::rendezvous_origin, and the remedy if nobody serves it.
struct StoreEndpoint {
  std::string host;
  int port = 0;
  std::string secret = {};
  RendezvousOrigin origin = {};
  std::string remedy = start_rank_zero;

  /// Returns the address for messages: "nodeA:29500 (MASTER_ADDR=nodeA, MASTER_PORT=29500)".
  [[nodiscard]] std::string text() const {
    return detail::formatted("{}:{}{}", host, port,
                             origin.text.empty() ? std::string() : " (" + origin.text + ")");
  }
};

/// The store did not answer in time. The connection stays usable.
struct StoreTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The connection to the store has ended.
struct StoreLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The store refused the request.
struct StoreRefusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A client's connection to a StoreServer. Thread-safe: requests of several threads wait for each other, each
/// at most until its own deadline. A reply to an abandoned request is discarded, so that the next request
/// gets its own reply.
class StoreConnection {
 public:
  using Clock = std::chrono::steady_clock;
  using Waiting = std::function<void(const std::string& reason)>;

  /// Connects and exchanges the hello. Retries for `timeout` while nothing listens, and calls `waiting` from
  /// time to time. Throws RendezvousError, which states what is wrong at the address.
  StoreConnection(
      const StoreEndpoint& endpoint, std::chrono::milliseconds timeout,
      const Waiting& waiting = [](const std::string&) {})
      : name_(detail::formatted("{}:{}", endpoint.host, endpoint.port)) {
    retry_at(
        endpoint.text(), timeout,
        [&](Clock::time_point until) {
          auto attempt = try_connect(endpoint.host, endpoint.port, end_of_attempt(until), endpoint.origin);
          if (!attempt.fd.open()) return attempt.reason;
          fd_ = std::move(attempt.fd);
          return greet(endpoint, until, waiting);
        },
        waiting, endpoint.remedy);
    getpeername(fd_.get(), peer_.get(), &peer_.length);
    getsockname(fd_.get(), own_.get(), &own_.length);
  }

  /// Returns the numeric address of each end.
  [[nodiscard]] std::string server_address() const { return peer_.text(); }
  [[nodiscard]] std::string own_address() const { return own_.text(); }
  [[nodiscard]] bool within_host() const { return peer_.loopback() || peer_.text() == own_.text(); }

  /// Sends a request whose arguments `fill` writes. Returns the result in its reply. Throws StoreTimeout at
  /// `until`, StoreLost and StoreRefusal.
  template <class Fill>
  std::string request(StoreOperation operation, Clock::time_point until, Fill fill) {
    const Turn turn(*this, until);
    if (!lost_.empty()) throw StoreLost(lost_);
    FrameWriter frame;
    const auto id = next_id_++;
    frame.integer(id).byte(static_cast<std::uint8_t>(operation));
    fill(frame);
    if (frame.payload() > max_frame_bytes)
      throw StoreRefusal(detail::formatted("a message of {} bytes to the store is too large: {} are allowed",
                                           frame.payload(), max_frame_bytes));
    if (out_.size() > max_frame_bytes) throw_late();  // requests abandoned before they were sent
    out_ += frame.take();
    for (;;) {
      send_pending();
      const short events = static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT);
      if (!poll_until(fd_.get(), events, until)) throw_late();
      receive();
      while (const auto payload = next_reply()) {
        FrameReader reader(*payload);
        if (reader.integer() != id) continue;
        const auto status = static_cast<StoreStatus>(reader.byte());
        std::string result(payload->substr(std::min<std::size_t>(payload->size(), 9)));
        if (status == StoreStatus::done) return result;
        throw StoreRefusal(detail::formatted("the store at {} refuses: {}", name_, printable(result)));
      }
    }
  }

  /// Sends a request without waiting for room or for its reply. Call it last: no other thread may use the
  /// connection.
  template <class Fill>
  void send_last(StoreOperation operation, Fill fill) noexcept try {
    if (!lost_.empty()) return;
    FrameWriter frame;
    frame.integer(next_id_++).byte(static_cast<std::uint8_t>(operation));
    fill(frame);
    out_ += frame.take();
    send_pending();
  } catch (const std::exception&) {  // the connection is lost, or there is no memory
  }

 private:
  /// Exclusive use of the connection by one thread.
  class Turn {
   public:
    Turn(StoreConnection& connection, Clock::time_point until) : connection_(connection) {
      std::unique_lock lock(connection_.mutex_);
      if (!connection_.freed_.wait_until(lock, until, [&] { return !connection_.busy_; }))
        connection_.throw_late();
      connection_.busy_ = true;
    }
    ~Turn() {
      const std::lock_guard lock(connection_.mutex_);
      connection_.busy_ = false;
      connection_.freed_.notify_one();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    StoreConnection& connection_;
  };

  // Exchanges the hello. Returns an empty string if the server accepts this client, the reason if it closes
  // the connection or does not answer. Throws RendezvousError on a wrong secret or version.
  std::string greet(const StoreEndpoint& endpoint, Clock::time_point until, const Waiting& waiting) {
    std::string hello = FrameWriter().raw(store_magic).raw(endpoint.secret).take();
    if (::send(fd_.get(), hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size()))
      return "it closes the connection";
    std::string answer;
    const std::size_t expected = 4 + store_magic.size() + 1;
    while (answer.size() < expected) {
      if (!poll_until(fd_.get(), POLLIN, std::min(until, Clock::now() + std::chrono::seconds(1)))) {
        const std::string silence = "something listens there, but does not answer as a store of lockstep";
        if (Clock::now() >= until) return silence;
        waiting(silence);
        continue;
      }
      char buffer[64];
      const ssize_t length = recv(fd_.get(), buffer, expected - answer.size(), 0);
      if (length < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (length <= 0) return "it closes the connection without an answer: is it a store of lockstep?";
      answer.append(buffer, static_cast<std::size_t>(length));
      check_is_store(answer, endpoint);
    }
    switch (static_cast<StoreGreeting>(answer.back())) {
      case StoreGreeting::welcome:
        return {};
      case StoreGreeting::wrong_secret:
        throw RendezvousError(detail::formatted(
            "the store at {} belongs to another run (its secret differs): give every run a port of its "
            "own, and all ranks of a run the same LOCKSTEP_STORE_SECRET or none",
            endpoint.text()));
      case StoreGreeting::wrong_version:
        break;
    }
    throw_wrong_version();
  }

  [[noreturn]] void throw_wrong_version() const {
    throw RendezvousError(detail::formatted(
        "the store at {} is of another version of lockstep: build all ranks with one", name_));
  }
  void check_is_store(std::string_view answer, const StoreEndpoint& endpoint) const {
    const auto begins_alike = [](std::string_view a, std::string_view b) {
      const auto length = std::min(a.size(), b.size());
      return a.substr(0, length) == b.substr(0, length);
    };
    const auto text = answer.substr(std::min<std::size_t>(answer.size(), 4));
    if (!begins_alike(text, store_magic_of_any_version) || (answer.size() > 1 && answer[1] != '\0'))
      throw RendezvousError(
          detail::formatted("what listens at {} is not a store of lockstep: {} a free port of the master "
                            "host, the same on every rank",
                            endpoint.text(), endpoint.origin.set_port));
    if (!begins_alike(text, store_magic)) throw_wrong_version();
  }

  void send_pending() {
    std::size_t sent = 0;
    while (sent < out_.size()) {
      const ssize_t length =
          ::send(fd_.get(), out_.data() + sent, out_.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (length > 0)
        sent += static_cast<std::size_t>(length);
      else if (errno == EAGAIN || errno == EWOULDBLOCK)
        break;
      else if (errno != EINTR)
        lose(std::strerror(errno));
    }
    out_.erase(0, sent);
  }

  void receive() {
    char buffer[1 << 16];
    for (;;) {
      const ssize_t length = recv(fd_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (length > 0) in_.append({buffer, static_cast<std::size_t>(length)});
      if (length == 0) lose("its host has closed the connection");
      if (length < 0 && errno == EINTR) continue;
      if (length < 0 && errno != EAGAIN && errno != EWOULDBLOCK) lose(std::strerror(errno));
      if (length < static_cast<ssize_t>(sizeof buffer)) return;
    }
  }

  std::optional<std::string_view> next_reply() {
    const auto length = in_.next_length();
    if (length && *length > max_frame_bytes) lose("it sends what is no reply");
    return in_.next();
  }

  [[noreturn]] void lose(const std::string& reason) {
    lost_ = detail::formatted("the store at {} is gone: {}", name_, reason);
    throw StoreLost(lost_);
  }
  [[noreturn]] void throw_late() const {
    throw StoreTimeout(detail::formatted("the store at {} does not answer in time", name_));
  }

  std::string name_;
  Descriptor fd_;
  SocketAddress peer_, own_;
  std::mutex mutex_;
  std::condition_variable freed_;
  bool busy_ = false;
  // Used by the thread that has the Turn:
  std::uint64_t next_id_ = 0;
  std::string out_;
  FrameBuffer in_;
  std::string lost_;
};

}  // namespace lockstep::detail
