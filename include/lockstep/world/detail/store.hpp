#pragma once

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/files.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "lockstep/world/detail/thread_share.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// The ranks that have not signed in: the first of them, and their number.
struct MissingRanks {
  std::vector<int> first{};
  std::size_t count = 0;

  /// Returns "rank 2 of 3", "ranks 1 and 2 of 3", or "ranks 1, 2, 3, 4 and 60 more of 65".
  [[nodiscard]] std::string text(int size) const {
    if (count == 0) return "the last rank";
    return detail::formatted("{} {} of {}", count == 1 ? "rank" : "ranks",
                             joined(first, ", ", " and ", count > first.size() ? 4 : first.size(), count),
                             size);
  }
};

/// A StoreServer as a c10d::Store, over a connection that many of them share. Thread-safe.
///
/// Every call ends within the timeout of this client (`setTimeout`), whatever the server does; a `wait` with
/// a timeout of its own ends within that timeout. A call throws c10::DistStoreError if it times out or the
/// server refuses it, and c10::DistNetworkError if the connection is lost. A lost connection stays lost. A
/// timeout of zero means no timeout, as in c10d.
class StoreClient : public ClonableStore {
 public:
  /// `timeout` is that of each call, which also ends once `over` returns true.
  StoreClient(std::shared_ptr<StoreConnection> connection, std::chrono::milliseconds timeout,
              std::function<bool()> over = nullptr)
      : connection_(std::move(connection)), over_(std::move(over)) {
    timeout_ = timeout;
  }

  [[nodiscard]] const std::shared_ptr<StoreConnection>& connection() const { return connection_; }

  /// Returns the ranks below `size` that have not signed in.
  MissingRanks missing_ranks(int size) {
    const auto reply = request(StoreOperation::missing, end(),
                               [&](FrameWriter& out) { out.integer(static_cast<std::uint64_t>(size)); });
    FrameReader reader(reply);
    MissingRanks missing{.count = reader.integer()};
    while (reader.more()) missing.first.push_back(static_cast<int>(reader.integer()));
    return missing;
  }

  /// Adds an event to the run's log. Returns whether it is news, see StoreServer.
  bool publish(const Event& event) {
    return truth(
        request(StoreOperation::publish, end(), [&](FrameWriter& out) { out.text(event.encode()); }));
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<StoreClient>(connection_, timeout_, over_);
  }

  using c10d::Store::compareSet;
  using c10d::Store::set;

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    multiSet({key}, {value});
  }

  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    std::vector<std::string> texts;
    for (const auto& value : values) texts.emplace_back(value.begin(), value.end());
    request(StoreOperation::set, end(), [&](FrameWriter& out) { out.texts(keys).texts(texts); });
  }

  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    return bytes(request(StoreOperation::compare_set, end(),
                         [&](FrameWriter& out) { out.text(key).text(view(expected)).text(view(desired)); }));
  }

  std::vector<std::uint8_t> get(const std::string& key) override { return multiGet({key}).at(0); }

  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    const auto reply = request(StoreOperation::get, end(), [&](FrameWriter& out) { out.texts(keys); });
    FrameReader reader(reply);
    std::vector<std::vector<std::uint8_t>> values;
    for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(bytes(reader.text()));
    return values;
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    return integer(request(StoreOperation::add, end(), [&](FrameWriter& out) {
      out.text(key).integer(static_cast<std::uint64_t>(value));
    }));
  }

  void append(const std::string& key, const std::vector<std::uint8_t>& value) override {
    request(StoreOperation::append, end(), [&](FrameWriter& out) { out.text(key).text(view(value)); });
  }

  bool deleteKey(const std::string& key) override {
    return truth(request(StoreOperation::erase, end(), [&](FrameWriter& out) { out.text(key); }));
  }

  bool check(const std::vector<std::string>& keys) override {
    return truth(request(StoreOperation::check, end(), [&](FrameWriter& out) { out.texts(keys); }));
  }

  std::int64_t getNumKeys() override { C10_THROW_ERROR(NotImplementedError, "the store counts no keys"); }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    request(StoreOperation::wait, end(timeout), [&](FrameWriter& out) { out.texts(keys); });
  }

  [[nodiscard]] bool hasExtendedApi() const override { return true; }

 private:
  using Clock = StoreConnection::Clock;

  [[nodiscard]] Clock::time_point end() const { return end(timeout_); }
  [[nodiscard]] static Clock::time_point end(std::chrono::milliseconds timeout) {
    constexpr auto longest = std::chrono::hours(24 * 365);
    return Clock::now() +
           (timeout == kNoTimeout ? longest : std::min<std::chrono::milliseconds>(timeout, longest));
  }

  template <class Fill>
  std::string request(StoreOperation operation, Clock::time_point until, Fill fill) {
    try {
      return connection_->request(operation, until, fill, over_);
    } catch (const StoreLost& error) {
      C10_THROW_ERROR(DistNetworkError, error.what());
    } catch (const std::runtime_error& error) {
      C10_THROW_ERROR(DistStoreError, error.what());
    }
  }

  static std::string_view view(const std::vector<std::uint8_t>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static std::vector<std::uint8_t> bytes(std::string_view text) { return {text.begin(), text.end()}; }
  static std::int64_t integer(const std::string& reply) {
    return static_cast<std::int64_t>(FrameReader(reply).integer());
  }
  static bool truth(const std::string& reply) { return FrameReader(reply).byte() != 0; }

  std::shared_ptr<StoreConnection> connection_;
  std::function<bool()> over_;
};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

