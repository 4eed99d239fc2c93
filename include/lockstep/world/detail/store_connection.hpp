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
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// The address at which a store listens, its secret, what determines the address, see
/// Environment::rendezvous_origin, and the remedy if nobody serves it.
struct StoreEndpoint {
  std::string host = {};
  int port = 0;
  std::string secret = {};
  std::string origin = {};
  std::string remedy = "Start rank 0 on that host, or correct the address on every rank";
  std::int64_t restart = 0;  // how often the ranks have been started again

  /// Returns the address for messages: "nodeA:29500 (MASTER_ADDR=nodeA, MASTER_PORT=29500)".
  [[nodiscard]] std::string text() const {
    return formatted("{}:{}{}", host, port, origin.empty() ? std::string() : " (" + origin + ")");
  }
};

/// The store is of an earlier, or of a later start of the ranks than this client.
struct EarlyStart : RendezvousError {
  using RendezvousError::RendezvousError;
};
struct LateStart : RendezvousError {
  using RendezvousError::RendezvousError;
};

/// Connects until `greet(socket, until)` returns an empty string instead of a reason, with pauses that grow to half a second.
/// Calls `waiting(reason)` after each failure. Throws RendezvousError with the last reason and the remedy after `timeout`, which
/// begins anew while the store of an earlier start answers, for rendezvous_timeout() at most.
template <class Waiting, class Greet>
void connect_to(const StoreEndpoint& endpoint, Milliseconds timeout, Waiting&& waiting, Greet&& greet) {
  const auto begin = std::chrono::steady_clock::now();
  auto until = begin + timeout;
  for (auto pause = first_retry_pause;; pause = std::min(2 * pause, last_retry_pause)) {
    auto [fd, reason] = try_connect(endpoint.host, endpoint.port, until, endpoint.origin);
    if (fd.open()) try {
        reason = greet(std::move(fd), until);
      } catch (const EarlyStart& early) {
        reason = early.what();
        until = std::max(until,
                         std::min(std::chrono::steady_clock::now() + timeout, begin + rendezvous_timeout()));
      }
    if (reason.empty()) return;
    if (std::chrono::steady_clock::now() + pause >= until)
      throw RendezvousError(formatted("no store at {} after {} s: {}. {}", endpoint.text(),
                                      std::chrono::duration<double>(until - begin).count(), reason,
                                      endpoint.remedy));
    waiting(reason);
    std::this_thread::sleep_for(pause);
  }
}

/// The store refused a request, or did not answer in time. The connection stays usable.
struct StoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The connection to the store has ended.
struct StoreLost : StoreError {
  using StoreError::StoreError;
};

/// A client's connection to a StoreServer. Thread-safe: several threads may wait for their replies at once.
/// One of them reads from the connection for all.
class StoreConnection {
 public:
  using Clock = std::chrono::steady_clock;
  using Waiting = std::function<void(const std::string& reason)>;

  /// Connects and exchanges the hello. Retries for `timeout` while nothing listens, and calls `waiting` from
  /// time to time. Throws RendezvousError, which states what is wrong at the address.
  StoreConnection(
      const StoreEndpoint& endpoint, Milliseconds timeout, const Waiting& waiting = [](const std::string&) {})
      : name_(formatted("{}:{}", endpoint.host, endpoint.port)) {
    connect_to(endpoint, timeout, waiting, [&](Descriptor fd, Clock::time_point until) {
      socket_ = {std::move(fd)};
      return greet(endpoint, until, waiting);
    });
    getpeername(socket_.fd.get(), peer_.get(), &peer_.length);
    getsockname(socket_.fd.get(), own_.get(), &own_.length);
  }

  ~StoreConnection() {
    if (joined_ && getpid() == owner_) post(StoreOperation::leave);
  }
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  /// The destructor tells the server that the end of this connection is not that of its rank.
  void leave_at_end() { joined_ = true; }

  /// Returns the address at which the store's host reaches this one, empty if it is this one.
  [[nodiscard]] std::string address() const {
    return peer_.loopback() || peer_.text() == own_.text() ? std::string() : own_.text();
  }

  /// Keeps the server alive as long as this connection.
  void keep(std::shared_ptr<void> server) { server_ = std::move(server); }
  /// Returns whether the store ends with this process.
  [[nodiscard]] bool hosts_store() const { return server_ != nullptr; }

  /// Sends a request. Returns the result in its reply. Throws StoreError if the store refuses it, at `until`, and once
  /// `over`, if it is given, returns true (see wake).
  template <class... Arguments>
  std::string request(StoreOperation operation, Clock::time_point until, const std::function<bool()>& over,
                      const Arguments&... arguments) {
    std::unique_lock lock(mutex_);
    const auto id = write(operation, arguments...);
    const Reply& awaited = replies_[id];
    wait(lock, until, [&] { return awaited.status.has_value() || (over && over()); });
    Reply reply = std::move(replies_.extract(id).mapped());
    if (!reply.status) {
      write(StoreOperation::cancel, id);
      throw_timeout();
    }
    if (*reply.status == StoreStatus::done) return std::move(reply.result);
    throw StoreError(formatted("the store at {} refuses: {}", name_, printable(reply.result)));
  }

