#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/world/launch_options.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// Does what launch() does. `fn` returns the exit code of its rank.
int launch_ranks(int argc, const char* const* argv,
                 const std::function<int(const World&, int argc, char** argv)>& fn,
                 const LaunchOptions& options);

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

/// Returns the command line without the flags that `launch` reads (see LaunchOptions) and their values, with
/// a final null pointer as in main's argv. For a program that parses its arguments before `launch`.
std::vector<char*> program_arguments(int argc, const char* const* argv, const LaunchOptions& options = {});

/// Returns the help text of the flags that `launch` reads, one line each, for the program's own `--help`.
std::string launch_help(const LaunchOptions& options = {});

/// Runs `fn(World)` or `fn(World, argc, argv)` on every rank of the run. Call it as main's last statement.
///
/// Under torchrun, srun, mpirun and mpiexec this process is one rank. Otherwise it starts `--nproc N`
/// processes of this program with the same arguments, relays their output lines and signals, and ends all of
/// them when one fails. Returns the exit code: 0; the nonzero value that `fn` returned; 2 after a UsageError;
/// 75 after Stopped (see StopOnSignal); 1 after another exception; 128 + signal for a killed rank.
/// Counterpart: torchrun, torch.multiprocessing.spawn.
///
/// `fn(World, int argc, char** argv)` gets the command line without lockstep's own flags (see LaunchOptions)
/// and their values, for the program's own parser. Arguments after `--` belong to the program.
///
/// Signals: forwards SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 to its ranks, whichever thread
/// receives them. A signal that is ignored at the start (`nohup`) stays ignored. A second SIGINT, SIGTERM or
/// SIGQUIT of the same kind kills the ranks; a second SIGHUP does not, since a closing terminal sends two.
///
/// Several hosts, started by hand: RANK is this host's first rank, so that this command starts ranks 3 to 6:
///
///   WORLD_SIZE=7 RANK=3 MASTER_ADDR=a MASTER_PORT=29500 prog --nproc 4
///
/// srun, mpirun or mpiexec may start that command once on each host instead, with the same N everywhere. It
/// then determines RANK and WORLD_SIZE, and srun also the address:
///
///   srun -N 2 --ntasks-per-node=1 prog --nproc 4
///
/// Any process that reaches that port can take part in the run, unless LOCKSTEP_STORE_SECRET is set to the
/// same text on all hosts.
///
/// `--timeout SECONDS` (or LOCKSTEP_TIMEOUT) sets the default timeout of collectives. A rank's heap keeps
/// freed memory, unless the user sets MALLOC_TRIM_THRESHOLD_. An exception from `fn` ends the whole run; no
/// destructor runs in the rank that threw.
template <class Fn>
int launch(int argc, const char* const* argv, Fn&& fn, const LaunchOptions& options = {}) {
  static_assert(std::is_invocable_v<Fn, World> || std::is_invocable_v<Fn, World, int, char**>,
                "lockstep: launch takes a function that is called as fn(World) or as fn(World, int argc, "
                "char** argv)");
  return detail::launch_ranks(
      argc, argv,
      [&](const World& world, int count, char** arguments) -> int {
        const auto call = [&]() -> decltype(auto) {
          if constexpr (std::is_invocable_v<Fn, World>)
            return fn(world);
          else
            return fn(world, count, arguments);
        };
        if constexpr (std::is_void_v<decltype(call())>) {
          call();
          return 0;
        } else {
          return call();
        }
      },
      options);
}

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/launch-inl.hpp"
#endif