inline std::vector<std::uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
inline std::string to_text(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

/// Returns the timeout of the rendezvous: LOCKSTEP_RENDEZVOUS_TIMEOUT in seconds, 5 minutes by default.
inline std::chrono::milliseconds rendezvous_timeout() {
  const auto seconds = integer_variable(process_variable, "LOCKSTEP_RENDEZVOUS_TIMEOUT", 1, 1'000'000);
  return std::chrono::seconds(seconds.value_or(300));
}

/// Returns an unguessable secret. Throws Error if getrandom fails.
inline std::string random_secret() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
    throw Error(detail::formatted("cannot make a secret for the store: {}", std::strerror(errno)));
  std::string text;
  for (const unsigned char byte : bytes) text += detail::formatted("{:02x}", byte);
  return text;
}

/// Runs `work`. Rethrows c10d's exceptions as RendezvousError whose text begins with `doing`.
template <class Work>
auto at_store(const std::string& doing, Work&& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    throw RendezvousError(detail::formatted("{}: {}", doing, printable(error.what_without_backtrace())));
  }
}

/// Connects to a TCPStore of LibTorch, which only torchrun's agent hosts. `agent` names it for messages.
inline StorePtr connect_tcp_store(const StoreEndpoint& endpoint, const std::string& agent,
                                  std::chrono::milliseconds timeout) {
  return at_store(
      detail::formatted("{} does not answer as one; set MASTER_ADDR and MASTER_PORT to those of this run of "
                        "torchrun",
                        agent),
      [&]() -> StorePtr {
        c10d::TCPStoreOptions options;
        options.port = static_cast<std::uint16_t>(endpoint.port);
        options.isServer = false;
        options.waitWorkers = false;
        options.timeout = timeout;
        options.useLibUV = false;  // a LibTorch built without libuv would reject it
        return c10::make_intrusive<c10d::TCPStore>(endpoint.host, options);
      });
}

/// Connects to the store at `endpoint`. `timeout` is the timeout of connecting and of each call.
inline c10::intrusive_ptr<StoreClient> connect_store(
    const StoreEndpoint& endpoint, std::chrono::milliseconds timeout,
    const StoreConnection::Waiting& waiting = [](const std::string&) {}) {
  return c10::make_intrusive<StoreClient>(std::make_shared<StoreConnection>(endpoint, timeout, waiting),
                                          timeout);
}

/// Hosts a store on a socket that already listens. Returns its first client; the store ends with that client.
inline c10::intrusive_ptr<StoreClient> host_store(Listener listener, const std::string& secret,
                                                  std::chrono::milliseconds timeout) {
  const StoreEndpoint own{listener.address, listener.port, secret};
  auto server = std::make_shared<StoreServer>(std::move(listener), secret);
  auto client = connect_store(own, timeout);
  client->connection()->keep(std::move(server));
  return client;
}

/// Listens where rank 0 hosts the store. Returns no listener if a store of lockstep with this secret answers
/// there: another process has the rank 0, and signing in at its store names both. Throws as listen_on.
inline std::optional<Listener> listen_as_rank_zero(const StoreEndpoint& endpoint) {
  try {
    return listen_on(endpoint.host, endpoint.port, endpoint.origin);
  } catch (const PortInUse&) {
    try {
      const StoreConnection other(endpoint, std::chrono::seconds(2));
      return std::nullopt;
    } catch (const RendezvousError&) {  // no store of this run
    }
    throw;
  }
}

