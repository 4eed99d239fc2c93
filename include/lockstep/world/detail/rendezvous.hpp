#pragma once

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/event_log.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/rank_identity.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_server.hpp"
#include "lockstep/world/detail/timeouts.hpp"

/// How the ranks of a run come together over a connection to its store.
namespace lockstep::inline v0_1::detail {

/// Returns the identities of all ranks, which must have joined.
inline std::vector<RankIdentity> identities(StoreConnection& connection) {
  std::vector<RankIdentity> all;
  for (const KnownRank& one : RunClient(connection, request_timeout).members())
    all.push_back(one.identity.value_or(RankIdentity{}));
  return all;
}

/// Returns an unguessable secret. Throws Error if getrandom fails.
inline std::string random_secret() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
    throw Error(formatted("cannot make a secret for the store: {}", std::strerror(errno)));
  std::string text;
  for (const unsigned char byte : bytes) text += formatted("{:02x}", byte);
  return text;
}

/// Hosts a store on a socket that already listens, for the generation that has `began`. Returns its first connection; the
/// store ends with that.
inline std::shared_ptr<StoreConnection> host_store(Listener listener, const std::string& secret,
                                                   std::chrono::milliseconds timeout,
                                                   const Event& began = {}) {
  StoreEndpoint own{listener.address, listener.port, secret};
  own.restart = began.restart;
  auto server = std::make_shared<StoreServer>(std::move(listener), secret, hello_timeout, end_grace, began);
  auto connection = std::make_shared<StoreConnection>(own, timeout);
  connection->keep(std::move(server));
  return connection;
}

/// Returns a connection to the store of this run at `endpoint`, null if there is none.
inline std::unique_ptr<StoreConnection> store_at(const StoreEndpoint& endpoint) try {
  return std::make_unique<StoreConnection>(endpoint, last_request_timeout);
} catch (const RendezvousError&) {
  return nullptr;
}

/// Listens where rank 0 hosts the store. `all_here`: every rank is on this host. Returns no listener if a store of lockstep
/// with this secret answers there: another process has the rank 0, and signing in at its store names both. Throws as
/// listen_on.
inline std::optional<Listener> listen_as_rank_zero(const StoreEndpoint& endpoint, bool all_here) {
  try {
    auto listener = listen_on(endpoint.host, endpoint.port, endpoint.origin);
    if (!all_here && listener.host_is_elsewhere)
      listener.doubt = formatted(
          "{} is no address of this host ({}): rank 0 must run on the host that it names",
          endpoint.origin.empty() ? endpoint.host : endpoint.origin.substr(0, endpoint.origin.find(", ")),
          host_name());
    else if (!all_here &&
             (names_loopback(endpoint.host) || endpoint.host == "0.0.0.0" || endpoint.host == "::"))
      listener.doubt =
          formatted("ranks on other hosts cannot reach this one ({}) by the address {} of rank 0",
                    host_name(), endpoint.host);
    return listener;
  } catch (const PortInUse&) {
    if (store_at(endpoint)) return std::nullopt;
    throw;
  }
}

/// Ends the rendezvous on all ranks with an error, and throws it on this rank. `late` is the rank that all the others
/// have waited for. If all ranks of the run have joined before, the run goes on, and rank 0 logs a warning.
[[noreturn]] inline void refuse_rendezvous(RunClient run, const std::string& text, int late = -1) {
  const Failure refusal{.kind = late < 0 ? FailureKind::error : FailureKind::timed_out,
                        .rank = process_rank.load(),
                        .cause = late,
                        .call = {.operation = rendezvous},
                        .message = text};
  try {
    run.publish({.kind = Event::refused, .failure = refusal});
  } catch (const StoreError&) {  // the error is thrown below
  }
  throw RendezvousError(refusal);
}

/// Returns the error of two processes with the rank of `env`.
inline std::string duplicate_text(const Environment& env, const std::string& owner, const std::string& me) {
  const bool command = env.launcher == "--nproc";  // whose RANK is the first of its ranks
  const std::string variables = env.rank_variables.empty() ? "rank" : env.rank_variables;
  const auto name = variables.substr(0, variables.find(','));
  const auto number = command ? formatted("{} and --nproc {}", env.rank - env.local_rank, env.local_size)
                              : std::to_string(env.rank);
  return formatted(
      "rank {} is claimed by {} and {}, the latter with {}={}: give every {} its own {}{}, and every run a "
      "MASTER_PORT of its own",
      env.rank, owner, me, name, number, command ? "command" : "process", name,
      command ? ", the first of its ranks" : "");
}