  /// Sends a request that has no reply. Does not block. No-op if the connection is lost.
  template <class... Arguments>
  void post(StoreOperation operation, const Arguments&... arguments) noexcept try {
    const std::lock_guard lock(mutex_);
    write(operation, arguments...);
  } catch (const std::exception&) {  // lost, or there is no memory
  }

  /// Hands what the server pushes to `take`, on this thread, until `over` returns true (see wake) or at
  /// `until`. Throws StoreLost.
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
    eventfd_write(wake_.get(), 1);
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

 private:
  struct Reply {
    std::optional<StoreStatus> status;
    std::string result;
  };

  // Writes a request, and sends as much as there is room for. Returns its id.
  template <class... Arguments>
  std::uint64_t write(StoreOperation operation, const Arguments&... arguments) {
    if (!lost_.empty()) throw StoreLost(lost_);
    FrameWriter frame;
    const auto id = next_id_++;
    frame.value(id).value(operation);
    (frame.value(arguments), ...);
    if (frame.payload().size() > max_frame_bytes)
      throw StoreError(formatted("a message of {} bytes to the store is too large: {} are allowed",
                                 frame.payload().size(), max_frame_bytes));
    if (socket_.to_send() > max_frame_bytes) throw_timeout();  // requests abandoned before they were sent
    socket_.out += frame.take();
    socket_.send();
    if (reading_ && !socket_.out.empty())
      eventfd_write(wake_.get(), 1);  // for the thread that reads to send the rest
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
      pollfd polled[] = {
          {socket_.fd.get(), static_cast<short>(socket_.out.empty() ? POLLIN : POLLIN | POLLOUT), 0},
          {wake_.get(), POLLIN, 0}};
      const auto left = std::min<Clock::duration>(until - Clock::now(), 2 * look_interval);
      lock.unlock();
      const auto most = std::chrono::ceil<Milliseconds>(left).count();
      poll(polled, 2, std::max(0, static_cast<int>(most)));  // a negative one would have no end
      eventfd_t count = 0;
      if (polled[1].revents & POLLIN) eventfd_read(wake_.get(), &count);
      lock.lock();
      reading_ = false;
      changed_.notify_all();
      socket_.send();  // if the connection has ended, what has been received comes first
      const std::string end = socket_.receive();
      while (const auto payload = socket_.next()) {
        FrameReader reader(*payload);
        const auto id = reader.integer();
        if (id == push_id) {
          pushes_.emplace_back(reader.rest());
        } else if (const auto found = replies_.find(id); found != replies_.end()) {
          found->second.status = static_cast<StoreStatus>(reader.byte());
          found->second.result = reader.rest();
        }
      }
      if (socket_.next_length().value_or(0) > max_frame_bytes) lose("it sends what is no reply");
      if (!end.empty() && !done()) lose(end);
    }
  }

  [[noreturn]] void throw_timeout() const {
    throw StoreError(formatted("the store at {} does not answer in time", name_));
  }

  // Exchanges the hello. Returns an empty string if the server accepts this client, the reason if it closes
  // the connection or does not answer. Throws RendezvousError on a wrong secret or version.
  std::string greet(const StoreEndpoint& endpoint, Clock::time_point until, const Waiting& waiting) {
    socket_.out = FrameWriter().raw(store_magic).value(endpoint.restart).raw(endpoint.secret).take();
    socket_.send();
    for (bool ended = false;;) {
      // Without the length of its frame, which no other server begins with.
      const auto text = socket_.received().substr(std::min<std::size_t>(socket_.received().size(), 4));
      const auto begins_as = [&](std::string_view magic) {
        return text.substr(0, magic.size()) == magic.substr(0, text.size());
      };
      if (!begins_as(store_magic_of_any_version))
        throw RendezvousError(formatted(
            "what listens at {} is not a store of lockstep: use a free port of the master host, the "
            "same on every rank",
            endpoint.text()));
      if (!begins_as(store_magic))
        throw RendezvousError(
            formatted("the store at {} is of another version of lockstep: build all ranks with one", name_));
      if (const auto answer = text.size() > store_magic.size() ? socket_.next() : std::nullopt) {
        if (answer->size() != store_magic.size() + 1) return "it does not answer as a store of lockstep";
        const auto status = static_cast<StoreStatus>(answer->back());
        if (status == StoreStatus::done) return {};
        if (status == StoreStatus::early)
          throw EarlyStart("the ranks there have not all ended since the failure");
        if (status == StoreStatus::late)  // a failure that another start mends
          throw LateStart(Failure{.rank = process_rank.load(),
                                  .message = formatted("the run at {} has been started again without this "
                                                       "process, which is of restart {}",
                                                       name_, endpoint.restart)});
        throw RendezvousError(formatted(
            "the store at {} belongs to another run (its secret differs): give every run a port of its own, "
            "and all ranks of a run the same LOCKSTEP_STORE_SECRET or none",
            endpoint.text()));
      }
      if (ended) return "it closes the connection without an answer: is it a store of lockstep?";
      if (poll_until(socket_.fd.get(), POLLIN, std::min(until, Clock::now() + greeting_timeout))) {
        ended = !socket_.receive().empty();
        continue;
      }
      const std::string silence = "something listens there, but does not answer as a store of lockstep";
      if (Clock::now() >= until) return silence;
      waiting(silence);
    }
  }

  [[noreturn]] void lose(const std::string& reason) {
    lost_ = formatted("the store at {} is gone: {}", name_, reason);
    changed_.notify_all();
    throw StoreLost(lost_);
  }

  std::string name_;
  FrameSocket socket_;
  const Descriptor wake_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  SocketAddress peer_, own_;
  std::shared_ptr<void> server_;
  const pid_t owner_ = getpid();
  std::atomic<bool> joined_{false};  // as a rank
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reading_ = false;  // a thread waits for bytes
  std::uint64_t next_id_ = 0;
  std::map<std::uint64_t, Reply> replies_;  // that threads wait for
  std::deque<std::string> pushes_;
  std::string lost_;
};