/// The store of a rendezvous that this process has joined.
struct Rendezvous {
  StorePtr store;
  std::shared_ptr<StoreConnection> connection = {};  // null in a world of one rank
  bool hosted_here = false;                          // the store ends with this process
  std::string address = {};                          // at which other hosts reach this host, or empty
  std::string doubt = {};                            // what may keep the other ranks from joining

  /// Returns a client with a timeout of its own.
  [[nodiscard]] StorePtr again(std::chrono::milliseconds timeout) const {
    if (!connection) return store;
    return c10::make_intrusive<StoreClient>(connection, timeout);
  }
};

inline Rendezvous rendezvous_at(const c10::intrusive_ptr<StoreClient>& store, bool hosted_here) {
  const auto& connection = store->connection();
  return {store, connection, hosted_here,
          connection->within_host() ? std::string() : connection->own_address()};
}

/// A place at which rank 0 publishes the address and secret of the store of this attempt: torchrun's store, which
/// outlives a failed attempt together with its keys, or a file.
struct Board {
  std::string name;                   // "the store of torchrun's agent at nodeA:29400"
  std::string host;                   // towards which rank 0 listens; empty: any other host
  std::function<std::string()> read;  // empty if nothing is there
  std::function<void(const std::string& text)> write;
};

/// Returns the endpoint that rank 0 has published.
inline StoreEndpoint endpoint_on_board(const std::string& text) {
  const auto first = text.find(' '), second = text.find(' ', first + 1);
  return {text.substr(0, first),
          whole_number(text.substr(first + 1, second - first - 1)).value_or(0),
          text.substr(std::min(second, text.size() - 1) + 1),
          {},
          "Look at the output of rank 0; a firewall between the hosts must let through every port"};
}
inline std::string read_board(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  return text;
}

/// Joins the rendezvous of which rank 0 publishes the address on `board`. An earlier attempt's address leads to a closed
/// port or to a store with another secret; then the board is read again until rank 0 has replaced it. Calls `waiting`
/// with what this rank waits for.
inline Rendezvous rendezvous_through(const Board& board, int rank, std::chrono::milliseconds timeout,
                                     const std::function<void(const std::string&)>& waiting) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (rank == 0) {
    auto host = board.host.empty() ? outer_address() : address_towards(board.host);
    if (host.empty()) host = loopback_address();  // a host without a network
    auto listener = listen_on(host, 0);
    const auto secret = random_secret();
    const auto text = detail::formatted("{} {} {}", host, listener.port, secret);
    auto store = host_store(std::move(listener), secret, timeout);
    board.write(text);
    return rendezvous_at(store, true);
  }
  std::string last = detail::formatted("it has not come to {}. Look at the output of rank 0", board.name);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto text = board.read();
    try {
      if (!text.empty()) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        auto store = connect_store(endpoint_on_board(text), std::min(left, std::chrono::milliseconds(1000)));
        store->setTimeout(timeout);
        return rendezvous_at(store, false);
      }
    } catch (const RendezvousError& error) {
      last = printable(error.what());
    }
    waiting("rank 0: " + last);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw RendezvousError(
      detail::formatted("rank {} did not reach rank 0 within {} s (LOCKSTEP_RENDEZVOUS_TIMEOUT): {}", rank,
                        std::chrono::duration<double>(timeout).count(), last));
}

/// Joins a rendezvous under torchrun, whose agent's store is the board.
inline Rendezvous rendezvous_under_torchrun(const StoreEndpoint& endpoint, int rank,
                                            std::chrono::milliseconds timeout,
                                            const std::function<void(const std::string&)>& waiting) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto left = [&] {
    return std::max(std::chrono::milliseconds(1), std::chrono::ceil<std::chrono::milliseconds>(
                                                      deadline - std::chrono::steady_clock::now()));
  };
  const auto agent = detail::formatted("the store of torchrun's agent at {}", endpoint.text());
  retry_at(
      endpoint.text(), timeout,
      [&](auto until) {
        const auto attempt =
            try_connect(endpoint.host, endpoint.port, end_of_attempt(until), endpoint.origin);
        return attempt.fd.open() ? std::string() : attempt.reason;
      },
      [&](const std::string& reason) { waiting(detail::formatted("{}: {}", agent, reason)); },
      endpoint.remedy);
  const auto client = std::make_shared<StorePtr>();
  // LibTorch's client has no timeout, not even for connecting, if its server does not answer.
  const auto on_board = [&](const std::function<std::string(c10d::Store&)>& work) {
    const auto text = std::make_shared<std::string>();
    const LeavableThread asking([text, client, work, endpoint, agent, remaining = left()] {
      if (!*client) *client = connect_tcp_store(endpoint, agent, remaining);
      *text = work(**client);
    });
    while (!asking.ends_within(std::min<std::chrono::milliseconds>(left(), std::chrono::milliseconds(500)))) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw RendezvousError(detail::formatted(
            "{} does not answer after {} s: look at the output of torchrun on that host, and "
            "start it again",
            agent, std::chrono::duration<double>(timeout).count()));
      waiting(detail::formatted("{}: it does not answer", agent));
    }
    at_store(detail::formatted("{} failed", agent), [&] { asking.rethrow(); });
    return *text;
  };
  const std::string pin = store_keys::board;
  return rendezvous_through({agent, endpoint.host,
                             [&] {
                               return on_board([pin](c10d::Store& on) {
                                 return on.check({pin}) ? to_text(on.get(pin)) : std::string();
                               });
                             },
                             [&](const std::string& text) {
                               on_board([pin, text](c10d::Store& on) {
                                 on.set(pin, to_bytes(text));
                                 return std::string();
                               });
                             }},
                            rank, timeout, waiting);
}

