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
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
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

namespace lockstep::inline v0_1::detail {

/// The server of lockstep's key-value store: one thread that never blocks on a client.
///
/// The server disconnects a client that has not sent a valid hello within `hello_timeout`, and the oldest such client if more
/// than `max_strangers` are connected. It parks a request that waits for keys and answers it when the last key is set. A
/// malformed frame closes its connection. A client without the secret cannot end or stall the server, or take more memory than
/// its hello; one with it is a rank, and trusted: the number of its requests that wait has no limit.
///
/// The requests about the run, and what is pushed to ranks, are RunState's.
class StoreServer {
 public:
  static constexpr std::size_t max_strangers = 256;
  static constexpr std::size_t max_pushed_bytes = 16 << 20;

  /// Serves on a socket that already listens. Accepts only clients that know `secret`, and are of the generation that has
  /// `began`. Throws Error if the system grants no descriptor or thread.
  StoreServer(Listener listener, std::string secret, Milliseconds hello_timeout = detail::hello_timeout,
              Milliseconds end_grace = detail::end_grace, const Event& began = {})
      : listener_(std::move(listener)),
        secret_(std::move(secret)),
        restart_(began.restart),
        hello_timeout_(hello_timeout),
        run_(end_grace, listener_.doubt, began),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        reserve_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {
    std::string fault = epoll_.open() && wake_.open() ? "" : std::strerror(errno);
    fcntl(listener_.fd.get(), F_SETFL, O_NONBLOCK);
    watch(EPOLL_CTL_ADD, listener_.fd.get(), listener_id, EPOLLIN);
    watch(EPOLL_CTL_ADD, wake_.get(), wake_id, EPOLLIN);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the program's threads handle signals, never the server's
    try {
      if (fault.empty()) thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      fault = error.what();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!fault.empty()) throw Error(formatted("cannot serve a store: {}", fault));
  }

