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
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

/// The server of lockstep's key-value store: one thread that never blocks on a client.
///
/// The server disconnects a client that has not sent a valid hello within `hello_timeout`, and the oldest such client
/// if more than `max_strangers` are connected. It parks a request that waits for keys and answers it when the last key
/// is set. No bytes from a client can end or stall the server: a malformed frame closes its connection.
///
/// It pushes the run's events (see Event) in one order to every connection that has subscribed, failures also later. It keeps the positions
/// that ranks report, and compares the hashes of their collectives. Where two differ, it asks these ranks for their last
/// calls, and publishes the first that differs as the run's failure.
///
/// A connection may be bound to a rank. If it closes before the rank has made a communicator or has finished, the rank
/// has ended while other ranks wait for it: the server publishes that as the run's failure, unless a failure is
/// published within `end_grace` by the rank itself or its launcher, which know the cause.
class StoreServer {
 public:
  static constexpr std::chrono::milliseconds default_hello_timeout{10000};
  static constexpr std::chrono::milliseconds default_end_grace{1500};
  static constexpr std::size_t max_strangers = 256;
  static constexpr std::size_t max_pushed_bytes = 16 << 20, max_report_bytes = 1 << 20, max_groups = 1 << 16;

  /// Serves on a socket that already listens. Accepts only clients that know `secret`. Throws Error if the
  /// system grants no descriptor or thread.
  StoreServer(Listener listener, std::string secret,
              std::chrono::milliseconds hello_timeout = default_hello_timeout,
              std::chrono::milliseconds end_grace = default_end_grace)
      : listener_(std::move(listener)),
        secret_(std::move(secret)),
        hello_timeout_(hello_timeout),
        end_grace_(end_grace),
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
    int rank = 0;          // of the process below
    std::string process;   // the name of the process of the bound rank, or empty
    int subscribed = -1;   // the rank
  };

  /// The last report of a subscribed rank.
  struct Report {
    std::uint64_t connection = 0;
    std::string positions = {};
    Clock::time_point heard{};
    bool asked = false;  // to report again
  };

  /// A bound connection that has closed.
  struct LostRank {
    int rank;
    std::string process;
    Clock::time_point until;
  };

  /// Two ranks whose calls differ, and their last calls once they have sent them.
  struct Dispute {
    std::string group;
    CallDifference found;
    std::vector<RecordedCall> calls[2] = {};
    Clock::time_point until;
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
      while (!lost_.empty() && lost_.front().until <= Clock::now()) {
        publish_end(lost_.front());
        lost_.pop_front();
      }
      if (dispute_ && dispute_->until <= Clock::now()) settle();
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
    if (strangers_.empty() && lost_.empty() && !dispute_) return -1;
    auto next = dispute_ ? dispute_->until : Clock::time_point::max();
    if (!strangers_.empty()) next = std::min(next, strangers_.front().until);
    if (!lost_.empty()) next = std::min(next, lost_.front().until);
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

  void unsubscribe(Connection& connection) {
    const auto found = reports_.find(std::exchange(connection.subscribed, -1));
    if (found == reports_.end() || found->second.connection != connection.number) return;
    if (dispute_ && (dispute_->found.one == found->first || dispute_->found.other == found->first)) settle();
    reports_.erase(found);
  }

  // Frees the connection at the end of the loop's turn: callers may still use it.
  void drop(Connection& connection) {
    if (!connection.fd.open()) return;
    for (auto& [key, parked] : waiting_)
      std::erase_if(parked, [&](const Parked& one) { return one.connection == connection.number; });
    std::erase_if(waiting_, [](const auto& known) { return known.second.empty(); });
    unsubscribe(connection);
    connection.fd.close();
    dropped_.push_back(connection.number);
    const std::string finished = store_keys::finished(connection.rank);
    if (connection.process.empty() || values_.contains(finished)) return;
    const bool member = values_.contains(store_keys::communicates(connection.rank));
    const std::string key = member ? finished : store_keys::lost(connection.rank);
    set(key, member ? "-1" : connection.process);
    if (!member) lost_.push_back({connection.rank, std::move(connection.process), Clock::now() + end_grace_});
  }

  // Publishes the end of a rank as the run's failure, also to ranks that wait for the rendezvous.
  void publish_end(const LostRank& lost) {
    const auto outcome = values_.find(store_keys::outcome);
    const bool told = outcome != values_.end() && Outcome::decode(outcome->second).kind != Outcome::complete;
    if (told || values_.contains(store_keys::finished(lost.rank)) ||
        values_.contains(store_keys::communicates(lost.rank)) || values_.contains(store_keys::failure))
      return;
    publish({.kind = Event::failed,
             .failure = {
                 .kind = FailureKind::died,
                 .rank = lost.rank,
                 .message = formatted("has ended before its first communicator ({}): it was killed, or its "
                                      "connection broke; look at its output, and start all ranks again",
                                      lost.process)}});
  }

  // Pushes an event to the subscribers. Returns whether it is news: of failures, the first. Ranks that wait for the
  // rendezvous learn of it, too.
  bool publish(const Event& event) {
    if (event.kind == Event::failed) {
      if (values_.contains(store_keys::failure)) return false;
      set(store_keys::failure, encode(event.failure));
      if (!values_.contains(store_keys::outcome))
        set(store_keys::outcome, Outcome{.kind = Outcome::failed}.encode());
    }
    const std::string bytes = event.encode();
    if (event.kind == Event::failed) log_.push_back(bytes);
    for (const auto& [number, connection] : connections_)
      if (connection->subscribed >= 0) push(*connection, StorePush::event, bytes);
    return true;
  }
  void set(const std::string& key, std::string value) {
    put(key, std::move(value));
    wake_waiting(key);
  }

  // Asks two ranks whose calls differ for their last calls, if both are there to tell them.
  void contest(const std::string& group, const std::optional<CallDifference>& found) {
    if (!found || dispute_ || values_.contains(store_keys::failure)) return;
    dispute_ = {.group = group, .found = *found, .until = Clock::now() + std::chrono::seconds(1)};
    const auto one = reports_.find(found->one), other = reports_.find(found->other);
    if (one == reports_.end() || other == reports_.end()) return settle();
    for (const auto number : {one->second.connection, other->second.connection})
      if (const auto to = connections_.find(number); to != connections_.end())
        push(*to->second, StorePush::calls, FrameWriter().text(group).payload());
  }
  void settle() {
    const Dispute dispute = *std::exchange(dispute_, std::nullopt);
    const auto& calls = dispute.calls;
    publish({.kind = Event::failed, .failure = mismatch(dispute.found, dispute.group, calls[0], calls[1])});
  }

  void push(Connection& connection, StorePush kind, std::string_view content) {
    if (!connection.fd.open()) return;
    if (connection.out.size() - connection.sent > max_frame_bytes + max_pushed_bytes)
      return drop(connection);  // it does not read
    send(connection,
         FrameWriter().integer(push_id).byte(static_cast<std::uint8_t>(kind)).raw(content).take());
    update_interest(connection);
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
    put(store_keys::refusal,
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
      case StoreOperation::bind_rank: {
        const auto rank = reader.integer();
        const std::string process(reader.text());
        if (!reader.whole() || rank > std::numeric_limits<int>::max() || process.size() > max_key_bytes)
          return drop(connection);
        connection.rank = static_cast<int>(rank);
        connection.process = process;
        return reply(connection, id);
      }
      case StoreOperation::missing: {
        const std::uint64_t size = std::min<std::uint64_t>(reader.integer(), 1 << 20);
        std::vector<std::uint64_t> missing;
        for (std::uint64_t rank = 0; rank < size; ++rank)
          if (!values_.contains(store_keys::rank(static_cast<int>(rank)))) missing.push_back(rank);
        return reply(connection, id, [&](FrameWriter& out) {
          out.integer(missing.size());
          for (std::size_t i = 0; i < std::min<std::size_t>(5, missing.size()); ++i) out.integer(missing[i]);
        });
      }
      case StoreOperation::cancel: {
        const auto cancelled = reader.integer();
        if (!reader.whole()) return drop(connection);
        for (auto& [key, parked] : waiting_)
          std::erase_if(parked, [&](const Parked& one) {
            return one.connection == connection.number && one.id == cancelled;
          });
        std::erase_if(waiting_, [](const auto& known) { return known.second.empty(); });
        return;
      }
      case StoreOperation::subscribe: {
        const auto rank = reader.integer();
        if (!reader.whole()) return drop(connection);
        unsubscribe(connection);
        reply(connection, id);
        if (rank > std::numeric_limits<int>::max()) return;
        connection.subscribed = static_cast<int>(rank);
        reports_[connection.subscribed] = {.connection = connection.number};
        for (const std::string& event : log_) push(connection, StorePush::event, event);
        return;
      }
      case StoreOperation::publish: {
        const Event event = Event::decode(reader.text());
        if (!reader.whole()) return drop(connection);
        const auto group = comparisons_.find(event.group);
        if (event.kind == Event::departed && group != comparisons_.end()) {
          const auto left = group->second.leave(event.rank, event.position);
          if (left)
            publish({.kind = Event::failed,
                     .failure = left_unequally(event.rank, event.position, left->first, left->second)});
          if (group->second.all_left()) comparisons_.erase(group);
        }
        const bool news = publish(event);
        return reply(connection, id, [&](FrameWriter& out) { out.byte(news ? 1 : 0); });
      }
      case StoreOperation::ask: {
        FrameWriter out;
        out.integer(id).byte(static_cast<std::uint8_t>(StoreStatus::done));
        while (reader.more()) {
          const auto found = reports_.find(static_cast<int>(reader.integer()));
          if (found == reports_.end()) {
            out.integer(~std::uint64_t{0}).text("");
            continue;
          }
          Report& known = found->second;
          const auto age = std::chrono::floor<std::chrono::milliseconds>(Clock::now() - known.heard);
          out.integer(static_cast<std::uint64_t>(age.count())).text(known.positions);
          if (out.payload().size() > max_frame_bytes) return drop(connection);
          const auto to = connections_.find(known.connection);
          if (!std::exchange(known.asked, true) && to != connections_.end())
            push(*to->second, StorePush::question, {});
        }
        return send(connection, out.take());
      }
      case StoreOperation::report: {
        if (connection.subscribed < 0) return;
        Report& known = reports_[connection.subscribed];
        known = {connection.number, std::string(reader.text()), Clock::now()};
        if (known.positions.size() > max_report_bytes) return drop(connection);
        while (reader.more()) {
          const std::string group(reader.text());
          const std::uint64_t size = reader.integer();
          FrameReader marks(reader.text());
          if (!comparisons_.contains(group) && comparisons_.size() >= max_groups) continue;
          CallComparison& comparison = comparisons_.try_emplace(group, size).first->second;
          while (marks.more()) {
            const std::uint64_t sequence = marks.integer();
            contest(group, comparison.report(connection.subscribed, sequence, marks.integer()));
          }
        }
        return;
      }
      case StoreOperation::calls: {
        const std::string group(reader.text());
        auto calls = RecordedCall::decode(reader.text());
        if (!reader.whole()) return drop(connection);
        if (!dispute_ || dispute_->group != group) return;
        if (connection.subscribed == dispute_->found.one) dispute_->calls[0] = std::move(calls);
        if (connection.subscribed == dispute_->found.other) dispute_->calls[1] = std::move(calls);
        if (!dispute_->calls[0].empty() && !dispute_->calls[1].empty()) settle();
        return;
      }
    }
    drop(connection);
  }

  void add(Connection& connection, std::uint64_t id, const std::string& key, std::int64_t amount) {
    std::string problem;
    const auto sum = increase(key, amount, &problem);
    if (!sum) return refuse(connection, id, problem);
    reply(connection, id, [&](FrameWriter& out) { out.integer(static_cast<std::uint64_t>(*sum)); });
    wake_waiting(key);
  }

  // Adds to a counter. Returns the sum. If the value must not change, returns std::nullopt and sets `problem`
  // to the reason.
  std::optional<std::int64_t> increase(const std::string& key, std::int64_t amount,
                                       std::string* problem = nullptr) {
    std::int64_t sum = 0;
    std::string reason;
    if (const auto found = values_.find(key); found != values_.end()) {
      const char* const end = found->second.data() + found->second.size();
      const auto [stop, error] = std::from_chars(found->second.data(), end, sum);
      if (error != std::errc{} || stop != end || found->second.empty())
        reason = "the value is not an integer that can be added to";
    }
    if (reason.empty() && __builtin_add_overflow(sum, amount, &sum))
      reason = "the sum would not fit in 64 bits";
    if (reason.empty()) reason = put(key, std::to_string(sum));
    if (reason.empty()) return sum;
    if (problem) *problem = reason;
    return std::nullopt;
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
  const std::chrono::milliseconds hello_timeout_, end_grace_;
  Descriptor epoll_, wake_, reserve_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::deque<Stranger> strangers_;  // by age; some may have been greeted since
  std::deque<LostRank> lost_;       // by time
  std::vector<std::uint64_t> dropped_;
  std::uint64_t next_number_ = 2;
  std::unordered_map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::unordered_map<std::string, std::vector<Parked>> waiting_;  // by their first missing key
  std::vector<std::string> log_;                                  // the failures, for who subscribes later
  std::map<int, Report> reports_;                                 // of the subscribed ranks
  std::unordered_map<std::string, CallComparison> comparisons_;   // by group
  std::optional<Dispute> dispute_;
  std::thread thread_;
  const pid_t owner_ = getpid();
};

}  // namespace lockstep::detail