/// Joins a rendezvous whose board is a file, which rank 0 removes when it leaves. Throws UsageError if rank 0 cannot
/// write it.
inline Rendezvous rendezvous_in_file(const std::string& path, int rank, std::chrono::milliseconds timeout,
                                     const std::function<void(const std::string&)>& waiting) {
  return rendezvous_through({detail::formatted("the file {}", path), "", [&] { return read_board(path); },
                             [&](const std::string& text) {
                               try {
                                 write_file_atomically(path, text + "\n");
                               } catch (const Error& error) {
                                 throw UsageError(detail::formatted(
                                     "cannot write the rendezvous file (of LOCKSTEP_RENDEZVOUS or "
                                     "World::join): {}: name a file in a "
                                     "folder that every rank can write",
                                     error.what()));
                               }
                             }},
                            rank, timeout, waiting);
}

/// Opens the store of `env` within `timeout`. Rank 0 hosts it unless a launcher does. While the store cannot
/// be opened, calls `waiting` with what this rank waits for, and the reason.
inline Rendezvous join_rendezvous(
    const Environment& env, std::chrono::milliseconds timeout,
    const std::function<void(const std::string&)>& waiting = [](const std::string&) {}) {
  if (env.rendezvous.empty()) {
    StorePtr store = c10::make_intrusive<c10d::HashStore>();  // one process needs no rendezvous
    return {store};
  }
  const auto url = parse_rendezvous(env.rendezvous);
  StoreEndpoint endpoint{url.host, url.port, env.store_secret, env.rendezvous_origin};
  if (!url.path.empty()) return rendezvous_in_file(url.path, env.rank, timeout, waiting);
  if (env.store_outlives_attempts) {
    endpoint.remedy =
        "torchrun's agent hosts it: look at the output of torchrun and start it again, or unset "
        "TORCHELASTIC_USE_AGENT_STORE if torchrun has not started this process";
    return rendezvous_under_torchrun(endpoint, env.rank, timeout, waiting);
  }
  if (env.rank == 0 && !env.store_is_hosted) {
    if (auto listener = listen_as_rank_zero(endpoint)) {
      const bool elsewhere = listener->host_is_elsewhere;
      auto joined = rendezvous_at(host_store(std::move(*listener), env.store_secret, timeout), true);
      if (elsewhere)
        joined.doubt = detail::formatted(
            "MASTER_ADDR={} is no address of this host ({}): rank 0 must run on the host that it names",
            url.host, host_name());
      else if ((names_loopback(url.host) || url.host == "0.0.0.0" || url.host == "::") &&
               !(env.launched && env.local_size == env.size))
        joined.doubt =
            detail::formatted("ranks on other hosts cannot reach this one ({}) by the address {} of rank 0",
                              host_name(), url.host);
      return joined;
    }
  }
  const auto waiting_here = [&](const std::string& reason) {
    waiting(detail::formatted(
        "the store of rank 0 at {}{}: {}", env.rendezvous,
        env.rendezvous_origin.text.empty() ? std::string() : " (" + env.rendezvous_origin.text + ")",
        reason));
  };
  return rendezvous_at(connect_store(endpoint, timeout, waiting_here), false);
}

