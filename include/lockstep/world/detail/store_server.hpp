#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/run_state.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::detail {

/// The server of lockstep's key-value store: one thread that never blocks on a client.
///
/// The server disconnects a client that has not sent a valid hello within `hello_timeout`, and the oldest such client
/// if more than `max_strangers` are connected. It parks a request that waits for keys and answers it when the last key
/// is set. No bytes from a client can end or stall the server: a malformed frame closes its connection.
///
/// The requests about the run, and what is pushed to ranks, are RunState's.
class StoreServer {
 public:
  static constexpr std::size_t max_strangers = 256;
  static constexpr std::size_t max_pushed_bytes = 16 << 20;

  /// Serves on a socket that already listens. Accepts only clients that know `secret`. Throws Error if the
  /// system grants no descriptor or thread.
  StoreServer(Listener listener, std::string secret, Milliseconds hello_timeout = detail::hello_timeout,
              Milliseconds end_grace = detail::end_grace)
      : listener_(std::move(listener)),
        secret_(std::move(secret)),
        hello_timeout_(hello_timeout),
        run_(end_grace),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        reserve_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {
    if (!epoll_.open() || !wake_.open())
      throw Error(detail::formatted("cannot serve a store: {}", std::strerror(errno)));
    fcntl(listener_.fd.get(), F_SETFL, O_NONBLOCK);
    watch(listener_.fd.get(), listener_id);
    watch(wake_.get(), wake_id);
    // Block all signals: the program's threads handle them, never the server's.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw Error(detail::formatted("cannot serve a store: {}", error.what()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  /// Closes every connection. Does not wait for any client.
  ~StoreServer() {
    const bool runs_here = getpid() == owner_;  // the thread, and not in the parent of this process
    const std::uint64_t one = 1;
    if (runs_here && write(wake_.get(), &one, sizeof one) < 0) {
    }
    runs_here ? thread_.join() : thread_.detach();
  }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  [[nodiscard]] int port() const { return listener_.port; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::uint64_t listener_id = 0, wake_id = 1;

  /// A request of a connection that waits for keys.
  struct Parked {
    std::uint64_t connection = 0, id = 0;
    StoreOperation operation = StoreOperation::wait;
    std::vector<std::string> keys;
  };

  struct Connection {
    std::uint64_t number = 0;
    Descriptor fd;
    FrameBuffer in;
    std::string out;
    std::size_t sent = 0;  // bytes of `out` already sent
    std::uint32_t interest = 0;
    bool greeted = false;
    bool closing = false;  // close once `out` is sent
  };

  struct Stranger {
    std::uint64_t number;
    Clock::time_point until;
  };

  void run() {
    for (;;) {
      epoll_event events[64];
      const int count = epoll_wait(epoll_.get(), events, 64, time_to_next_deadline());
      for (int i = 0; i < count; ++i) {
        const auto number = events[i].data.u64;
        if (number == wake_id) return;
        if (number == listener_id) {
          accept_some();
        } else if (const auto found = connections_.find(number); found != connections_.end()) {
          serve(*found->second, events[i].events);
        }
      }
      while (!strangers_.empty() && strangers_.front().until <= Clock::now()) drop_first_stranger();
      run_.tick(Clock::now());
      deliver();
      for (const auto number : dropped_) connections_.erase(number);
      dropped_.clear();
    }
  }

  void watch(int fd, std::uint64_t number) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = number;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  [[nodiscard]] int time_to_next_deadline() const {
    auto next = run_.next();
    if (!strangers_.empty()) next = std::min(next, strangers_.front().until);
    if (next == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60000));
  }

  // Accepts a few at a time, so that the hellos of accepted clients are handled in between.
  void accept_some() {
    for (int i = 0; i < 32; ++i) {
      const int fd = accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
        make_descriptor_free();
        return;
      }
      if (fd < 0) return;
      auto connection = std::make_unique<Connection>();
      connection->number = next_number_++;
      connection->fd = Descriptor(fd);
      connection->interest = EPOLLIN;
      tune_connection(fd);
      watch(fd, connection->number);
      strangers_.push_back({connection->number, Clock::now() + hello_timeout_});
      connections_.emplace(connection->number, std::move(connection));
      forget_greeted();
      if (strangers_.size() > max_strangers) drop_first_stranger();
    }
  }