  /// Closes every connection. Does not wait for any client.
  ~StoreServer() {
    const bool runs_here = getpid() == owner_;  // the thread, and not in the parent of this process
    if (runs_here) eventfd_write(wake_.get(), 1);
    runs_here ? thread_.join() : thread_.detach();
  }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  [[nodiscard]] int port() const { return listener_.port; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::uint64_t listener_id = 0, wake_id = 1;
  static constexpr const char* full = "the store is full";

  /// A request of a connection that waits for keys.
  struct Parked {
    std::uint64_t connection = 0, id = 0;
    StoreOperation operation = StoreOperation::wait;
    std::vector<std::string> keys;
  };

  struct Connection {
    std::uint64_t number = 0;
    FrameSocket socket = {};
    std::uint32_t interest = EPOLLIN;
    enum { unknown, greeted, refused } state = unknown;  // refused: close once `out` is sent
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
          serve(found->second, events[i].events);
        }
      }
      while (!strangers_.empty() && strangers_.begin()->second <= Clock::now()) drop_first_stranger();
      run_.tick(Clock::now());
      deliver();
      for (const auto number : dropped_) connections_.erase(number);
      dropped_.clear();
    }
  }

  void watch(int operation, int fd, std::uint64_t number, std::uint32_t interest) {
    epoll_event event{};
    event.events = interest;
    event.data.u64 = number;
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  [[nodiscard]] int time_to_next_deadline() const {
    auto next = run_.next();
    if (!strangers_.empty()) next = std::min(next, strangers_.begin()->second);
    if (next == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<Milliseconds>(next - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60000));
  }

  // Accepts a few at a time, so that the hellos of accepted clients are handled in between.
  void accept_some() {
    for (int i = 0; i < 32; ++i) {
      const int fd = accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
        return make_descriptor_free();
      if (fd < 0) return;
      const auto number = next_number_++;
      connections_.emplace(number, Connection{number, {Descriptor(fd)}});
      strangers_.emplace(number, Clock::now() + hello_timeout_);
      tune_connection(fd);
      watch(EPOLL_CTL_ADD, fd, number, EPOLLIN);
      if (strangers_.size() > max_strangers) drop_first_stranger();
    }
  }

  // Out of descriptors, the listener would stay ready and its queue would never shrink.
  void make_descriptor_free() {
    if (!strangers_.empty()) return drop_first_stranger();
    reserve_.close();
    const Descriptor refused(accept4(listener_.fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    reserve_ = Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }

  void drop_first_stranger() { drop(connections_.at(strangers_.begin()->first)); }

  // Frees the connection at the end of the loop's turn: callers may still use it.
  void drop(Connection& connection) {
    if (!connection.socket.fd.open()) return;
    strangers_.erase(connection.number);
    forget([&](const Parked& one) { return one.connection == connection.number; });
    run_.close(connection.number, Clock::now());
    connection.socket.fd.close();
    dropped_.push_back(connection.number);
  }

  // Forgets the parked requests for which `is` returns true.
  template <class Is>
  void forget(Is is) {
    for (auto& [key, parked] : waiting_) std::erase_if(parked, is);
    std::erase_if(waiting_, [](const auto& known) { return known.second.empty(); });
  }

  // Sends what the run pushes. Drops a client that does not read.
  void deliver() {
    for (auto frames = run_.take_outgoing(); !frames.empty(); frames = run_.take_outgoing())
      for (const auto& [to, frame] : frames)
        for (const auto number : to) {
          const auto found = connections_.find(number);
          if (found == connections_.end()) continue;
          Connection& connection = found->second;
          if (connection.socket.to_send() > max_frame_bytes + max_pushed_bytes)
            drop(connection);
          else
            send(connection, frame);
        }
  }

  void serve(Connection& connection, std::uint32_t events) {
    if (!connection.socket.fd.open()) return;
    const bool ended = (events & EPOLLIN) && !connection.socket.receive().empty();
    if (events & EPOLLOUT) send_pending(connection);
    handle_frames(connection);
    if (ended || (events & (EPOLLERR | EPOLLHUP))) drop(connection);
  }

  // Handles no further requests of a client that does not read its replies.
  void handle_frames(Connection& connection) {
    while (connection.socket.fd.open() && connection.state != Connection::refused &&
           connection.socket.out.empty()) {
      const bool greeted = connection.state == Connection::greeted;
      const auto length = connection.socket.next_length();
      if (length && *length > (greeted ? max_frame_bytes : store_magic.size() + 8 + max_secret_bytes))
        return drop(connection);
      const auto payload = connection.socket.next();
      if (!payload) return;
      greeted ? handle_request(connection, *payload) : handle_hello(connection, *payload);
    }
  }

  void handle_hello(Connection& connection, std::string_view payload) {
    if (!payload.starts_with(store_magic_of_any_version)) return drop(connection);
    const bool version = payload.starts_with(store_magic);
    FrameReader hello(payload.substr(version ? store_magic.size() : payload.size()));
    const auto restart = hello.value<std::int64_t>();
    const auto status =
        version && same_secret(hello.rest()) ? greeting(restart, restart_) : StoreStatus::refused;
    connection.state = status == StoreStatus::done ? Connection::greeted : Connection::refused;
    if (status == StoreStatus::done) {
      strangers_.erase(connection.number);
    } else if (status == StoreStatus::refused) {
      SocketAddress peer;
      getpeername(connection.socket.fd.get(), peer.get(), &peer.length);
      run_.note_stranger(formatted("a process at {} was refused because its {}", peer.text(),
                                   version
                                       ? "LOCKSTEP_STORE_SECRET differs: give all ranks of a run one, or none"
                                       : "version of lockstep differs: build all ranks with one"));
    }
    send(connection, FrameWriter().raw(store_magic).value(status).take());
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
    std::vector<std::string_view> keys, values;
    std::string_view key, expected, desired;
    std::int64_t amount = 0;
    const auto read = [&](auto&... arguments) {
      (reader.value(arguments), ...);
      return reader.whole();
    };
    switch (operation) {
      case StoreOperation::set:
        if (!read(keys, values) || keys.size() != values.size()) return drop(connection);
        if (!put(keys, values)) return refuse(connection, id, full);
        reply(connection, id, "");
        for (const auto one : keys) wake_waiting(one);
        return;
      case StoreOperation::get:
      case StoreOperation::wait:
        if (!read(keys)) return drop(connection);
        return answer_or_park(connection, {connection.number, id, operation, {keys.begin(), keys.end()}});
      case StoreOperation::check:
        if (!read(keys)) return drop(connection);
        return reply(
            connection, id,
            encoded(std::all_of(keys.begin(), keys.end(), [&](auto one) { return values_.contains(one); })));
      case StoreOperation::add:
        if (!read(key, amount)) return drop(connection);
        return add(connection, id, key, amount);
      case StoreOperation::compare_set: {
        if (!read(key, expected, desired)) return drop(connection);
        const auto found = values_.find(key);
        const bool missing = found == values_.end();
        if (missing ? expected.empty() : found->second == expected)
          return change(connection, id, key, desired, desired);
        return reply(connection, id, missing ? expected : found->second);
      }
      case StoreOperation::erase: {
        if (!read(key)) return drop(connection);
        const auto erased = values_.extract(std::string(key));
        if (!erased.empty()) bytes_ -= entry_bytes(key, erased.mapped());
        return reply(connection, id, encoded(!erased.empty()));
      }
      case StoreOperation::cancel: {
        const auto cancelled = reader.integer();
        if (!reader.whole()) return drop(connection);
        forget([&](const Parked& one) { return one.connection == connection.number && one.id == cancelled; });
        return run_.cancel(connection.number, cancelled);
      }
      default:
        if (!run_.serve(connection.number, id, operation, reader, Clock::now())) drop(connection);
        deliver();  // now, so that no more is read from a client that does not read its replies
    }
  }

  void add(Connection& connection, std::uint64_t id, std::string_view key, std::int64_t amount) {
    std::int64_t sum = 0;
    if (const auto found = values_.find(key); found != values_.end()) {
      const char* const end = found->second.data() + found->second.size();
      const auto [stop, error] = std::from_chars(found->second.data(), end, sum);
      if (error != std::errc{} || stop != end)
        return refuse(connection, id, "the value is not an integer that can be added to");
    }
    if (__builtin_add_overflow(sum, amount, &sum))
      return refuse(connection, id, "the sum would not fit in 64 bits");
    change(connection, id, key, std::to_string(sum), encoded(sum));
  }

  // The memory of a key with a value: that of its node and its place in the table, too.
  static std::size_t entry_bytes(std::string_view key, std::string_view value) {
    return key.size() + value.size() + 128;
  }
  // Sets all values, or none where there is no room for them beside those that they replace. Returns whether it has.
  bool put(const std::vector<std::string_view>& keys, const std::vector<std::string_view>& values) {
    std::size_t more = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) more += entry_bytes(keys[i], values[i]);
    if (bytes_ + more > max_store_bytes) return false;
    bytes_ += more;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const auto [known, added] = values_.try_emplace(std::string(keys[i]));
      if (!added) bytes_ -= entry_bytes(keys[i], known->second);
      known->second = values[i];
    }
    return true;
  }

  // Sets a value, replies with `result`, and answers the requests that have waited for the key.
  void change(Connection& connection, std::uint64_t id, std::string_view key, std::string_view value,
              std::string_view result) {
    if (!put({key}, {value})) return refuse(connection, id, full);
    reply(connection, id, result);
    wake_waiting(key);
  }

  void answer_or_park(Connection& connection, Parked request) {
    for (const std::string& key : request.keys)
      if (!values_.contains(key)) {
        waiting_[key].push_back(std::move(request));
        return;
      }
    FrameWriter values;
    if (request.operation == StoreOperation::get)
      for (const std::string& key : request.keys)
        if (values.payload().size() < max_frame_bytes) values.text(values_.at(key));
    if (values.payload().size() > max_frame_bytes - 16)
      return refuse(connection, request.id, "the values together are too large");
    reply(connection, request.id, values.payload());
  }

  void wake_waiting(std::string_view key) {
    auto waiting = waiting_.extract(std::string(key));
    if (waiting.empty()) return;
    for (Parked& request : waiting.mapped())
      if (const auto found = connections_.find(request.connection); found != connections_.end())
        answer_or_park(found->second, std::move(request));
  }

  void reply(Connection& connection, std::uint64_t id, std::string_view result,
             StoreStatus status = StoreStatus::done) {
    send(connection, FrameWriter().value(id).value(status).raw(result).take());
  }
  void refuse(Connection& connection, std::uint64_t id, std::string_view reason) {
    reply(connection, id, reason, StoreStatus::refused);
  }

  void send(Connection& connection, const std::string& frame) {
    const bool idle = connection.socket.out.empty();
    connection.socket.out += frame;
    if (idle) send_pending(connection);
  }

  void send_pending(Connection& connection) {
    if (!connection.socket.send()) return drop(connection);
    if (connection.socket.to_send() > 0) return expect(connection, EPOLLOUT);
    connection.state == Connection::refused ? drop(connection) : expect(connection, EPOLLIN);
  }

  // A client that does not read its replies is not read from.
  void expect(Connection& connection, std::uint32_t interest) {
    if (!connection.socket.fd.open() || std::exchange(connection.interest, interest) == interest) return;
    watch(EPOLL_CTL_MOD, connection.socket.fd.get(), connection.number, interest);
  }

  Listener listener_;
  const std::string secret_;
  const std::int64_t restart_;
  const Milliseconds hello_timeout_;
  RunState run_;
  Descriptor epoll_, wake_, reserve_;
  std::unordered_map<std::uint64_t, Connection> connections_;  // by numbers that grow
  std::map<std::uint64_t, Clock::time_point> strangers_;       // until when those may still greet
  std::vector<std::uint64_t> dropped_;
  std::uint64_t next_number_ = 2;
  std::map<std::string, std::string, std::less<>> values_;
  std::size_t bytes_ = 0;                                         // of all keys and values
  std::unordered_map<std::string, std::vector<Parked>> waiting_;  // by their first missing key
  std::thread thread_;
  const pid_t owner_ = getpid();
};

}  // namespace lockstep::inline v0_1::detail