/// Identifies the host and network namespace of this process: processes with one identity reach each other by
/// the loopback.
inline std::string host_identity() {
  const auto inode = [](const char* path) -> unsigned long long {
    struct stat found {};
    return stat(path, &found) == 0 ? found.st_ino : 0;
  };
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return detail::formatted("{}/{}/{}", boot, inode("/proc/self/ns/net"), host_name());
}

/// Returns the name of a process of this host in errors: "nodeA pid 811".
inline std::string process_name(pid_t pid) {
  return detail::formatted("{} pid {}", host_name(), pid);
}

/// What each rank publishes about itself when it signs in.
struct RankIdentity {
  std::string process;        ///< "nodeA pid 811"
  std::string host;           ///< equal on all ranks of a host, see host_identity
  std::string address;        ///< at which other hosts reach the rank, or empty
  std::string threads;        ///< the number of its threads
  std::string thread_source;  ///< what determines that number
  /// The place on the host that a launcher has assigned, and the variable that holds it; or empty. Without
  /// `local_size`, `local_rank` is a place that the ranks which join must confirm.
  std::string local_rank = {}, local_size = {}, local_variable = {};

  static RankIdentity own(const std::string& address, const Environment& env) {
    const int threads = at::get_num_threads();
    RankIdentity identity{process_name(getpid()), host_identity(), address, std::to_string(threads),
                          detail::thread_source(threads, report_descriptor() >= 0)};
    if (env.launched) {
      identity.local_rank = std::to_string(env.local_rank);
      identity.local_size = std::to_string(env.local_size);
      identity.local_variable = env.local_variable;
    } else if (env.expected_local_rank) {
      identity.local_rank = std::to_string(*env.expected_local_rank);
    }
    return identity;
  }
  [[nodiscard]] std::string encode() const {
    return detail::formatted("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}", process, host, address, threads, thread_source,
                             local_rank, local_size, local_variable);
  }
  static RankIdentity decode(const std::string& text) {
    RankIdentity identity;
    std::size_t begin = 0;
    for (std::string* field :
         {&identity.process, &identity.host, &identity.address, &identity.threads, &identity.thread_source,
          &identity.local_rank, &identity.local_size, &identity.local_variable}) {
      const auto end = std::min(text.find('\n', begin), text.size());
      *field = text.substr(begin, end - begin);
      begin = std::min(end + 1, text.size());
    }
    return identity;
  }
  [[nodiscard]] std::string host_text() const { return process.substr(0, process.find(' ')); }
};

/// Returns the identities of all ranks, which must have signed in.
inline std::vector<RankIdentity> identities(c10d::Store& store, int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(store_keys::rank(rank));
  std::vector<RankIdentity> result;
  for (const auto& value : store.multiGet(keys)) result.push_back(RankIdentity::decode(to_text(value)));
  return result;
}

/// Returns the error about a LOCAL_RANK without LOCAL_WORLD_SIZE that is not the rank's number among those of
/// its host, empty if there is none.
inline std::string unconfirmed_local_rank(const std::vector<RankIdentity>& ranks) {
  std::map<std::string, int> ranks_on;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const RankIdentity& identity = ranks[rank];
    const int number = ranks_on[identity.host]++;
    if (!identity.local_rank.empty() && identity.local_size.empty() &&
        identity.local_rank != std::to_string(number))
      return detail::formatted(
          "LOCAL_RANK={} of rank {} contradicts the other ranks on {}, among which it is number {}: set "
          "LOCAL_WORLD_SIZE too if that is meant, or unset LOCAL_RANK",
          printable(identity.local_rank), rank, printable(identity.host_text()), number);
  }
  return {};
}

/// Returns the error about two ranks of a host that have one local rank; empty if there are none. The ranks of a host may be
/// several complete sets: launchers can imitate several hosts on one.
inline std::string repeated_local_rank(const std::vector<RankIdentity>& ranks) {
  // By host with its number of ranks, and local rank.
  std::map<std::string, std::map<std::string, std::vector<std::size_t>>> hosts;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (const RankIdentity& one = ranks[rank]; !one.local_size.empty())
      hosts[one.host + " " + one.local_size][one.local_rank].push_back(rank);
  for (const auto& [host, places] : hosts) {
    const std::size_t sets = places.rbegin()->second.size(), size = places.size();
    for (const auto& [local_rank, holders] : places) {
      const RankIdentity& one = ranks[holders[0]];
      if (holders.size() == 1 || (holders.size() == sets && one.local_size == std::to_string(size))) continue;
      return detail::formatted(
          "ranks {} and {} on {} both have {}={} of {}: pass the launcher's whole environment on to each "
          "process, or give each "
          "rank of a host its own",
          holders[0], holders[1], printable(one.host_text()),
          one.local_variable.empty() ? std::string("local rank") : printable(one.local_variable),
          printable(local_rank), printable(one.local_size));
    }
  }
  return {};
}

