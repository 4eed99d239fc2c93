#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/cpu_affinity.hpp"
#include "lockstep/world/detail/gpus.hpp"
#include "lockstep/world/detail/supervisor.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {

using Flags = std::vector<std::string_view>;

/// The spellings of the flag for the number of processes.
inline const Flags nproc_flags{"--nproc", "--nproc-per-node"};

/// Returns 1 for `--flag`, 2 for `--flag=VALUE`, 0 for any other argument.
inline int matches_flag(std::string_view argument, std::string_view flag) {
  if (!argument.starts_with(flag)) return 0;
  return argument.size() == flag.size() ? 1 : argument[flag.size()] == '=' ? 2 : 0;
}

/// Returns the value of `--flag VALUE` or `--flag=VALUE` in a command line. The last occurrence before `--`
/// counts. Throws UsageError for a flag without a value.
inline std::optional<std::string> argument_value(int argc, const char* const* argv, const Flags& flags) {
  std::optional<std::string> value;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--") break;
    for (const std::string_view flag : flags) {
      const int match = matches_flag(argument, flag);
      if (match == 1 && ++i == argc) throw UsageError(detail::formatted("{} needs a value after it", flag));
      if (match == 1) value = argv[i];
      if (match == 2) value = argument.substr(flag.size() + 1);
      if (match != 0) break;
    }
  }
  return value;
}

/// Returns the value of a flag that gives a number of `unit`. Throws UsageError unless it is a whole number
/// of at least 1.
inline std::optional<int> count_argument(int argc, const char* const* argv, const Flags& flags,
                                         std::string_view unit) {
  const auto text = argument_value(argc, argv, flags);
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (!value || *value < 1)
    throw UsageError(detail::formatted("{} {} is not a number of {}: it must be a whole number, 1 or more",
                                       flags[0], *text, unit));
  return value;
}

/// Returns the value of `--prefix auto|always|never`. Throws UsageError for any other value.
inline std::optional<Prefix> prefix_argument(int argc, const char* const* argv) {
  const auto text = argument_value(argc, argv, {"--prefix"});
  if (!text) return std::nullopt;
  if (*text == "auto") return Prefix::automatic;
  if (*text == "always") return Prefix::always;
  if (*text == "never") return Prefix::never;
  throw UsageError(detail::formatted("--prefix {} is unknown: it must be auto, always or never", *text));
}

/// How `launch` runs: as one worker, or as the launching process of `nproc` ranks, of which `first` is the lowest.
struct LaunchPlan {
  bool worker = false;
  Variables variables;  ///< that the worker's World reads
  int nproc = 1;
  int first = 0;
  int size = 1;
  Prefix prefix = Prefix::automatic;
  std::string rendezvous;  ///< across hosts; empty if all ranks are on this host
  RendezvousOrigin rendezvous_origin;
  std::string visible_devices;  ///< CUDA_VISIBLE_DEVICES of the ranks; empty: unchanged
  std::optional<int> timeout;   ///< of collectives, in seconds: LOCKSTEP_TIMEOUT of the ranks
  std::optional<int> threads;   ///< of each rank
};

/// Throws UsageError for more processes than this host can use: they would exhaust its memory before they
/// print anything. `given` names what determines `nproc`.
inline void require_sane(int nproc, const std::string& given) {
  constexpr std::int64_t for_each_core = 64;
  if (const int cores = usable_cores(); nproc > for_each_core * cores)
    throw UsageError(
        detail::formatted("{} is more than {} processes for each of the {} cores here: start fewer", given,
                          for_each_core, cores));
}

/// Returns whether the environment names an address at which ranks of several hosts can meet. A loopback
/// address does not.
inline bool names_other_hosts(const Variables& variables) {
  const auto address = variables("MASTER_ADDR");
  return address && !names_loopback(*address);
}