  // Out of descriptors, the listener would stay ready and its queue would never shrink.
  void make_descriptor_free() {
    forget_greeted();
    if (!strangers_.empty()) {
      drop_first_stranger();
      return;
    }
    reserve_.close();
    const Descriptor refused(accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    reserve_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }

  void forget_greeted() {
    std::erase_if(strangers_, [&](const Stranger& stranger) {
      const auto found = connections_.find(stranger.number);
      return found == connections_.end() || !found->second->fd.open() || found->second->greeted;
    });
  }
  void drop_first_stranger() {
    const auto found = connections_.find(strangers_.front().number);
    strangers_.pop_front();
    if (found != connections_.end() && !found->second->greeted) drop(*found->second);
  }

  // Frees the connection at the end of the loop's turn: callers may still use it.
  void drop(Connection& connection) {
    if (!connection.fd.open()) return;
    for (auto& [key, parked] : waiting_)
      std::erase_if(parked, [&](const Parked& one) { return one.connection == connection.number; });
    std::erase_if(waiting_, [](const auto& known) { return known.second.empty(); });
    run_.close(connection.number, Clock::now());
    connection.fd.close();
    dropped_.push_back(connection.number);
  }

  // Sends what the run has to say.
  void deliver() {
    for (auto frames = run_.take_outgoing(); !frames.empty(); frames = run_.take_outgoing())
      for (const auto& [to, frame] : frames)
        for (const auto number : to) {
          const auto found = connections_.find(number);
          if (found == connections_.end() || !found->second->fd.open()) continue;
          Connection& connection = *found->second;
          if (connection.out.size() - connection.sent > max_frame_bytes + max_pushed_bytes) {
            drop(connection);  // it does not read
          } else {
            send(connection, frame);
            update_interest(connection);
          }
        }
  }

  void serve(Connection& connection, std::uint32_t events) {
    if (!connection.fd.open()) return;
    bool open = true;
    if (events & EPOLLIN) open = receive(connection);
    if (events & EPOLLOUT) send_pending(connection);
    handle_frames(connection);
    if (!open || (events & (EPOLLERR | EPOLLHUP))) drop(connection);
    update_interest(connection);
  }

  // Reads the available bytes, up to a limit per turn. Returns false if the client has closed.
  bool receive(Connection& connection) {
    char buffer[1 << 16];
    for (int turn = 0; turn < 16; ++turn) {
      const ssize_t length = recv(connection.fd.get(), buffer, sizeof buffer, 0);
      if (length > 0) connection.in.append({buffer, static_cast<std::size_t>(length)});
      if (length == 0) return false;
      if (length < 0 && errno == EINTR) continue;
      if (length < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      if (static_cast<std::size_t>(length) < sizeof buffer) return true;
    }
    return true;
  }

  // Handles no further requests of a client that does not read its replies.
  void handle_frames(Connection& connection) {
    while (connection.fd.open() && !connection.closing && connection.out.empty()) {
      const auto length = connection.in.next_length();
      if (length && *length > (connection.greeted ? max_frame_bytes : store_magic.size() + max_secret_bytes))
        return drop(connection);
      const auto payload = connection.in.next();
      if (!payload) return;
      if (connection.greeted)
        handle_request(connection, *payload);
      else
        handle_hello(connection, *payload);
    }
  }

  void handle_hello(Connection& connection, std::string_view payload) {
    if (!payload.starts_with(store_magic_of_any_version)) return drop(connection);
    auto greeting = StoreGreeting::welcome;
    if (!payload.starts_with(store_magic))
      greeting = StoreGreeting::wrong_version;
    else if (!same_secret(payload.substr(store_magic.size())))
      greeting = StoreGreeting::wrong_secret;
    connection.greeted = greeting == StoreGreeting::welcome;
    if (!connection.greeted) note_refusal(connection, greeting);
    connection.closing = !connection.greeted;
    send(connection, FrameWriter().raw(store_magic).byte(static_cast<std::uint8_t>(greeting)).take());
  }

  void note_refusal(const Connection& connection, StoreGreeting greeting) {
    SocketAddress peer;
    getpeername(connection.fd.get(), peer.get(), &peer.length);
    run_.note_stranger(
        detail::formatted("a process at {} was refused because {}", peer.text(),
                          greeting == StoreGreeting::wrong_secret
                              ? "its LOCKSTEP_STORE_SECRET differs: give all ranks of a run one, or none"
                              : "its version of lockstep differs: build all ranks with one"));
  }

  // Compares in constant time, so that the time does not reveal a partial match.
  [[nodiscard]] bool same_secret(std::string_view given) const {
    unsigned difference = given.size() == secret_.size() ? 0 : 1;
    for (std::size_t i = 0; i < std::min(given.size(), secret_.size()); ++i)
      difference |= static_cast<unsigned char>(given[i] ^ secret_[i]);
    return difference == 0;
  }

  void handle_request(Connection& connection, std::string_view payload) {
    FrameReader reader(payload);
    const auto id = reader.integer();
    const auto operation = static_cast<StoreOperation>(reader.byte());
    switch (operation) {
      case StoreOperation::set: {
        auto keys = reader.texts(), values = reader.texts();
        if (!reader.whole() || keys.size() != values.size()) return drop(connection);
        std::size_t together = 0;  // of the values before
        for (std::size_t i = 0; i < keys.size(); ++i) {
          if (const auto problem = refusal(keys[i], values[i].size(), together); !problem.empty())
            return refuse(connection, id, problem);
          together += entry_bytes(keys[i], values[i].size());
        }
        for (std::size_t i = 0; i < keys.size(); ++i) put(keys[i], std::move(values[i]));
        reply(connection, id);
        for (const std::string& key : keys) wake_waiting(key);
        return;
      }
      case StoreOperation::get:
      case StoreOperation::wait: {
        Parked request{connection.number, id, operation, reader.texts()};
        if (!reader.whole()) return drop(connection);
        return answer_or_park(connection, std::move(request));
      }
      case StoreOperation::check: {
        const auto keys = reader.texts();
        if (!reader.whole()) return drop(connection);
        const bool all =
            std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return values_.contains(key); });
        return reply(connection, id, [&](FrameWriter& out) { out.byte(all ? 1 : 0); });
      }
      case StoreOperation::add: {
        const std::string key(reader.text());
        const auto amount = static_cast<std::int64_t>(reader.integer());
        if (!reader.whole()) return drop(connection);
        return add(connection, id, key, amount);
      }
      case StoreOperation::compare_set: {
        const std::string key(reader.text()), expected(reader.text());
        std::string desired(reader.text());
        if (!reader.whole()) return drop(connection);
        return compare_set(connection, id, key, expected, std::move(desired));
      }
      case StoreOperation::erase: {
        const std::string key(reader.text());
        if (!reader.whole()) return drop(connection);
        const auto found = values_.find(key);
        const bool erased = found != values_.end();
        if (erased) {
          bytes_ -= entry_bytes(key, found->second.size());
          values_.erase(found);
        }
        return reply(connection, id, [&](FrameWriter& out) { out.byte(erased ? 1 : 0); });
      }
      case StoreOperation::append: {
        const std::string key(reader.text()), tail(reader.text());
        if (!reader.whole()) return drop(connection);
        const auto found = values_.find(key);
        if (const auto problem = put(key, (found == values_.end() ? std::string() : found->second) + tail);
            !problem.empty())
          return refuse(connection, id, problem);
        reply(connection, id);
        return wake_waiting(key);
      }
      case StoreOperation::cancel: {
        const auto cancelled = reader.integer();
        if (!reader.whole()) return drop(connection);
        for (auto& [key, parked] : waiting_)
          std::erase_if(parked, [&](const Parked& one) {
            return one.connection == connection.number && one.id == cancelled;
          });
        std::erase_if(waiting_, [](const auto& known) { return known.second.empty(); });
        return run_.cancel(connection.number, cancelled);
      }
      default:
        if (!run_.serve(connection.number, id, operation, reader, Clock::now())) drop(connection);
    }
  }

