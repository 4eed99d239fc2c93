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
#include "lockstep/error.hpp"

#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/run_client.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_keys.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "lockstep/world/detail/thread_share.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

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

/// Runs `work`. Rethrows the exceptions of a store as RendezvousError whose text begins with `doing`.
template <class Work>
auto at_store(const std::string& doing, Work&& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    throw RendezvousError(detail::formatted("{}: {}", doing, printable(error.what_without_backtrace())));
  } catch (const StoreError& error) {
    throw RendezvousError(detail::formatted("{}: {}", doing, printable(error.what())));
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

/// Hosts a store on a socket that already listens. Returns its first connection; the store ends with that.
inline std::shared_ptr<StoreConnection> host_store(Listener listener, const std::string& secret,
                                                   std::chrono::milliseconds timeout) {
  const StoreEndpoint own{listener.address, listener.port, secret};
  auto server = std::make_shared<StoreServer>(std::move(listener), secret);
  auto connection = std::make_shared<StoreConnection>(own, timeout);
  connection->keep(std::move(server));
  return connection;
}

/// Listens where rank 0 hosts the store. Returns no listener if a store of lockstep with this secret answers
/// there: another process has the rank 0, and signing in at its store names both. Throws as listen_on.
inline std::optional<Listener> listen_as_rank_zero(const StoreEndpoint& endpoint) {
  try {
    return listen_on(endpoint.host, endpoint.port, endpoint.origin);
  } catch (const PortInUse&) {
    try {
      const StoreConnection other(endpoint, last_request_timeout);
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

/// `timeout` is that of each call on the store.
inline Rendezvous rendezvous_at(const std::shared_ptr<StoreConnection>& connection,
                                std::chrono::milliseconds timeout, bool hosted_here) {
  return {c10::make_intrusive<StoreClient>(connection, timeout), connection, hosted_here,
          connection->within_host() ? std::string() : connection->own_address()};
}

/// Returns the endpoint that rank 0 has published: "host port secret".
inline StoreEndpoint endpoint_on_board(const std::string& text) {
  const auto first = text.find(' '), second = text.find(' ', first + 1);
  return {text.substr(0, first),
          whole_number(text.substr(first + 1, second - first - 1)).value_or(0),
          text.substr(std::min(second, text.size() - 1) + 1),
          {},
          "Look at the output of rank 0; a firewall between the hosts must let through every port"};
}

/// Joins a rendezvous under torchrun. The store of torchrun's agent, which outlives a failed attempt together with its keys,
/// is the board on which rank 0 publishes the address and secret of the store of this attempt. An earlier attempt's address
/// leads to a closed port or to a store with another secret; then the board is read again until rank 0 has replaced it.
/// Calls `waiting` with what this rank waits for.
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
  // Publishes `text` unless it is empty. Returns what is on the board. LibTorch's client has no timeout, not even for
  // connecting, if its server does not answer.
  const auto on_board = [&](const std::string& text) {
    const auto read = std::make_shared<std::string>();
    const LeavableThread asking([read, client, text, endpoint, agent, remaining = left()] {
      if (!*client) *client = connect_tcp_store(endpoint, agent, remaining);
      c10d::Store& board = **client;
      if (!text.empty()) board.set(store_keys::board, to_bytes(text));
      if (board.check({store_keys::board})) *read = to_text(board.get(store_keys::board));
    });
    while (!asking.ends_within(std::min<std::chrono::milliseconds>(left(), last_retry_pause))) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw RendezvousError(detail::formatted(
            "{} does not answer after {} s: look at the output of torchrun on that host, and "
            "start it again",
            agent, std::chrono::duration<double>(timeout).count()));
      waiting(detail::formatted("{}: it does not answer", agent));
    }
    at_store(detail::formatted("{} failed", agent), [&] { asking.rethrow(); });
    return *read;
  };
  if (rank == 0) {
    auto host = address_towards(endpoint.host);
    if (host.empty()) host = loopback_address();  // a host without a network
    auto listener = listen_on(host, 0);
    const auto secret = random_secret();
    const auto text = detail::formatted("{} {} {}", host, listener.port, secret);
    const auto connection = host_store(std::move(listener), secret, timeout);
    on_board(text);
    return rendezvous_at(connection, timeout, true);
  }
  std::string last = detail::formatted("it has not come to {}. Look at the output of rank 0", agent);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto text = on_board({});
    try {
      if (!text.empty())
        return rendezvous_at(
            std::make_shared<StoreConnection>(endpoint_on_board(text), std::min(left(), greeting_timeout)),
            timeout, false);
    } catch (const RendezvousError& error) {
      last = printable(error.what());
    }
    waiting("rank 0: " + last);
    std::this_thread::sleep_for(board_pause);
  }
  throw RendezvousError(
      detail::formatted("rank {} did not reach rank 0 within {} s (LOCKSTEP_RENDEZVOUS_TIMEOUT): {}", rank,
                        std::chrono::duration<double>(timeout).count(), last));
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

  if (env.store_outlives_attempts) {
    endpoint.remedy =
        "torchrun's agent hosts it: look at the output of torchrun and start it again, or unset "
        "TORCHELASTIC_USE_AGENT_STORE if torchrun has not started this process";
    return rendezvous_under_torchrun(endpoint, env.rank, timeout, waiting);
  }
  if (env.rank == 0 && !env.store_is_hosted) {
    if (auto listener = listen_as_rank_zero(endpoint)) {
      const bool elsewhere = listener->host_is_elsewhere;
      auto joined = rendezvous_at(host_store(std::move(*listener), env.store_secret, timeout), timeout, true);
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
  return rendezvous_at(std::make_shared<StoreConnection>(endpoint, timeout, waiting_here), timeout, false);
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

/// Returns what this process says about itself when it joins.
inline RankIdentity own_identity(const std::string& address, const Environment& env) {
  const int threads = at::get_num_threads();
  RankIdentity identity{process_name(getpid()), host_identity(), address, std::to_string(threads),
                        thread_source(threads, report_descriptor() >= 0)};
  if (env.launched) {
    identity.local_rank = std::to_string(env.local_rank);
    identity.local_size = std::to_string(env.local_size);
    identity.local_variable = env.local_variable;
  } else if (env.expected_local_rank) {
    identity.local_rank = std::to_string(*env.expected_local_rank);
  }
  return identity;
}

[[noreturn]] inline void throw_refusal(const Outcome& outcome) {
  throw RendezvousError(Failure{.kind = outcome.rank < 0 ? FailureKind::error : FailureKind::timed_out,
                                .rank = process_rank.load(),
                                .cause = outcome.rank,
                                .call = {.operation = rendezvous},
                                .message = outcome.text});
}

/// Returns the identities of all ranks, which must have joined.
inline std::vector<RankIdentity> identities(StoreConnection& connection) {
  std::vector<RankIdentity> all;
  for (const KnownRank& one : RunClient(connection, request_timeout).members())
    all.push_back(one.identity.value_or(RankIdentity{}));
  return all;
}

/// Ends the rendezvous on all ranks with an error, and throws it on this rank. `late` is the rank that all the others
/// have waited for. If all ranks of the run have joined before, the run goes on, and rank 0 logs a warning.
[[noreturn]] inline void refuse_rendezvous(RunClient run, const std::string& text, int late = -1) {
  try {
    run.publish({.kind = Event::refused, .rank = late, .failure = {.message = text}});
  } catch (const StoreError&) {  // the error is thrown below
  }
  throw_refusal({.kind = Outcome::refused, .rank = late, .text = text});
}

/// Returns the error of two processes with the rank of `env`.
inline std::string duplicate_text(const Environment& env, const std::string& owner, const std::string& me) {
  const auto host = [](const std::string& process) { return process.substr(0, process.find(' ')); };
  auto text = formatted("rank {} is claimed by {} and {}", env.rank, owner, me);
  const auto variable = env.rank_variables.substr(0, env.rank_variables.find(','));
  if (env.launcher == "--nproc")
    text += formatted(
        ", the latter with RANK={} and --nproc {}: give every command its own RANK, the first of its ranks",
        env.rank - env.local_rank, env.local_size);
  else
    text +=
        formatted("{}: give every process its own {} on {}{}",
                  variable.empty() ? std::string() : formatted(", the latter with {}={}", variable, env.rank),
                  variable.empty() ? std::string("rank") : variable, host(owner),
                  host(owner) == host(me) ? "" : " and " + host(me));
  return text + ", and every run a MASTER_PORT of its own";
}

/// Joins the run. Refuses the rendezvous on all ranks if another process has the same rank, or if the ranks disagree on
/// their number. Does not wait for any other rank. A rank that joins only to tell its failure passes `stays` = false: it
/// does not count as present.
inline void join_run(RunClient run, const Environment& env, const std::string& address, bool stays = true) {
  const RankIdentity me = own_identity(address, env);
  const JoinAnswer answer = run.join(env.rank, env.size, me, stays);
  if (answer.size != env.size)
    refuse_rendezvous(
        run, formatted("the ranks disagree on their number: rank {} says world size {}, rank {} says {}. "
                       "Start all of them with one WORLD_SIZE",
                       env.rank, env.size, answer.sized_by, answer.size));
  if (answer.rank.is(me)) return;
  const std::string owner = answer.rank.identity.value_or(RankIdentity{}).process;
  refuse_rendezvous(run, answer.rank.lost
                             ? formatted("rank {} has ended ({}), and {} cannot take its place: start "
                                         "all ranks again",
                                         env.rank, owner, me.process)
                             : duplicate_text(env, owner, me.process));
}

/// Refuses the rendezvous with `text`, the error by which this process cannot join. A no-op if the variables determine no
/// address of another rank's store, and where a launching process or torchrun's agent ends the other ranks. A run whose
/// ranks have all joined goes on.
inline void tell_waiting_ranks(const std::string& text) try {
  if (report_descriptor() >= 0 || process_variable("TORCHELASTIC_RUN_ID")) return;
  // These do not determine the address, and may be the fault.
  const Variables variables = [](const char* name) -> std::optional<std::string> {
    for (const char* other : {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NODEID",
                              "SLURM_STEP_TASKS_PER_NODE"})
      if (std::string_view(name) == other) return std::nullopt;
    return process_variable(name);
  };
  const auto found = find_launched_rank(variables);
  const Variables all = with_launched_rank(variables, found);
  const auto url = rendezvous_url(all, false);
  if (url.empty() || all("RANK") == "0") return;  // rank 0 hosts the store
  const auto address = parse_rendezvous(url);
  StoreConnection store({address.host, address.port, store_secret(all, found)}, last_request_timeout);
  refuse_rendezvous({store, last_request_timeout},
                    formatted("{} cannot join: {}", process_name(getpid()), text));
} catch (const Error&) {  // no store answers, or refuse_rendezvous has thrown
}

/// Joins at a store at the rank 0 address on another host, if there is one: it belongs to another process
/// that has the rank 0, and both runs are refused by names. If that address leads to this rank's own store,
/// as the forwarded port of a container does, this is a no-op.
inline void refuse_other_rank_zero(const Environment& env, const std::string& address) {
  const auto url = parse_rendezvous(env.rendezvous);
  std::optional<StoreConnection> other;
  try {
    other.emplace(StoreEndpoint{url.host, url.port, env.store_secret}, last_request_timeout);
  } catch (const RendezvousError&) {  // no store of this run
    return;
  }
  at_store("the ranks could not sign in", [&] { join_run({*other, last_request_timeout}, env, address); });
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

/// Returns the exit code of a run whose ranks have all ended well: not 0, after an error line, if their calls differ.
inline int code_of_mismatch(StoreConnection& connection) try {
  const auto found = RunClient(connection, last_request_timeout).summary().failure;
  if (!found || found->kind != FailureKind::mismatch) return 0;
  std::fprintf(stderr, "error: %s\n", found->message.c_str());
  return found->code;
} catch (const StoreError&) {
  return 0;
}

/// Keeps the process that hosts the store alive until all ranks have ended: 5 minutes at most, or 2 s if a rank of
/// this host has failed. Other ranks may still read a failure.
inline void outlive_ranks(StoreConnection& connection, int size, bool well) try {
  const auto deadline = std::chrono::steady_clock::now() + (well ? host_grace : last_request_timeout);
  for (;; std::this_thread::sleep_for(first_retry_pause)) {
    const RunSummary run = RunClient(connection, last_request_timeout).summary();
    if (run.ended >= static_cast<std::size_t>(size) || std::chrono::steady_clock::now() >= deadline) return;
    if (well && run.failure) return std::this_thread::sleep_for(reading_grace);
  }
} catch (const StoreError&) {  // the store is unreadable: stop waiting
}

/// Returns a text on demand.
using LazyText = std::function<std::string()>;

/// Blocks until every rank has joined. Returns how the rendezvous has ended. Calls `waiting` from time to time with a text
/// such as "rank 2 of 3", which costs a request. Throws RendezvousError, with one text on all ranks, if a rank was
/// refused or is missing at `deadline`, and PeerError if a rank has failed, or has ended before it joined. `own` is the
/// waiting rank, in `call`.
inline Outcome await_ranks(StoreConnection& connection, int size,
                           std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout,
                           const std::string& doubt, const std::function<void(const LazyText& who)>& waiting,
                           int own = -1, const FailedCall& call = {}) {
  using Clock = std::chrono::steady_clock;
  const auto missing = [&] {
    return at_store("the rendezvous failed",
                    [&] { return RunClient(connection, std::min(timeout, outcome_timeout)).summary(size); });
  };
  // Returns `text` and what may keep the missing ranks from joining.
  const auto with_doubts = [&](const RunSummary& late, std::string text) {
    for (const std::string& why : {doubt, late.stranger})
      if (!why.empty()) text += "; " + why;
    return text;
  };
  std::optional<Outcome> outcome;
  while (!outcome) {
    const auto begin = Clock::now();
    try {
      outcome = RunClient(connection,
                          std::clamp(deadline, begin + std::chrono::milliseconds(1), begin + outcome_timeout))
                    .outcome();
    } catch (const StoreLost& error) {
      throw RendezvousError(
          formatted("the rendezvous has ended without all ranks: {}", printable(error.what())));
    } catch (const StoreError&) {  // the outcome did not come within the timeout
    }
    if (outcome) break;
    if (Clock::now() >= deadline) {
      const auto late = missing();
      refuse_rendezvous(
          {connection, std::min(timeout, outcome_timeout)},
          with_doubts(late,
                      formatted("{} did not join within {} s: start {} with the MASTER_ADDR, MASTER_PORT and "
                                "WORLD_SIZE of the others",
                                late.missing_text(size), std::chrono::duration<double>(timeout).count(),
                                late.missing == 1 ? "it" : "them")),
          late.missing == 1 && !late.first_missing.empty() ? late.first_missing[0] : -1);
    }
    waiting([&] {
      const auto late = missing();
      return with_doubts(late, late.missing_text(size));
    });
  }
  switch (outcome->kind) {
    case Outcome::complete:
      break;
    case Outcome::failed:
      throw PeerError(consequence_of(outcome->failure, own, call));
    case Outcome::ended:
      throw PeerError(consequence_of(ended_early(outcome->rank, own, call), own, call));
    case Outcome::refused:
      throw_refusal(*outcome);
  }
  return *outcome;
}

}  // namespace lockstep::detail