/// Adds an event to the log of the run. Returns whether it is news; false in a world of one rank.
inline bool publish(c10d::Store& store, const Event& event) {
  auto* client = dynamic_cast<StoreClient*>(&store);
  return client && client->publish(event);
}

/// Ends the rendezvous unless it has ended. Returns how it has ended.
inline Outcome end_rendezvous(c10d::Store& store, const Outcome& outcome) {
  return Outcome::decode(to_text(store.compareSet(store_keys::outcome, {}, to_bytes(outcome.encode()))));
}

[[noreturn]] inline void throw_refusal(const Outcome& outcome) {
  throw RendezvousError(Failure{.kind = outcome.rank < 0 ? FailureKind::error : FailureKind::timed_out,
                                .rank = process_rank.load(),
                                .cause = outcome.rank,
                                .call = {.operation = rendezvous},
                                .message = outcome.text});
}

/// Ends the rendezvous on all ranks with an error, and throws it on this rank. `late` is the rank that all the others
/// have waited for. If all ranks of the run have joined before, the run goes on, and rank 0 logs a warning.
[[noreturn]] inline void refuse_rendezvous(c10d::Store& store, const std::string& text, int late = -1) {
  const Outcome refusal{Outcome::refused, late, text};
  try {
    if (end_rendezvous(store, refusal).kind == Outcome::complete)
      publish(store, {.kind = Event::refused, .failure = {.message = text}});
  } catch (const c10::Error&) {  // the error is thrown below
  }
  throw_refusal(refusal);
}

/// Refuses the rendezvous because `owner` and `me` have the same rank.
[[noreturn]] inline void refuse_duplicate(c10d::Store& store, const Environment& env,
                                          const RankIdentity& owner, const RankIdentity& me) {
  const auto lost = store_keys::lost(env.rank);
  if (store.check({lost}) && to_text(store.get(lost)) == owner.process)
    refuse_rendezvous(store, detail::formatted("rank {} has ended ({}), and {} cannot take its place: start "
                                               "all ranks again",
                                               env.rank, printable(owner.process), me.process));
  auto text =
      detail::formatted("rank {} is claimed by {} and {}", env.rank, printable(owner.process), me.process);
  const auto variable = env.rank_variables.substr(0, env.rank_variables.find(','));
  if (env.launcher == "--nproc")
    text += detail::formatted(
        ", the latter with RANK={} and --nproc {}: give every command its own RANK, the first of its ranks",
        env.rank - env.local_rank, env.local_size);
  else
    text += detail::formatted(
        "{}: give every process its own {} on {}{}",
        variable.empty() ? std::string() : detail::formatted(", the latter with {}={}", variable, env.rank),
        variable.empty() ? std::string("rank") : variable, printable(owner.host_text()),
        owner.host_text() == me.host_text() ? "" : " and " + me.host_text());
  text += env.rendezvous.starts_with("file:") ? ", and every run a rendezvous file of its own"
                                              : ", and every run a MASTER_PORT of its own";
  refuse_rendezvous(store, text);
}

/// Signs in, and binds a StoreClient to the rank. Refuses the rendezvous on all ranks if another process has
/// the same rank, if the ranks disagree on their number or if two ranks of a host have one local rank. Does
/// not wait for any other rank. A rank that signs in only to publish its failure passes `joining` = false: it
/// is not bound and does not count as present.
inline void sign_in(c10d::Store& store, const Environment& env, const std::string& address,
                    bool joining = true) {
  const auto agreed = to_text(
      store.compareSet(store_keys::size, {}, to_bytes(detail::formatted("{} {}", env.size, env.rank))));
  const auto space = agreed.find(' ');
  const auto size = agreed.substr(0, space), by = agreed.substr(std::min(space, agreed.size() - 1) + 1);
  if (size != std::to_string(env.size))
    refuse_rendezvous(
        store,
        detail::formatted("the ranks disagree on their number: rank {} says world size {}, rank {} says {}. "
                          "Start all of them with one WORLD_SIZE",
                          env.rank, env.size, printable(by), printable(size)));
  const auto me = RankIdentity::own(address, env);
  const auto owner =
      RankIdentity::decode(to_text(store.compareSet(store_keys::rank(env.rank), {}, to_bytes(me.encode()))));
  if (owner.process != me.process || owner.host != me.host) refuse_duplicate(store, env, owner, me);
  if (to_text(store.compareSet(store_keys::host, {}, to_bytes(me.host))) != me.host)
    store.set(store_keys::several_hosts, to_bytes("yes"));
  if (!joining) return;
  if (auto* client = dynamic_cast<StoreClient*>(&store))
    client->connection()->bind_rank(env.rank, me.process,
                                    std::chrono::steady_clock::now() + store.getTimeout());
  // Another World of this process has already signed in; the process counts once.
  if (store.add(store_keys::signed_in(env.rank), 1) != 1) return;
  if (store.add(store_keys::present, 1) != env.size) return;
  const auto all = identities(store, env.size);
  for (const auto& wrong : {repeated_local_rank(all), unconfirmed_local_rank(all)})
    if (!wrong.empty()) refuse_rendezvous(store, wrong);
  end_rendezvous(store, {});
}

