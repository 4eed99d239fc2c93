#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/process.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::inline v0_1::detail {

/// The flags of `launch` in a command line, and the program's own arguments.
struct CommandLine {
  std::map<std::string_view, std::string_view> values;  ///< by LaunchFlag::name(); the last occurrence counts
  std::string_view without_value;                       ///< a flag at the end, empty if there is none
  std::vector<char*> rest;                              ///< with a final null pointer as in main's argv
};

/// Reads `--flag VALUE` and `--flag=VALUE` up to `--`.
inline CommandLine parse_command_line(int argc, const char* const* argv, const LaunchOptions& options) {
  CommandLine line;
  bool over = false;  // after `--`
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i], name = argument.substr(0, argument.find('='));
    over = over || argument == "--";
    const auto* flag = std::find_if(std::begin(launch_flags), std::end(launch_flags), [&](const auto& known) {
      return options.*known.is_read && known.name() == (name == "--nproc-per-node" ? "--nproc" : name);
    });
    if (i == 0 || over || flag == std::end(launch_flags))
      line.rest.push_back(const_cast<char*>(argv[i]));  // argv of main, which a program may change
    else if (name.size() < argument.size())
      line.values[flag->name()] = argument.substr(name.size() + 1);
    else if (++i < argc)
      line.values[flag->name()] = argv[i];
    else
      line.without_value = name;
  }
  line.rest.push_back(nullptr);
  return line;
}

/// What this process is in its run.
struct Place {
  bool worker = false;  ///< a rank; otherwise the process launches the `nproc` ranks of its host
  /// The worker's place. For a launching process: the lowest of its ranks, the number of all ranks, and the
  /// rendezvous across hosts, which is empty if all ranks are on this host.
  Environment environment = {};
  int nproc = 1;
  Prefix prefix = Prefix::automatic;
  std::optional<int> timeout = {};  ///< of collectives, in seconds: LOCKSTEP_TIMEOUT of the ranks
  std::optional<int> threads = {};  ///< of each rank
  int max_restarts = 0;
};