/// Joins the run as `me`. Refuses the rendezvous on all ranks if another process has the same rank, or if the ranks disagree on
/// their number. Does not wait for any other rank. A rank that joins only to tell its failure passes `stays` = false: it
/// does not count as present.
inline void join_run(RunClient run, const Environment& env, const RankIdentity& me, bool stays = true) {
  const JoinAnswer answer = run.join(env.rank, env.size, me, stays);
  if (answer.size != env.size) {
    const std::string size_name = env.launcher.ends_with(" with --nproc") ? "--nproc"
                                  : env.rank_variables.empty()
                                      ? "world size"
                                      : env.rank_variables.substr(env.rank_variables.rfind(' ') + 1);
    refuse_rendezvous(
        run, formatted("the ranks disagree on their number: rank {} says world size {}, rank {} says {}. "
                       "Start all of them with one {}",
                       env.rank, env.size, answer.sized_by, answer.size, size_name));
  }
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
  // The numbers do not determine the address, and may be the fault: any other rank than 0 will do.
  const bool by_hand = process_variable("RANK") || !launcher_of(process_variable);
  const Variables variables = [&](const char* name) -> std::optional<std::string> {
    const std::string_view wanted = name;
    if (by_hand && wanted == "RANK") return process_variable(name) == "0" ? "0" : "1";
    if (by_hand && wanted == "WORLD_SIZE") return "2";
    for (const char* other :
         {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "SLURM_NODEID"})
      if (wanted == other) return std::nullopt;
    return process_variable(name);
  };
  const Environment env = read_environment(variables);
  if (env.rendezvous.empty() || env.rank == 0) return;  // rank 0 hosts the store
  const auto url = parse_rendezvous(env.rendezvous);
  StoreConnection store({url.host, url.port, env.store_secret}, last_request_timeout);
  refuse_rendezvous({store, last_request_timeout},
                    formatted("{} cannot join: {}", process_name(getpid()), text));
} catch (const Error&) {  // no store answers, or refuse_rendezvous has thrown
}

/// Joins at a store at the rank 0 address on another host, if there is one: it belongs to another process that has the rank
/// 0, and both runs are refused by names. If that address leads to this rank's own store, as the forwarded port of a
/// container does, this is a no-op.
inline void refuse_other_rank_zero(const Environment& env, const RankIdentity& me) {
  const auto url = parse_rendezvous(env.rendezvous);
  if (const auto other = store_at({url.host, url.port, env.store_secret})) try {
      join_run({*other, last_request_timeout}, env, me);
    } catch (const StoreError&) {
    }
}

/// Returns a text on demand; an empty one where nothing is to be said yet.
using LazyText = std::function<std::string()>;

/// Blocks until every rank has joined. Returns whether they are on several hosts. Calls `waiting` from time to time with a
/// text such as "rank 2 of 3", which costs a request, and is empty while ranks still come. Throws RendezvousError, with one
/// text on all ranks, if a rank was refused or is missing at `deadline`, and PeerError if a rank has failed, or has ended
/// before it joined.
inline bool await_ranks(StoreConnection& connection, const Environment& env,
                        std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds timeout,
                        const std::function<void(const LazyText& who)>& waiting) {
  using Clock = std::chrono::steady_clock;
  const FailedCall call{.operation = rendezvous, .served = served_call.name ? served_call.name : ""};
  const auto look = [&] {
    try {
      return RunClient(connection, std::min(timeout, outcome_timeout)).summary("");
    } catch (const StoreError& error) {
      throw RendezvousError(Failure{
          .rank = env.rank, .message = formatted("the rendezvous failed: {}", printable(error.what()))});
    }
  };
  const auto missing = [&](const RunSummary& late, const std::string& text) {
    return formatted("{} of {}{}{}{}", late.meeting.missing_text(), env.size, text,
                     late.hints.empty() ? "" : "; ", late.hints);
  };
  // Under load a rank may take long to come. While it works nobody has to be told, up to the interval of the notices.
  const auto tells = std::min(deadline, Clock::now() + notice_interval);
  std::map<pid_t, Milliseconds> cpu_times;
  std::optional<Meeting> met;
  while (!met) {
    const auto begin = Clock::now();
    try {
      met = RunClient(connection,
                      std::clamp(deadline, begin + std::chrono::milliseconds(1), begin + outcome_interval))
                .meet({}, {}, true);
    } catch (const StoreLost& error) {
      throw RendezvousError(  // of no call: another start may mend it
          Failure{.rank = env.rank,
                  .message =
                      formatted("the rendezvous has ended without all ranks: {}", printable(error.what()))});
    } catch (const StoreError&) {  // not all have come within the timeout
      if (Clock::now() < deadline) {
        const bool work = report_descriptor() >= 0 && env.local_rank == 0 && Clock::now() < tells &&
                          siblings_work(cpu_times, least_progress);
        waiting([&]() -> std::string {
          if (work) return {};
          try {
            const auto late = look();
            const bool come = Milliseconds(late.quiet) < first_notice || late.meeting.over();
            return come ? std::string() : missing(late, "");
          } catch (const RendezvousError&) {
            return "the store of the run, which does not answer";
          }
        });
        continue;
      }
      const auto late = look();
      const bool one = late.meeting.missing == 1;
      const bool by_hand = env.launcher.empty() || env.launcher == "--nproc";
      const std::string them = one ? "it" : "them";
      const auto remedy =
          by_hand ? formatted("start {} with the MASTER_ADDR, MASTER_PORT and WORLD_SIZE of the others", them)
                  : formatted("look at the output of {}, which starts {}", env.launcher, them);
      if (!late.meeting.over())
        refuse_rendezvous({connection, std::min(timeout, outcome_timeout)},
                          missing(late, formatted(" did not join within {} s: {}",
                                                  std::chrono::duration<double>(timeout).count(), remedy)),
                          one ? late.meeting.first_missing.at(0) : -1);
      met = late.meeting;
    }
  }
  if (met->end && met->end->kind == Event::refused) {
    met->end->failure.rank = env.rank;
    throw RendezvousError(met->end->failure);
  }
  if (met->end) throw PeerError(consequence_of(met->end->failure, env.rank, call));
  if (met->missing > 0)
    throw PeerError(consequence_of(ended_early(met->ended, env.rank, call), env.rank, call));
  return met->several_hosts;
}

}  // namespace lockstep::inline v0_1::detail
