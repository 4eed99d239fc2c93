#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

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

/// A request to the store has failed.
struct StoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The store did not answer in time. The connection stays usable.
struct StoreTimeout : StoreError {
  using StoreError::StoreError;
};
/// The store refused the request.
struct StoreRefusal : StoreError {
  using StoreError::StoreError;
};
/// The connection to the store has ended.
struct StoreLost : StoreError {
  using StoreError::StoreError;
};

/// A client's connection to a StoreServer. Thread-safe: several threads may wait for their replies at once. One of them
/// reads from the connection for all.
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

  ~StoreConnection() {
    if (joined_ && getpid() == owner_) post(StoreOperation::leave, [](FrameWriter&) {});
  }
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  /// The destructor tells the server that the end of this connection is not that of its rank.
  void leave_at_end() { joined_ = true; }

  /// Returns the numeric address of this end.
  [[nodiscard]] std::string own_address() const { return own_.text(); }
  [[nodiscard]] bool within_host() const { return peer_.loopback() || peer_.text() == own_.text(); }

  /// Keeps `hosted`, such as the server, alive as long as this connection.
  void keep(std::shared_ptr<void> hosted) { hosted_ = std::move(hosted); }

  /// Sends a request whose arguments `fill` writes. Returns the result in its reply. Throws StoreTimeout at `until`, or
  /// once `over` returns true (see wake), StoreLost and StoreRefusal.
  template <class Fill>
  std::string request(StoreOperation operation, Clock::time_point until, Fill fill,
                      const std::function<bool()>& over = nullptr) {
    std::unique_lock lock(mutex_);
    Reply reply;
    const auto id = write(operation, fill);
    replies_[id] = &reply;
    const auto come = [&] { return reply.status.has_value(); };
    try {
      wait(lock, until, [&] { return come() || (over && over()); });
    } catch (...) {
      replies_.erase(id);
      throw;
    }
    replies_.erase(id);
    if (!come()) {
      write(StoreOperation::cancel, [&](FrameWriter& out) { out.integer(id); });
      throw StoreTimeout(detail::formatted("the store at {} does not answer in time", name_));
    }
    if (*reply.status == StoreStatus::done) return std::move(reply.result);
    throw StoreRefusal(detail::formatted("the store at {} refuses: {}", name_, printable(reply.result)));
  }

  /// Sends a request that has no reply. Does not block. No-op if the connection is lost.
  template <class Fill>
  void post(StoreOperation operation, Fill fill) noexcept try {
    const std::lock_guard lock(mutex_);
    write(operation, fill);
  } catch (const std::exception&) {  // lost, or there is no memory
  }

  /// Hands what the server pushes to `take`, on this thread, until `over` returns true (see wake) or at `until`. Throws
  /// StoreLost.
  void serve(const std::function<void(StorePush kind, FrameReader& content)>& take, Clock::time_point until,
             const std::function<bool()>& over) {
    std::unique_lock lock(mutex_);
    for (;;) {
      wait(lock, until, [&] { return !pushes_.empty() || over(); });
      if (pushes_.empty()) return;
      const std::string payload = std::move(pushes_.front());
      pushes_.pop_front();
      lock.unlock();
      FrameReader content(payload);
      const auto kind = static_cast<StorePush>(content.byte());
      take(kind, content);
      lock.lock();
    }
  }

  /// Makes each waiting thread call its `over`.
  void wake() {
    const std::uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof one) < 0) {
    }
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  struct Reply {
    std::optional<StoreStatus> status;
    std::string result;
  };

  // Writes a request, and sends as much as there is room for. Returns its id.
  template <class Fill>
  std::uint64_t write(StoreOperation operation, Fill fill) {
    if (!lost_.empty()) throw StoreLost(lost_);
    FrameWriter frame;
    const auto id = next_id_++;
    frame.integer(id).byte(static_cast<std::uint8_t>(operation));
    fill(frame);
    if (frame.payload().size() > max_frame_bytes)
      throw StoreRefusal(detail::formatted("a message of {} bytes to the store is too large: {} are allowed",
                                           frame.payload().size(), max_frame_bytes));
    if (out_.size() > max_frame_bytes)  // requests abandoned before they were sent
      throw StoreTimeout(detail::formatted("the store at {} does not answer in time", name_));
    out_ += frame.take();
    send_pending();
    return id;
  }

  // Blocks until `done` returns true, at most until `until`. One of the waiting threads reads for all of them.
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, Clock::time_point until, Done done) {
    while (!done() && Clock::now() < until) {
      if (!lost_.empty()) throw StoreLost(lost_);
      if (reading_) {
        changed_.wait_until(lock, until);
        continue;
      }
      reading_ = true;
      pollfd polled[] = {{fd_.get(), static_cast<short>(out_.empty() ? POLLIN : POLLIN | POLLOUT), 0},
                         {wake_.get(), POLLIN, 0}};
      // A thread that writes meanwhile may leave bytes for this one to send.
      const auto left = std::min<Clock::duration>(until - Clock::now(), std::chrono::milliseconds(100));
      lock.unlock();
      const auto most = std::chrono::ceil<std::chrono::milliseconds>(left).count();
      poll(polled, 2, std::max(0, static_cast<int>(most)));  // a negative one would have no end
      std::uint64_t count = 0;
      if ((polled[1].revents & POLLIN) && read(wake_.get(), &count, sizeof count) < 0) {
      }
      lock.lock();
      reading_ = false;
      changed_.notify_all();
      send_pending();
      const std::string end = receive();
      while (const auto payload = next_reply()) {
        FrameReader reader(*payload);
        const auto id = reader.integer();
        if (id == push_id) {
          pushes_.emplace_back(payload->substr(8));
        } else if (const auto found = replies_.find(id); found != replies_.end()) {
          found->second->status = static_cast<StoreStatus>(reader.byte());
          found->second->result = payload->substr(std::min<std::size_t>(payload->size(), 9));
        }
      }
      if (!end.empty() && !done()) lose(end);
    }
  }

  // Exchanges the hello. Returns an empty string if the server accepts this client, the reason if it closes
  // the connection or does not answer. Throws RendezvousError on a wrong secret or version.
  std::string greet(const StoreEndpoint& endpoint, Clock::time_point until, const Waiting& waiting) {
    std::string hello = FrameWriter().raw(store_magic).raw(endpoint.secret).take();
    if (::send(fd_.get(), hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size()))
      return "it closes the connection";
    std::string answer;
    const std::size_t expected = 4 + store_magic.size() + 1;
    while (answer.size() < expected) {
      if (!poll_until(fd_.get(), POLLIN, std::min(until, Clock::now() + greeting_timeout))) {
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
        sent = out_.size();  // what has been received comes before the end of the connection
    }
    out_.erase(0, sent);
  }

  // Reads what there is. Returns why the connection has ended, empty if it has not.
  std::string receive() {
    char buffer[1 << 16];
    for (;;) {
      const ssize_t length = recv(fd_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (length > 0) in_.append({buffer, static_cast<std::size_t>(length)});
      if (length == 0) return "its host has closed the connection";
      if (length < 0 && errno == EINTR) continue;
      if (length < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return std::strerror(errno);
      if (length < static_cast<ssize_t>(sizeof buffer)) return {};
    }
  }

  std::optional<std::string_view> next_reply() {
    const auto length = in_.next_length();
    if (length && *length > max_frame_bytes) lose("it sends what is no reply");
    return in_.next();
  }

  [[noreturn]] void lose(const std::string& reason) {
    lost_ = detail::formatted("the store at {} is gone: {}", name_, reason);
    changed_.notify_all();
    throw StoreLost(lost_);
  }
  std::string name_;
  Descriptor fd_;
  const Descriptor wake_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  SocketAddress peer_, own_;
  std::shared_ptr<void> hosted_;
  const pid_t owner_ = getpid();
  std::atomic<bool> joined_{false};  // as a rank
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reading_ = false;  // a thread waits for bytes
  std::uint64_t next_id_ = 0;
  std::map<std::uint64_t, Reply*> replies_;  // that threads wait for
  std::deque<std::string> pushes_;
  std::string out_;
  FrameBuffer in_;
  std::string lost_;
};

}  // namespace lockstep::detail