/// Returns what this process is, from the command line and the environment. A process that srun, mpirun or
/// mpiexec has started once on each host launches ranks if it is given their number. Throws UsageError if
/// command line and environment contradict each other.
inline Place resolve(int argc, const char* const* argv, const LaunchOptions& options,
                     const Variables& variables = process_variable) {
  Place place{.prefix = options.prefix};
  const CommandLine line = parse_command_line(argc, argv, options);
  if (!line.without_value.empty())
    throw UsageError(formatted("{} needs a value after it", line.without_value));
  if (const auto when = line.values.find("--prefix"); when != line.values.end()) {
    const std::string_view word = when->second;
    if (word != "auto" && word != "always" && word != "never")
      throw UsageError(formatted("--prefix {} is unknown: it must be auto, always or never", word));
    place.prefix = word == "auto" ? Prefix::automatic : word == "always" ? Prefix::always : Prefix::never;
  }
  const auto count = [&](std::string_view flag, std::string_view unit, int least = 1) -> std::optional<int> {
    const auto given = line.values.find(flag);
    if (given == line.values.end()) return std::nullopt;
    const auto value = whole_number(given->second);
    if (!value || *value < least)
      throw UsageError(formatted("{} {} is not a number of {}: it must be a whole number, {} or more", flag,
                                 given->second, unit, least));
    return value;
  };
  place.timeout = count("--timeout", "seconds");
  place.threads = count("--threads", "threads");
  const auto own = [](std::int64_t given) {
    return static_cast<int>(std::min<std::int64_t>(given, INT_MAX));
  };
  place.max_restarts = count("--max-restarts", "restarts", 0).value_or(own(options.max_restarts));
  if (place.max_restarts < 0)
    throw UsageError(
        formatted("LaunchOptions::max_restarts = {} is negative: give 0 or more", place.max_restarts));
  for (const char* name : {"LOCKSTEP_TIMEOUT", "LOCKSTEP_HEARTBEAT_TIMEOUT"})
    integer_variable(variables, name, 1);
  require_level(variables);
  const int gpus = options.gpus.empty() ? 0 : count_gpus(options.gpus, variables);
  const auto flag = count("--nproc", "processes");
  auto nproc = flag;
  auto given = formatted("--nproc {}", flag.value_or(0));  // what determines `nproc`, for errors
  if (!nproc && options.nproc <= 0 && gpus > 0) {          // as many as the user has named
    nproc = gpus;
    given = formatted("the {} GPUs {}", gpus, options.gpus);
  }
  // More processes than this host can use would exhaust its memory before they print anything.
  const auto require_sane = [&] {
    constexpr std::int64_t for_each_core = 64;
    if (const int cores = usable_cores(); *nproc > for_each_core * cores)
      throw UsageError(formatted("{} is more than {} processes for each of the {} cores here: start fewer",
                                 given, for_each_core, cores));
  };
  Environment& env = place.environment;
  const auto launched = launched_environment(variables, flag.value_or(0));
  const bool by_hand = variables("RANK").has_value();
  const bool first_of_host = by_hand && !variables("LOCAL_RANK");
  if (launched || by_hand) {
    env = launched ? *launched : environment_by_hand(variables, first_of_host ? nproc.value_or(1) : 1);
    const bool alone_here = launched && env.launched && env.local_size == 1;
    const bool launches = nproc.value_or(1) > 1 || (nproc && place.max_restarts > 0);
    if (launches && (first_of_host || alone_here)) {
      require_sane();
      if (alone_here) {
        if (std::int64_t{env.size} * *nproc > most_ranks)
          throw UsageError(formatted("{} on each of {} hosts are more than {} ranks: start fewer", given,
                                     env.size, most_ranks));
        env.rank *= *nproc;
        env.size *= *nproc;
        require_size(variables, env);
      } else if (std::int64_t{env.rank} + *nproc > env.size) {
        throw UsageError(
            formatted("RANK={} is this host's first rank, and with {} its last is {}: WORLD_SIZE={} allows "
                      "no rank above {}",
                      env.rank, given, std::int64_t{env.rank} + *nproc - 1, env.size, env.size - 1));
      }
      place.nproc = *nproc;
      return place;
    }
    if (flag && !first_of_host && !(env.launched && env.local_size == *flag))
      throw UsageError(formatted(
          "{} contradicts {}, which has started {} ({}): leave --nproc out{}", given,
          env.launcher.empty() ? "the launcher that has set LOCAL_RANK" : env.launcher,
          env.launched ? formatted("{} of {} ranks on this host", env.local_size, env.size) : "this process",
          env.rank_variables, launched ? ", or start one process on each host" : ""));
    if (launched) require_size(variables, env);
    place.worker = true;
    return place;
  }

  // Without RANK each host would train on its own, and no line would say so. A loopback address names no other host.
  const auto size = size_variable(variables, "WORLD_SIZE");
  if (const auto local = variables("LOCAL_RANK"))
    throw UsageError(formatted("LOCAL_RANK={} is set but RANK is not: set both, or neither", *local));
  if (size > 1 && !names_loopback(variables("MASTER_ADDR").value_or("localhost")))
    environment_by_hand(variables);
  if (!nproc) {
    nproc = size ? *size : options.nproc > 0 ? own(options.nproc) : std::max(visible_gpus(), 1);
    given = (size                ? "WORLD_SIZE="
             : options.nproc > 0 ? "LaunchOptions::nproc = "
                                 : "the number of GPUs, ") +
            std::to_string(*nproc);
  }
  if (size && *size != *nproc)
    throw UsageError(
        formatted("WORLD_SIZE={} contradicts {}: on one host leave WORLD_SIZE out, on several set RANK "
                  "to this host's first rank",
                  *size, given));
  require_sane();
  place.nproc = env.size = *nproc;
  place.worker = place.nproc == 1 && place.max_restarts == 0;
  if (place.worker) env = environment_by_hand(variables);
  return place;
}

/// Returns what the environment of each rank that a launching process starts adds to its own. `secret` is its
/// store's secret, and `restart` how often they have been started again.
inline std::vector<Job> jobs_of(const Place& place, const std::string& rendezvous,
                                const std::string& secret = {}, int restart = 0) {
  const auto url = parse_rendezvous(rendezvous);
  const auto& launcher = place.environment.launcher;
  std::vector<std::string> common{formatted("WORLD_SIZE={}", place.environment.size),
                                  formatted("LOCAL_WORLD_SIZE={}", place.nproc),
                                  formatted("MASTER_ADDR={}", url.host),
                                  formatted("MASTER_PORT={}", url.port),
                                  "LOCKSTEP_STORE_IS_HOSTED=" + (launcher.empty() ? "1" : launcher),
                                  formatted("TORCHELASTIC_RESTART_COUNT={}", restart),
                                  "TORCHELASTIC_USE_AGENT_STORE",
                                  "TORCHELASTIC_ERROR_FILE"};
  if (!secret.empty()) common.push_back(formatted("LOCKSTEP_STORE_SECRET={}", secret));
  if (place.threads || !process_variable("OMP_NUM_THREADS"))
    common.push_back(
        formatted("OMP_NUM_THREADS={}", place.threads.value_or(std::max(1, usable_cores() / place.nproc))));
  if (isatty(1) == 1) {
    common.push_back("LOCKSTEP_TTY=1");
    if (winsize window{}; ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 0)
      common.push_back(formatted("COLUMNS={}", window.ws_col));
  }
  std::vector<Job> jobs;
  for (int i = 0; i < place.nproc; ++i) {
    jobs.push_back({place.environment.rank + i, common});
    jobs.back().environment.push_back(formatted("RANK={}", place.environment.rank + i));
    jobs.back().environment.push_back(formatted("LOCAL_RANK={}", i));
  }
  return jobs;
}

}  // namespace lockstep::inline v0_1::detail
