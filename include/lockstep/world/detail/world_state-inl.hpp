#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/run_end.hpp"
#include "lockstep/world/detail/store_client.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"

/// How a rank joins its run, and how it ends.
namespace lockstep::inline v0_1::detail {

/// Opens the store of `env` within `timeout`, which is also that of each call on it. Rank 0 hosts it unless a launcher does.
/// While the store cannot be opened, calls `waiting` with what this rank waits for, and the reason.
inline Rendezvous join_rendezvous(const Environment& env, std::chrono::milliseconds timeout,
                                  const std::function<void(const std::string&)>& waiting) {
  if (env.rendezvous.empty()) return {c10::make_intrusive<c10d::HashStore>()};  // one process needs none
  const auto url = parse_rendezvous(env.rendezvous);
  StoreEndpoint endpoint{url.host, url.port, env.store_secret, env.rendezvous_origin};
  endpoint.restart = env.restart;
  std::shared_ptr<StoreConnection> connection;
  bool doubted = false;
  if (env.store_outlives_attempts) {
    endpoint.remedy =
        "torchrun's agent hosts it: look at the output of torchrun and start it again, or unset "
        "TORCHELASTIC_USE_AGENT_STORE if torchrun has not started this process";
    connection = connect_under_torchrun(endpoint, env.rank, timeout, waiting);
  } else if (env.rank == 0 && !env.store_is_hosted) {
    if (auto listener = listen_as_rank_zero(endpoint, env.launched && env.local_size == env.size)) {
      doubted = !listener->doubt.empty();
      connection = host_store(std::move(*listener), env.store_secret, timeout);
    }
  }
  if (!connection)
    connection = std::make_shared<StoreConnection>(endpoint, timeout, [&](const std::string& reason) {
      const std::string& origin = env.rendezvous_origin;
      waiting(formatted("the store of rank 0 at {}{}: {}", env.rendezvous,
                        origin.empty() ? std::string() : " (" + origin + ")", reason));
    });
  return {c10::make_intrusive<StoreClient>(connection, timeout), connection, doubted};
}

/// Returns what this process says about itself when it joins.
inline RankIdentity own_identity(const std::string& address, const Environment& env) {
  const int threads = at::get_num_threads();
  RankIdentity identity{process_name(getpid()), host_identity(), address, std::to_string(threads),
                        thread_source(threads, report_descriptor() >= 0)};
  // Where `launch` has started all ranks on this host, they run its own program.
  if (env.size > 1 && !(env.store_is_hosted && !env.store_outlives_attempts && env.local_size == env.size)) {
    static const std::string program = program_text();
    identity.program = program;
  }
  if (env.launched) {
    identity.local_rank = std::to_string(env.local_rank);
    identity.local_size = std::to_string(env.local_size);
    identity.local_variable = env.local_variable;
  } else if (env.expected_local_rank) {
    identity.local_rank = std::to_string(*env.expected_local_rank);
  }
  return identity;
}

LOCKSTEP_INLINE const Rendezvous& WorldState::join(std::optional<std::chrono::milliseconds> given) {
  if (joined_) return *joined_;
  const auto timeout = given ? *given : rendezvous_timeout();
  const auto begin = std::chrono::steady_clock::now();
  auto joined = join_rendezvous(
      environment, timeout,
      [notify = waiting_notice(timeout)](const std::string& what) { notify([&] { return what; }); });
  if (environment.size > 1)
    at_store("the ranks could not sign in", [&] {
      try {
        join_run({*joined.connection, begin + timeout}, environment,
                 own_identity(joined.connection->address(), environment), !given);
      } catch (const RendezvousError&) {
        // The store ends with this process: give the other ranks time to read the reason.
        if (joined.connection->hosts_store()) std::this_thread::sleep_for(reading_grace);
        throw;
      }
    });
  return joined_.emplace(std::move(joined));
}

LOCKSTEP_INLINE std::function<void(const LazyText&)> WorldState::waiting_notice(
    std::chrono::milliseconds timeout) const {
  return [begin = std::chrono::steady_clock::now(), next = first_notice, timeout, log = log().all(),
          prints = environment.local_rank == 0](const LazyText& what) mutable {
    const auto now = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
    if (!prints || now < next || now >= timeout) return;
    const std::string text = what();
    if (text.empty()) return;
    next = now + notice_interval;
    log.warning("waiting for {}; gives up in {} s (LOCKSTEP_RENDEZVOUS_TIMEOUT)", text,
                std::chrono::ceil<std::chrono::seconds>(timeout - now).count());
  };
}

LOCKSTEP_INLINE void WorldState::await_all() {
  if (complete_.load(std::memory_order_acquire)) return;
  const auto begin = std::chrono::steady_clock::now();
  const auto timeout = rendezvous_timeout();
  const auto notify = waiting_notice(timeout);
  const auto& joined = rendezvous();
  const std::lock_guard lock(joining_);
  if (complete_.load(std::memory_order_acquire)) return;
  const Environment& known = environment;
  if (known.size > 1) {
    const auto waiting = [&](const LazyText& who) {
      if (joined.doubted) refuse_other_rank_zero(known, own_identity(joined.connection->address(), known));
      notify(who);
    };
    single_host_ = !await_ranks(*joined.connection, known, begin + timeout, timeout, waiting);
    at_store("the rendezvous failed", [&] {
      place_ranks(joined);
      if (known.rank == 0 && log().should_log(Level::info))
        write_run_summary(known, identities(*joined.connection));
    });
  }
  complete_.store(true, std::memory_order_release);
}

LOCKSTEP_INLINE Environment WorldState::current_environment() {
  auto known = environment;
  if (complete_.load(std::memory_order_acquire)) {
    known.local_rank = local_.rank;
    known.local_size = local_.size;
  }
  return known;
}

LOCKSTEP_INLINE void WorldState::place_ranks(const Rendezvous& joined) {
  address_ = joined.connection->address();
  const bool numbered = environment.launched;
  if (numbered && (single_host_ || !address_.empty())) return;
  const auto ranks = identities(*joined.connection);
  const auto& own = ranks[static_cast<std::size_t>(environment.rank)].host;
  LocalPlace local{0, 0, -1};
  for (int other = 0; other < environment.size; ++other) {
    const auto& identity = ranks[static_cast<std::size_t>(other)];
    if (identity.host == own) {
      if (local.first < 0) local.first = other;
      if (other < environment.rank) ++local.rank;
      ++local.size;
    } else if (address_.empty() && !identity.address.empty()) {
      // The store's host may know itself by its loopback address only: ask for the route to another host.
      // Two hosts may each have a bridge of one address, which leads to neither.
      const auto source = source_address_towards(identity.address);
      if (source != identity.address) address_ = source;
    }
  }
  if (!numbered) local_ = local;
}

LOCKSTEP_INLINE WorldState::LocalPlace WorldState::local_place() {
  if (!environment.launched && environment.size > 1) await_all();
  return local_;
}

LOCKSTEP_INLINE bool WorldState::publish(const Failure& failure) {
  if (getpid() != owner) return true;
  bool joined = true;
  {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return true;
    if (!joined_) {
      // Other ranks may already wait for this one at a rendezvous, and no launcher tells them. Joining refuses a store of
      // another run.
      const Environment& known = environment;
      const bool one_launcher = report_descriptor() >= 0 && known.local_size == known.size;
      if (known.rendezvous.empty() || known.store_outlives_attempts || one_launcher) return true;
      join(last_request_timeout);
      joined = false;
    }
  }
  const bool first = RunClient(*connection(), last_request_timeout).publish({.failure = failure});
  // The store ends with this process: give the other ranks time to read the failure.
  if (hosts_store()) std::this_thread::sleep_for(reading_grace);
  return first || !joined;
}

LOCKSTEP_INLINE int WorldState::end(int code, bool returns) {
  const Environment& known = environment;
  if (getpid() != owner) return code;
  if (code == 0) {
    std::unique_lock lock(left_mutex_);
    const auto left = std::exchange(left_, {});
    lock.unlock();
    using Clock = std::chrono::steady_clock;
    const auto until = returns ? Clock::time_point::max() : Clock::now() + exit_limit - host_grace;
    for (const auto& [completes, over] : left)
      while (!completes(look_interval) && !over() && Clock::now() < until) {
      }
  }
  if (known.size == 1) return code;
  // Other ranks may wait for one that has not made a communicator, and no launcher sees its exit code.
  if (code != 0 && !communicates && !end_told_ && report_descriptor() < 0)
    at_most(publish_limit, [this, code] {
      static_cast<void>(publish({.kind = FailureKind::died,
                                 .rank = environment.rank,
                                 .code = code,
                                 .message = formatted("ended with exit code {} on {}", code, host_name())}));
    });
  {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock && (code != 0 || !returns)) return code;  // publish() still connects
    if (!lock) lock.lock();
    // A launcher that hosts the store for several hosts waits for every rank to finish.
    const bool awaited =
        known.store_is_hosted && !known.store_outlives_attempts && known.local_size < known.size;
    if (!joined_ && !(awaited && (returns || code == 0))) {
      end_told_ = end_told_ || returns;
      return code;
    }
    join({});
  }
  const bool first = !end_told_.exchange(true);
  if (first) {
    auto last = code == 0 ? ControlPlane::last_positions(connection().get()) : std::vector<RankPosition>();
    try {
      RunClient(*connection(), last_request_timeout)
          .publish(
              {.kind = Event::ended, .rank = known.rank, .failure = {.code = code}, .last = std::move(last)});
    } catch (const StoreLost&) {  // compare with the departures that this process has seen
      const auto differs = ControlPlane::different_ends_of_process(connection().get());
      if (code != 0 || !differs) throw;
      std::fprintf(stderr, "error: %s\n", differs->message.c_str());
      return differs->code;
    } catch (const StoreError&) {  // slow: its host waits for the other ranks all the same
    }
  }
  if (code != 0 || !hosts_store()) return code;
  return code_of(outlive_ranks(*connection(), {.size = first ? known.size : 0}).failure());
}

}  // namespace lockstep::inline v0_1::detail