/// The requests about a run (see RunState) over a connection, each with one deadline. They throw StoreError.
class RunClient {
 public:
  using Clock = StoreConnection::Clock;

  /// A request also ends once `over` returns true.
  RunClient(StoreConnection& connection, Clock::time_point until, std::function<bool()> over = nullptr)
      : connection_(connection), until_(until), over_(std::move(over)) {}
  RunClient(StoreConnection& connection, std::chrono::milliseconds timeout)
      : RunClient(connection, Clock::now() + timeout) {}

  /// Joins the run as rank `rank` of `size`, unless another process has that rank or another rank has said another size.
  /// A process that only tells its failure does not stay.
  JoinAnswer join(int rank, int size, const RankIdentity& identity, bool stays) {
    const auto answer = ask<JoinAnswer>(StoreOperation::join, rank, size, identity, stays);
    if (stays) connection_.leave_at_end();
    return answer;
  }
  /// Returns what is known of the run, and of a meeting if one is named, with an empty name of that of all ranks.
  RunSummary summary(const std::optional<std::string>& meeting = std::nullopt) {
    return ask<RunSummary>(StoreOperation::summary, meeting);
  }
  /// Returns what is known of `ranks`, in their order; of all that anything is known of if there are none.
  std::vector<KnownRank> members(const std::vector<int>& ranks = {}) {
    return ask<std::vector<KnownRank>>(StoreOperation::members, ranks);
  }
  /// Comes to the meeting `name` of `ranks`, of all if there are none; without a name to that of all which join. Blocks until
  /// all have come, or it has ended without that. If the coming `lasts`, it outlasts the end of this call.
  Meeting meet(const std::string& name, const std::vector<int>& ranks, bool lasts) {
    return ask<Meeting>(StoreOperation::meet, name, ranks, lasts);
  }
  /// Returns what is known of `ranks`, in their order, and `asks` them to report; else without their positions.
  std::vector<RankReport> reports(const std::string& group, const std::vector<int>& ranks, bool asks = true) {
    return ask<std::vector<RankReport>>(StoreOperation::ask, group, ranks, asks);
  }
  /// Adds to the number at a key of the store, 0 at first. Returns the sum.
  std::int64_t add(const std::string& key, std::int64_t amount) {
    return ask<std::int64_t>(StoreOperation::add, key, amount);
  }
  /// Returns the value at a key of the store. Blocks until it has one.
  std::string get(const std::string& key) {
    const auto values = connection_.request(StoreOperation::get, until_, over_, std::vector{key});
    return std::string(FrameReader(values).text());
  }
  /// Sets a key of the store to `desired` if it has the value `expected`, or none and that is empty. Returns its value.
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
    return connection_.request(StoreOperation::compare_set, until_, over_, key, expected, desired);
  }
  /// Adds an event. Returns whether it is news.
  bool publish(const Event& event) { return ask<bool>(StoreOperation::publish, event); }

 private:
  template <class Reply, class... Arguments>
  Reply ask(StoreOperation operation, const Arguments&... arguments) {
    return decoded<Reply>(connection_.request(operation, until_, over_, arguments...));
  }

  StoreConnection& connection_;
  Clock::time_point until_;
  std::function<bool()> over_;
};

/// The keys of numbers that RunClient::add counts. Two ranks that disagree on one of them wait for each other.
namespace store_keys {
/// The beginning of the names of communicators.
inline constexpr const char* communicators = "lockstep/comm";
/// The number of a rank's calls of `what`.
inline std::string calls_of_rank(std::string_view what, int rank) {
  return formatted("lockstep/{}/calls of rank {}", what, rank);
}
}  // namespace store_keys

}  // namespace lockstep::inline v0_1::detail