  void add(Connection& connection, std::uint64_t id, const std::string& key, std::int64_t amount) {
    std::int64_t sum = 0;
    std::string problem;
    if (const auto found = values_.find(key); found != values_.end()) {
      const char* const end = found->second.data() + found->second.size();
      const auto [stop, error] = std::from_chars(found->second.data(), end, sum);
      if (error != std::errc{} || stop != end || found->second.empty())
        problem = "the value is not an integer that can be added to";
    }
    if (problem.empty() && __builtin_add_overflow(sum, amount, &sum))
      problem = "the sum would not fit in 64 bits";
    if (problem.empty()) problem = put(key, std::to_string(sum));
    if (!problem.empty()) return refuse(connection, id, problem);
    reply(connection, id, [&](FrameWriter& out) { out.integer(static_cast<std::uint64_t>(sum)); });
    wake_waiting(key);
  }

  void compare_set(Connection& connection, std::uint64_t id, const std::string& key,
                   const std::string& expected, std::string desired) {
    const auto found = values_.find(key);
    const bool missing = found == values_.end();
    if (missing ? expected.empty() : found->second == expected) {
      if (const auto problem = put(key, desired); !problem.empty()) return refuse(connection, id, problem);
      reply(connection, id, [&](FrameWriter& out) { out.raw(desired); });
      wake_waiting(key);
    } else {
      reply(connection, id, [&](FrameWriter& out) { out.raw(missing ? expected : found->second); });
    }
  }