/// Registers a hook that refuses the rendezvous with `text`, the error of this process's variables, once the process
/// has printed it as its last words. The hook is a no-op if the variables determine no address of another rank's store,
/// and where a launching process or torchrun's agent ends the other ranks. A run whose ranks have all joined goes on.
inline void tell_waiting_ranks(const std::string& text, const AnyRankSource& source) {
  failure_hooks.cannot_join = [text, source](const std::string& said) {
    if (said != text || report_descriptor() >= 0 || process_variable("TORCHELASTIC_RUN_ID")) return;
    try {
      // These do not determine the address, and may be the fault.
      const Variables variables = [](const char* name) -> std::optional<std::string> {
        for (const char* other : {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID",
                                  "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"})
          if (std::string_view(name) == other) return std::nullopt;
        return process_variable(name);
      };
      const auto found = find_launched_rank(variables, source);
      const Variables all = with_launched_rank(variables, found);
      const auto url = rendezvous_url(all, false);
      if (url.empty() || all("RANK") == "0") return;  // rank 0 hosts the store
      const auto address = parse_rendezvous(url);
      if (!address.path.empty()) return;
      const auto store = connect_store({address.host, address.port, store_secret(url, all, found)},
                                       std::chrono::milliseconds(2000));
      refuse_rendezvous(*store, detail::formatted("{} cannot join: {}", process_name(getpid()), text));
    } catch (const Error&) {  // no store answers, or refuse_rendezvous has thrown
    }
  };
}

/// Returns whether a store is of another run: its ranks have another number than `size`, or a process other
/// than `process` has the rank `rank` there.
inline bool is_of_another_run(c10d::Store& store, int size, int rank, const std::string& process) {
  if (store.check({store_keys::size}) &&
      !to_text(store.get(store_keys::size)).starts_with(std::to_string(size) + " "))
    return true;
  return store.check({store_keys::rank(rank)}) &&
         RankIdentity::decode(to_text(store.get(store_keys::rank(rank)))).process != process;
}

/// Signs in at a store at the rank 0 address on another host, if there is one: it belongs to another process
/// that has the rank 0, and both runs are refused by names. If that address leads to this rank's own store,
/// as the forwarded port of a container does, this is a no-op.
inline void refuse_other_rank_zero(const Environment& env, const std::string& address) {
  const auto url = parse_rendezvous(env.rendezvous);
  c10::intrusive_ptr<StoreClient> other;
  try {
    other = connect_store({url.host, url.port, env.store_secret}, std::chrono::seconds(1));
  } catch (const RendezvousError&) {  // no store of this run
    return;
  }
  at_store("the ranks could not sign in", [&] { sign_in(*other, env, address); });
}

/// Waits for all of these keys, at most `timeout`. Returns whether they exist. Throws c10::Error if the store is gone.
inline bool appear_within(c10d::Store& store, const std::vector<std::string>& keys,
                          std::chrono::milliseconds timeout) {
  try {
    store.wait(keys, timeout);
    return true;
  } catch (const c10::DistStoreError&) {
    return false;
  }
}

/// Returns the first published failure.
inline std::optional<Failure> published_failure(c10d::Store& store) {
  if (!store.check({store_keys::failure})) return std::nullopt;
  return decode_failure(to_text(store.get(store_keys::failure)));
}

/// Returns the exit code of a run whose ranks have all ended well: not 0, after an error line, if their calls differ.
inline int code_of_mismatch(c10d::Store& store) {
  const auto found = published_failure(store);
  if (!found || found->kind != FailureKind::mismatch) return 0;
  std::fprintf(stderr, "error: %s\n", found->message.c_str());
  return found->code;
}

