#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/library_log.hpp"
#include "lockstep/world/detail/nccl_environment.hpp"
#include "lockstep/world/detail/place.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/run_end.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/worker.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/launch.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// Starts this host's ranks and hosts the store for all hosts; again after a failure, as often as `place` says. Returns the
/// exit code.
inline int launch_here(const Place& place, int argc, const char* const* argv, const LaunchOptions& options) {
  const auto grace = std::clamp<Milliseconds>(options.grace, {}, longest_wait);
  const Environment& env = place.environment;
  const bool alone = env.rendezvous.empty();
  const auto url = alone ? RendezvousUrl{} : parse_rendezvous(env.rendezvous);
  // A run on one host needs no shared secret.
  const auto secret = alone ? random_secret() : env.store_secret;
  std::optional<Listener> listener;
  if (env.rank == 0)
    listener =
        listen_as_rank_zero({alone ? loopback_address() : url.host, url.port, secret, env.rendezvous_origin},
                            place.nproc == env.size);
  const bool hosting = listener.has_value();
  // The ranks here need no address that leads to this host from elsewhere.
  const bool local = alone || (hosting && listener->host_is_elsewhere);
  const auto rendezvous =
      local ? detail::formatted("tcp://{}:{}", loopback_address(), listener->port) : env.rendezvous;

  for (Event began;;) {
    const auto restart = static_cast<int>(began.restart);
    StoreEndpoint endpoint{url.host, url.port, secret};
    endpoint.restart = restart;
    SupervisorOptions supervised;
    supervised.arguments.assign(argv, argv + argc);
    supervised.jobs = jobs_of(place, rendezvous, secret, restart);
    supervised.prefix = place.prefix;
    supervised.grace = grace;
    std::shared_ptr<StoreConnection> store;
    // The store's threads start after the ranks have been forked. Until then the ranks queue at the listener.
    supervised.started = [&] {
      if (hosting) store = host_store(same_port(*listener), secret, request_timeout, began);
    };
    // A killed rank cannot report its failure. Ranks here may handle SIGTERM, and would wait for it.
    supervised.failed = [&](Failure failure) {
      if (failure.kind == FailureKind::consequence) return;
      failure.host = host_name();
      at_most(publish_limit,
              [failure, endpoint, size = env.size, store, process = process_name(failure.pid)] {
                const Event failed{.kind = Event::failed, .failure = failure};
                if (store) return static_cast<void>(RunClient(*store, greeting_timeout).publish(failed));
                StoreConnection connection(endpoint, greeting_timeout);
                RunClient run(connection, greeting_timeout);
                const RankIdentity rank{.process = process, .host = host_identity()};
                const auto known = run.join(failure.rank, size, rank, false);
                if (known.size == size && known.rank.is(rank))  // else it is the store of another run
                  run.publish(failed);
              });
    };
    supervised.ended_well = [&](int rank) {  // one that has not joined never will
      if (hosting)
        at_most(request_timeout, [store, rank] {
          RunClient(*store, request_timeout)
              .publish({.kind = Event::ended, .rank = rank, .failure = {.code = 0}});
        });
    };
    Supervisor supervisor(std::move(supervised));
    const int code = supervisor.run();
    const LauncherScope notices(notice_signals);
    const auto limit = grace + regroup_limit;
    const bool more = !alone && restart < place.max_restarts && !supervisor.interrupted();
    OwnEnd own{.well = code == 0,
               .failure = supervisor.failure(),
               .size = alone ? 0 : env.size,
               .is_read = !alone && place.max_restarts > 0};
    if (more) own.again = limit;
    if (more && !hosting && own.asks()) try {
        store = std::make_shared<StoreConnection>(endpoint, last_request_timeout);
      } catch (const LateStart& late) {  // the others have been started again meanwhile
        own.failure = late.failure();
      } catch (const RendezvousError&) {  // all has ended
      }
    const RunEnd end = store ? outlive_ranks(*store, own) : RunEnd(own, {});
    const auto failure = end.to_mend();
    if (!failure) return own.well ? code_of(end.failure()) : code;
    const int last = own.well ? failure->code : code;
    if (notices.next_signal() != 0) return last;
    // Hosts whose ranks have ended well read that it goes on.
    if (more && hosting) std::this_thread::sleep_for(reading_grace);
    const auto next =
        next_start(restart + 1, place.max_restarts, hosting ? std::nullopt : std::optional(endpoint), limit);
    if (!next || notices.next_signal() != 0) return last;
    began = {.kind = Event::began, .failure = *failure, .restart = *next};
  }
}

LOCKSTEP_INLINE int launch_ranks(int argc, const char* const* argv,
                                 const std::function<int(const World&, int argc, char** argv)>& fn,
                                 const LaunchOptions& options) {
  fill_standard_descriptors();
  end_on_uncaught();
  end_with_agent();
  Place place;
  try {
    place = resolve(argc, argv, options);
    // Here and in the ranks that it starts; before any CUDA call, since CUDA reads its variable once.
    if (!options.gpus.empty()) setenv("CUDA_VISIBLE_DEVICES", options.gpus.c_str(), 1);
    if (place.timeout) setenv("LOCKSTEP_TIMEOUT", std::to_string(*place.timeout).c_str(), 1);
    if (!place.worker) return launch_here(place, argc, argv, options);
  } catch (const Error&) {
    fail_process(failure_of(std::current_exception()));
  }
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a killed rank must not lose its last lines
  keep_freed_memory();
  set_nccl_environment();
  int code = 0;
  run_without_handlers([&] {
    const World world =
        world_from(place.environment, {.threads = place.threads.value_or(WorldOptions::share)}, true);
    if (!options.gpus.empty()) require_one_each(options.gpus, world.local_size());
    if (world.size() > 1) {
      quiet_library_log();
      const auto* kept = new World(world);  // never destroyed: any thread may end the process
      announce_end(state_of(*kept));
    }
    if (place.max_restarts > 0 && report_descriptor() < 0)
      world.log.warning("--max-restarts has no effect: each rank was started by {}",
                        place.environment.launcher.empty() ? "hand" : place.environment.launcher);
    auto arguments = program_arguments(argc, argv, options);
    const pid_t owner = getpid();
    bool stopped = false;
    try {
      code = exit_status(fn(world, static_cast<int>(arguments.size() - 1), arguments.data()));
      if (getpid() != owner) std::exit(code);  // a forked child: its main thread runs in the parent alone
    } catch (const Stopped& stop) {            // on every rank; any other exception still finds no handler
      world.log.warning("{}", stop.what());
      code = stopped_exit_code;
      stopped = true;
    }
    flush_stdout();
    try {
      const int ended = state_of(world).end(stopped ? 0 : code, true);
      if (!stopped) code = ended;
    } catch (const std::exception&) {  // the store has ended, and the other ranks with it
    }
  });
  return code;
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

LOCKSTEP_INLINE std::vector<char*> program_arguments(int argc, const char* const* argv,
                                                     const LaunchOptions& options) {
  return detail::parse_command_line(argc, argv, options).rest;
}

LOCKSTEP_INLINE std::string launch_help(const LaunchOptions& options) {
  std::string help;
  const auto nproc = options.nproc > 0 ? std::to_string(options.nproc) : "one per GPU, or 1 without GPUs";
  for (const detail::LaunchFlag& flag : detail::launch_flags)
    if (options.*flag.is_read)
      help += detail::formatted("  {:<22} {}{}\n", flag.usage, flag.help,
                                flag.name() == "--nproc" ? " (" + nproc + ")" : "");
  return help;
}

}  // namespace lockstep::inline v0_1