/// Plans the launch from the command line and the environment. Throws UsageError if they contradict each other.
inline LaunchPlan plan_launch(int argc, const char* const* argv, const LaunchOptions& options,
                              const Variables& given = process_variable) {
  LaunchPlan plan;
  if (options.nproc < 0)
    throw UsageError(detail::formatted("LaunchOptions::nproc is {}: it must be a number of processes, or 0",
                                       options.nproc));
  auto nproc = options.nproc_flag ? count_argument(argc, argv, nproc_flags, "processes") : std::nullopt;
  // In Slurm's batch script, --nproc starts ranks on the script's host alone.
  plan.variables = nproc ? without_batch_job(given) : given;
  const auto found = find_launched_rank(plan.variables);
  const Variables variables = with_launched_rank(plan.variables, found);
  const std::string flag = options.nproc_flag ? "--nproc" : "LaunchOptions::nproc";
  // What has determined `nproc`, for errors.
  std::string given_nproc = nproc ? detail::formatted("{} {}", flag, *nproc) : std::string();
  const auto gpus = options.gpus.empty() ? std::vector<int>{} : gpu_list(options.gpus);
  if (!gpus.empty()) plan.visible_devices = visible_devices_of(gpus, variables);
  plan.prefix = options.prefix;
  if (options.prefix_flag) plan.prefix = prefix_argument(argc, argv).value_or(options.prefix);
  if (options.timeout_flag) plan.timeout = count_argument(argc, argv, {"--timeout"}, "seconds");
  if (options.threads_flag) plan.threads = count_argument(argc, argv, {"--threads"}, "threads");
  integer_variable(variables, "LOCKSTEP_TIMEOUT", 1);
  const auto size = integer_variable(variables, "WORLD_SIZE", 1);
  const auto rank = integer_variable(variables, "RANK", 0);
  const auto local_rank = integer_variable(variables, "LOCAL_RANK", 0);
  integer_variable(variables, "LOCAL_WORLD_SIZE", 1);
  require_level(variables);
  if (local_rank && !rank)
    throw UsageError(
        detail::formatted("LOCAL_RANK={} is set but RANK is not: set both, or neither", *local_rank));
  if (local_rank) {
    const auto env = read_environment(variables);
    if (nproc && env.expected_local_rank)
      throw UsageError(
          detail::formatted("{} {} contradicts LOCAL_RANK={}, which is the place of one process that has "
                            "started: leave {} out, or "
                            "unset LOCAL_RANK",
                            flag, *nproc, *local_rank, flag));
    const bool contradicts = nproc && variables("LOCAL_WORLD_SIZE") && *nproc != env.local_size;
    if (contradicts && found)
      throw UsageError(detail::formatted(
          "{} {} contradicts {}, which has started {} of {} ranks on this host ({}): leave {} out", flag,
          *nproc, found->launcher, env.local_size, env.size, found->variables, flag));
    if (contradicts)
      throw UsageError(detail::formatted(
          "{} {} contradicts LOCAL_WORLD_SIZE={}: the launcher has already started this host's "
          "processes, so leave {} out",
          flag, *nproc, env.local_size, flag));
    plan.worker = true;
    return plan;
  }
  if (found) {  // a launcher that assigns no local ranks
    if (nproc)
      throw UsageError(
          detail::formatted("{} {} contradicts {}, which has started this process ({}): leave {} out", flag,
                            *nproc, found->launcher, found->variables, flag));
    plan.worker = true;
    return plan;
  }
  // A default, which RANK and WORLD_SIZE replace. The GPUs are as many as the user has named.
  if (!nproc && options.nproc > 0 && !rank && !size) {
    nproc = options.nproc;
    given_nproc = detail::formatted("LaunchOptions::nproc = {}", *nproc);
  }
  if (!nproc && options.nproc == 0 && !gpus.empty()) {
    nproc = static_cast<int>(gpus.size());
    given_nproc = detail::formatted("the {} GPUs {}", *nproc, options.gpus);
  }
  if (rank) {
    plan.nproc = nproc.value_or(1);
    if (plan.nproc == 1) {
      read_environment(variables);
      plan.worker = true;
      return plan;
    }
    require_sane(plan.nproc, given_nproc);
    if (!size)
      throw UsageError(detail::formatted(
          "RANK={} is set but WORLD_SIZE is not: set WORLD_SIZE to the number of all ranks", *rank));
    if (std::int64_t{*rank} + plan.nproc > *size)
      throw UsageError(
          detail::formatted("RANK={} is this host's first rank, and with {} its last is {}: WORLD_SIZE={} "
                            "allows no rank above {}",
                            *rank, given_nproc, std::int64_t{*rank} + plan.nproc - 1, *size, *size - 1));
    plan.first = *rank;
    plan.size = *size;
    // Also if these are all ranks: a host that is started with another WORLD_SIZE is then refused.
    plan.rendezvous = rendezvous_url(variables, plan.nproc < plan.size);
    plan.rendezvous_origin = rendezvous_origin(given, std::nullopt);
    return plan;
  }
  // Without RANK each host would train on its own, and no line would say so.
  if (size && *size > 1 && names_other_hosts(variables))
    throw UsageError(
        detail::formatted("WORLD_SIZE={} is set but RANK is not: set RANK to this process's number, 0 to {}, "
                          "or to the first of this host's ranks with {}; for a run on this host alone unset "
                          "WORLD_SIZE",
                          *size, *size - 1, flag));
  if (!nproc) {
    nproc = size ? *size : std::max(visible_gpus(), 1);
    given_nproc = size ? detail::formatted("WORLD_SIZE={}", *size) : std::string("one process per GPU");
  }
  if (size && *size != *nproc)
    throw UsageError(detail::formatted(
        "WORLD_SIZE={} contradicts {}: on one host leave WORLD_SIZE out, on several set RANK "
        "to this host's first rank",
        *size, given_nproc));
  require_sane(*nproc, given_nproc);
  plan.nproc = plan.size = *nproc;
  plan.worker = plan.nproc == 1;
  return plan;
}