/// Keeps the process that hosts the store alive until all ranks have finished: 5 minutes at most, or 2 s if a rank of
/// this host has failed. Other ranks may still read a failure.
inline void outlive_ranks(c10d::Store& store, int size, bool well) {
  const auto deadline =
      std::chrono::steady_clock::now() + (well ? std::chrono::minutes(5) : std::chrono::seconds(2));
  std::vector<std::string> finished;
  for (int rank = 0; rank < size; ++rank) finished.push_back(store_keys::finished(rank));
  try {
    while (!appear_within(store, finished, std::chrono::milliseconds(500)) &&
           std::chrono::steady_clock::now() < deadline)
      if (well && published_failure(store)) return std::this_thread::sleep_for(std::chrono::seconds(1));
  } catch (const c10::Error&) {  // the store is unreadable: stop waiting
  }
}

/// Publishes that a rank's process has ended with exit code 0, also to ranks that wait for the rendezvous: one
/// that has not signed in never will. No-op if the store does not answer.
inline void record_end(c10d::Store& store, int rank) try {
  store.compareSet(store_keys::finished(rank), {}, to_bytes("0"));
  if (!store.check({store_keys::rank(rank)})) end_rendezvous(store, {Outcome::ended, rank});
} catch (const c10::Error&) {  // the ranks' own timeouts remain
}

/// Returns a text on demand.
using LazyText = std::function<std::string()>;

/// Blocks until every rank has signed in. `side` is a separate connection with a short timeout. Calls
/// `waiting` from time to time with a text such as "rank 2 of 3", which costs store operations. Throws
/// RendezvousError, with one text on all ranks, if a rank was refused or is missing at `deadline`, and
/// PeerError if a rank has failed, or has ended before it signed in. `own` is the waiting rank, in `call`.
inline void await_ranks(c10d::Store& side, int size, std::chrono::steady_clock::time_point deadline,
                        std::chrono::milliseconds timeout, const std::string& doubt,
                        const std::function<void(const LazyText& who)>& waiting, int own = -1,
                        const FailedCall& call = {}) {
  using Clock = std::chrono::steady_clock;
  const auto missing = [&] {
    return at_store("the rendezvous failed",
                    [&] { return dynamic_cast<StoreClient&>(side).missing_ranks(size); });
  };
  // Returns `text` and what may keep the missing ranks from joining.
  const auto with_doubts = [&](std::string text) {
    if (!doubt.empty()) text += "; " + doubt;
    return at_store("the rendezvous failed", [&] {
      const bool refused = side.check({store_keys::refusal});
      return refused ? detail::formatted("{}; {}", text, printable(to_text(side.get(store_keys::refusal))))
                     : text;
    });
  };
  std::optional<Outcome> outcome;
  for (const auto slice = std::chrono::milliseconds(5000); !outcome;) {
    const auto begin = Clock::now();
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - begin);
    try {
      if (appear_within(side, {store_keys::outcome}, std::clamp(left, std::chrono::milliseconds(1), slice)))
        outcome = Outcome::decode(to_text(side.get(store_keys::outcome)));
    } catch (const c10::DistNetworkError& error) {
      throw RendezvousError(detail::formatted("the rendezvous has ended without all ranks: {}",
                                              printable(error.what_without_backtrace())));
    } catch (const c10::DistStoreError&) {  // the value did not arrive within the timeout
    }
    if (!outcome) {
      if (Clock::now() >= deadline) {
        const auto late = missing();
        refuse_rendezvous(side,
                          with_doubts(detail::formatted(
                              "{} did not join within {} s: start {} with the MASTER_ADDR, MASTER_PORT and "
                              "WORLD_SIZE of the others",
                              late.text(size), std::chrono::duration<double>(timeout).count(),
                              late.count == 1 ? "it" : "them")),
                          late.count == 1 && !late.first.empty() ? late.first[0] : -1);
      }
      waiting([&] { return with_doubts(missing().text(size)); });
    }
  }
  switch (outcome->kind) {
    case Outcome::complete:
      return;
    case Outcome::failed: {
      const auto failure = published_failure(side);
      throw PeerError(consequence_of(failure.value_or(Failure{.message = "a rank has failed"}), own, call));
    }
    case Outcome::ended:
      throw PeerError(consequence_of(ended_early(outcome->rank, own, call), own, call));
    case Outcome::refused:
      throw_refusal(*outcome);
  }
}

}  // namespace lockstep::detail