  // The memory of a key with a value: that of its node and its place in the table, too.
  static std::size_t entry_bytes(const std::string& key, std::size_t value) {
    return key.size() + value + 128;
  }
  [[nodiscard]] std::size_t bytes_of(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() ? 0 : entry_bytes(key, found->second.size());
  }
  // Returns why a value of this size must not be set beside others that take `together` bytes; empty if it may be.
  [[nodiscard]] std::string refusal(const std::string& key, std::size_t value,
                                    std::size_t together = 0) const {
    if (key.size() > max_key_bytes)
      return detail::formatted("a key may have {} bytes, this one has {}", max_key_bytes, key.size());
    if (value > max_frame_bytes - 64 ||
        bytes_ - bytes_of(key) + together + entry_bytes(key, value) > max_store_bytes)
      return detail::formatted("the value of {} bytes is too large", value);
    return {};
  }
  // Sets a value. Returns the reason if it must not be set.
  std::string put(const std::string& key, std::string value) {
    std::string problem = refusal(key, value.size());
    if (!problem.empty()) return problem;
    bytes_ += entry_bytes(key, value.size()) - bytes_of(key);
    values_.insert_or_assign(key, std::move(value));
    return problem;
  }

  void answer_or_park(Connection& connection, Parked request) {
    for (const std::string& key : request.keys)
      if (!values_.contains(key)) {
        waiting_[key].push_back(std::move(request));
        return;
      }
    if (request.operation == StoreOperation::wait) return reply(connection, request.id);
    std::size_t total = 0;
    for (const std::string& key : request.keys) total += values_[key].size() + 4;
    if (total > max_frame_bytes - 64)
      return refuse(connection, request.id, detail::formatted("the values have {} bytes together", total));
    reply(connection, request.id, [&](FrameWriter& out) {
      for (const std::string& key : request.keys) out.text(values_[key]);
    });
  }

  void wake_waiting(const std::string& key) {
    auto waiting = waiting_.extract(key);
    if (waiting.empty()) return;
    for (Parked& request : waiting.mapped()) {
      const auto found = connections_.find(request.connection);
      if (found == connections_.end()) continue;
      answer_or_park(*found->second, std::move(request));
      update_interest(*found->second);
    }
  }

  void reply(Connection& connection, std::uint64_t id) {
    reply(connection, id, [](FrameWriter&) {});
  }
  template <class Fill>
  void reply(Connection& connection, std::uint64_t id, Fill fill) {
    FrameWriter frame;
    frame.integer(id).byte(static_cast<std::uint8_t>(StoreStatus::done));
    fill(frame);
    send(connection, frame.take());
  }
  void refuse(Connection& connection, std::uint64_t id, std::string_view reason) {
    send(connection,
         FrameWriter().integer(id).byte(static_cast<std::uint8_t>(StoreStatus::refused)).raw(reason).take());
  }

  void send(Connection& connection, const std::string& frame) {
    connection.out += frame;
    send_pending(connection);
  }

  void send_pending(Connection& connection) {
    while (connection.fd.open() && connection.sent < connection.out.size()) {
      const ssize_t length = ::send(connection.fd.get(), connection.out.data() + connection.sent,
                                    connection.out.size() - connection.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (length > 0) {
        connection.sent += static_cast<std::size_t>(length);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return;
      } else if (errno != EINTR) {
        return drop(connection);
      }
    }
    connection.out.clear();
    connection.sent = 0;
    if (connection.closing) drop(connection);
  }

  void update_interest(Connection& connection) {
    if (!connection.fd.open()) return;
    const std::uint32_t wanted = connection.out.empty() ? EPOLLIN : EPOLLOUT;
    if (wanted == connection.interest) return;
    epoll_event event{};
    event.events = connection.interest = wanted;
    event.data.u64 = connection.number;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
  }

  Listener listener_;
  const std::string secret_;
  const std::chrono::milliseconds hello_timeout_;
  RunState run_;
  Descriptor epoll_, wake_, reserve_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::deque<Stranger> strangers_;  // by age; some may have been greeted since
  std::vector<std::uint64_t> dropped_;
  std::uint64_t next_number_ = 2;
  std::unordered_map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::unordered_map<std::string, std::vector<Parked>> waiting_;  // by their first missing key
  std::thread thread_;
  const pid_t owner_ = getpid();
};

}  // namespace lockstep::detail