/// Returns the environment of each rank that a launching process starts. `secret` is its store's secret.
inline std::vector<Job> jobs_of(const LaunchPlan& plan, const std::string& rendezvous,
                                const std::string& secret = {}) {
  std::vector<std::string> common{
      detail::formatted("WORLD_SIZE={}", plan.size), detail::formatted("LOCAL_WORLD_SIZE={}", plan.nproc),
      "LOCKSTEP_STORE_IS_HOSTED=1", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"};
  const auto url = parse_rendezvous(rendezvous);
  common.push_back(formatted("MASTER_ADDR={}", url.host));
  common.push_back(formatted("MASTER_PORT={}", url.port));
  if (!secret.empty()) common.push_back(detail::formatted("LOCKSTEP_STORE_SECRET={}", secret));
  if (!plan.visible_devices.empty())
    common.push_back(detail::formatted("CUDA_VISIBLE_DEVICES={}", plan.visible_devices));
  if (plan.timeout) common.push_back(detail::formatted("LOCKSTEP_TIMEOUT={}", *plan.timeout));
  if (plan.threads || !process_variable("OMP_NUM_THREADS"))
    common.push_back(
        formatted("OMP_NUM_THREADS={}", plan.threads.value_or(std::max(1, usable_cores() / plan.nproc))));
  winsize window{};
  if (isatty(1) == 1) {
    common.push_back("LOCKSTEP_TTY=1");
    if (ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 0)
      common.push_back(detail::formatted("COLUMNS={}", window.ws_col));
  }
  std::vector<Job> jobs;
  for (int i = 0; i < plan.nproc; ++i) {
    jobs.push_back({plan.first + i, common});
    jobs.back().environment.push_back(detail::formatted("RANK={}", plan.first + i));
    jobs.back().environment.push_back(detail::formatted("LOCAL_RANK={}", i));
  }
  return jobs;
}

}  // namespace lockstep::detail
