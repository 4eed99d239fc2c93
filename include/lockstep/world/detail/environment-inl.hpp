#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/launcher_process.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep {

LOCKSTEP_INLINE std::optional<std::string> process_variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

}  // namespace lockstep

namespace lockstep::detail {

LOCKSTEP_INLINE std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

LOCKSTEP_INLINE std::optional<int> integer_variable(const Variables& variables, const char* name, int least,
                                                    int most) {
  const auto text = variables(name);
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (value && *value >= least && *value <= most) return value;
  const std::size_t sign = text->front() == '-' ? 1 : 0;
  if (text->size() == sign || text->find_first_not_of("0123456789", sign) != std::string::npos) {
    const bool blank = text->find_first_of(" \t\r\n") != std::string::npos;  // visible in quotes alone
    throw UsageError(detail::formatted("{}={}{}{} is not a whole number. Set it to one, or unset it", name,
                                       blank ? "'" : "", *text, blank ? "'" : ""));
  }
  throw UsageError(
      value && most == 2147483647
          ? detail::formatted("{}={} is too small: it must be at least {}", name, *text, least)
          : detail::formatted("{}={} is out of range: it must be in {} to {}", name, *text, least, most));
}

LOCKSTEP_INLINE std::string rendezvous_url(const Variables& variables, bool needed) {
  const auto address = variables("MASTER_ADDR");
  const auto port = integer_variable(variables, "MASTER_PORT", 1, 65535);
  if (address && port) return detail::formatted("tcp://{}:{}", *address, *port);
  if (!needed) return {};
  // RANK may be left from another run, and hides the launcher's rank.
  std::string launched;
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const auto rank = variables(name); rank && launched.empty())
      launched = detail::formatted("; or unset RANK and WORLD_SIZE, for the rank of {}={}", name, *rank);
  throw UsageError(detail::formatted(
      "{} is not set: the ranks need the address of their rendezvous. Set MASTER_ADDR to the host of rank 0 "
      "and MASTER_PORT to a free port there, the same on every rank{}",
      address ? "MASTER_PORT" : "MASTER_ADDR", launched));
}

LOCKSTEP_INLINE RendezvousOrigin rendezvous_origin(const Variables& given,
                                                   const std::optional<LaunchedRank>& found) {
  RendezvousOrigin origin;
  const auto add = [&](const std::string& part) { origin.text += (origin.text.empty() ? "" : ", ") + part; };
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    const bool address = std::string_view(name) == "MASTER_ADDR";
    if (const auto value = given(name))
      add(detail::formatted("{}={}", name, *value));
    else if (found && address && !found->address_variable.empty())
      add(detail::formatted("{}={}", found->address_variable,
                            given(found->address_variable.c_str()).value_or("")));
    else if (found)
      add(detail::formatted("{} from {}", name, found->launcher));
  }
  return origin;
}

LOCKSTEP_INLINE void require_level(const Variables& variables) {
  const auto name = variables("LOCKSTEP_LOG_LEVEL");
  if (name && !level_named(*name))
    throw UsageError(
        detail::formatted("LOCKSTEP_LOG_LEVEL={} is no level: give debug, info, warning or error", *name));
}

LOCKSTEP_INLINE bool names_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.") || host.starts_with("::ffff:127.");
}

LOCKSTEP_INLINE std::string loopback_address() {
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const Descriptor fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return bind(fd.get(), reinterpret_cast<const sockaddr*>(&four), sizeof four) == 0 ? "127.0.0.1" : "::1";
}

LOCKSTEP_INLINE std::string store_secret(const Variables& variables,
                                         const std::optional<LaunchedRank>& found) {
  auto secret = read_store_secret(variables);
  if (secret.empty() && found && !found->run.empty())
    secret = detail::formatted("run {}", fnv1a(found->launcher + " " + found->run));
  return secret;
}

LOCKSTEP_INLINE Variables without_batch_job(const Variables& variables) {
  if (!variables("SLURM_JOB_ID") || variables("SLURM_STEP_ID")) return variables;
  return [variables](const char* name) {
    return std::string_view(name) == "SLURM_JOB_ID" ? std::nullopt : variables(name);
  };
}

/// Returns a port outside the range from which Linux assigns ports itself, equal for equal texts.
inline int port_of(std::string_view text) {
  return 61000 + static_cast<int>(fnv1a(text) % 4500);
}

/// Returns the error about `name`, which must be set because `because` is.
inline UsageError missing_companion(const Variables& variables, const char* name, const char* because) {
  return UsageError(detail::formatted(
      "{}={} is set but {} is not: the launcher sets both, so pass its whole environment on, or unset {}",
      because, variables(because).value_or(""), name, because));
}

/// Returns an integer variable that must be set because `because` is. Throws UsageError if it is not.
inline int companion_variable(const Variables& variables, const char* name, int least, const char* because) {
  if (const auto value = integer_variable(variables, name, least)) return *value;
  throw missing_companion(variables, name, because);
}

/// Throws UsageError if a launcher's variable `size` is above 1 and `name`, which the launcher sets beside it, is
/// not set: without it each process would train alone.
inline void require_beside(const Variables& variables, const char* name, const char* size) {
  if (!variables(name) && integer_variable(variables, size, 1).value_or(1) > 1)
    throw missing_companion(variables, name, size);
}

/// Throws UsageError unless `rank` is below `size`.
inline void require_below(const Variables& variables, const char* rank, int rank_value, const char* size,
                          int size_value) {
  if (rank_value >= size_value)
    throw UsageError(detail::formatted("{}={} is out of range: with {}={} it must be in 0 to {}", rank,
                                       variables(rank).value_or(""), size, variables(size).value_or(""),
                                       size_value - 1));
}

/// Returns the first of the names "A, B".
inline std::string_view first_name(std::string_view names) {
  return names.substr(0, names.find(','));
}

/// Returns the last of the names "A, B".
inline std::string_view last_name(std::string_view names) {
  return names.substr(names.rfind(' ') + 1);
}

/// Throws UsageError if the place on this host contradicts the rank, the size or itself. `found.variables` names the
/// variables of rank and size.
inline void require_local_place(const LaunchedRank& found, const char* local_rank, const char* local_size,
                                const char* remedy = "pass the launcher's whole environment on") {
  if (found.local_size && *found.local_size > found.size)
    throw UsageError(
        formatted("{}={} contradicts {}={}: a host cannot run more ranks than there are: {}, or set RANK, "
                  "WORLD_SIZE, LOCAL_RANK and "
                  "LOCAL_WORLD_SIZE by hand",
                  local_size, *found.local_size, last_name(found.variables), found.size, remedy));
  const int ranks = found.local_size.value_or(found.size);
  if (found.local_rank && *found.local_rank >= ranks)
    throw UsageError(
        formatted("{}={} is out of range: with {} rank{} on this host ({}) it must be in 0 to {}: {}, or "
                  "unset {}",
                  local_rank, *found.local_rank, ranks, ranks == 1 ? "" : "s", local_size, ranks - 1, remedy,
                  local_rank));
  if (found.local_rank && *found.local_rank > found.rank)
    throw UsageError(formatted(
        "{}={} contradicts {}={}: a rank on this host cannot be smaller than its number here: "
        "{}, or unset {}",
        local_rank, *found.local_rank, first_name(found.variables), found.rank, remedy, local_rank));
}

/// Sets the address of the store if all ranks are on this host. The port follows from the job's name where
/// the launcher sets one, else from the launcher's process, also if a script is between.
inline void rendezvous_on_this_host(const Variables& variables, LaunchedRank& found) {
  if (found.local_size != found.size) return;
  auto job = variables("PMIX_NAMESPACE");
  if (!job) job = variables("OMPI_MCA_ess_base_jobid");
  found.master_addr = loopback_address();
  if (!job) {
    const pid_t launcher = launcher_process(first_name(found.variables));
    job = std::to_string(launcher > 0 ? launcher : getppid());
    if (launcher > 0) found.run = *job;  // a parent may be a script of this rank alone
  } else {
    found.run = *job;
  }
  found.master_port = port_of(*job);
}

/// Returns the error about a list of Slurm's that names more hosts than a step can have.
inline UsageError too_many_hosts(const char* name, std::string_view whole, const char* remedy) {
  return UsageError(detail::formatted("{}={} names more than {} hosts: {}", name, whole, most_hosts, remedy));
}

/// Returns the error about a list of hosts that is none of Slurm's.
inline UsageError unparsable_hosts(std::string_view whole, std::string_view part) {
  return UsageError(detail::formatted(
      "SLURM_STEP_NODELIST={} cannot be parsed at '{}': set MASTER_ADDR to the host of rank 0", whole, part));
}

// Expands the first bracket of `text`, which holds one name, and appends the names to `names`.
inline void expand_name(std::string_view text, std::string_view whole, std::vector<std::string>& names) {
  const auto wrong = [&](std::string_view part) { return unparsable_hosts(whole, part); };
  const std::size_t open = text.find('['), close = text.find(']');
  if (open == std::string_view::npos) {
    if (text.empty() || close != std::string_view::npos) throw wrong(text);
    names.emplace_back(text);
    return;
  }
  if (close == std::string_view::npos || close < open) throw wrong(text);
  std::string_view ranges = text.substr(open + 1, close - open - 1);
  while (true) {
    const std::string_view range = ranges.substr(0, ranges.find(','));
    const std::size_t dash = range.find('-');
    const std::string_view first = range.substr(0, dash),
                           last = dash == std::string_view::npos ? first : range.substr(dash + 1);
    const auto begin = whole_number(first), end = whole_number(last);
    if (!begin || !end || *begin < 0 || *end < *begin) throw wrong(range);
    for (std::int64_t number = *begin; number <= *end; ++number) {
      if (names.size() == most_hosts)
        throw too_many_hosts("SLURM_STEP_NODELIST", whole, "set MASTER_ADDR to the host of rank 0");
      std::string digits = std::to_string(number);
      if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
      expand_name(std::string(text.substr(0, open)) + digits + std::string(text.substr(close + 1)), whole,
                  names);
    }
    if (range.size() == ranges.size()) return;
    ranges.remove_prefix(range.size() + 1);
  }
}

LOCKSTEP_INLINE std::optional<LaunchedRank> find_launched_rank(const Variables& variables) {
  const auto size = integer_variable(variables, "WORLD_SIZE", 1);
  if (size == 1 || variables("RANK")) return std::nullopt;
  auto found = launched_rank(variables);
  const auto local_rank = integer_variable(variables, "LOCAL_RANK", 0);
  if (found && local_rank && found->local_rank && *local_rank != *found->local_rank)
    throw UsageError(detail::formatted("LOCAL_RANK={} contradicts {}={} of {}: unset LOCAL_RANK", *local_rank,
                                       found->local_variable, *found->local_rank, found->launcher));
  if (found && size && *size != found->size)
    throw UsageError(
        detail::formatted("WORLD_SIZE={} contradicts {}, which has started {} processes: unset WORLD_SIZE",
                          *size, found->launcher, found->size));
  return found;
}

LOCKSTEP_INLINE Variables with_launched_rank(const Variables& variables,
                                             const std::optional<LaunchedRank>& found) {
  if (!found) return variables;
  std::map<std::string, std::string> known{{"RANK", std::to_string(found->rank)},
                                           {"WORLD_SIZE", std::to_string(found->size)}};
  if (found->local_rank && found->local_size) {
    known["LOCAL_RANK"] = std::to_string(*found->local_rank);
    known["LOCAL_WORLD_SIZE"] = std::to_string(*found->local_size);
  }
  if (!found->master_addr.empty()) {
    known["MASTER_ADDR"] = found->master_addr;
    known["MASTER_PORT"] = std::to_string(found->master_port);
  } else if (rendezvous_url(variables, false).empty()) {
    const bool one_host = found->local_size.value_or(found->size) == found->size;
    throw UsageError(detail::formatted(
        "{} has started ranks{} and names no address for their rendezvous{}: set MASTER_ADDR "
        "to the host of rank 0 and MASTER_PORT to a free port there, on every rank{}",
        found->launcher, one_host ? "" : " on several hosts",
        found->launcher == "srun" ? " (SLURM_STEP_NODELIST is not set)" : "",
        found->launcher == "mpirun of Open MPI" ? " (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500)"
        : found->launcher == "mpiexec"          ? " (mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500)"
                                                : ""));
  }
  // The user's own address wins.
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"})
    if (const auto given = variables(name)) known[name] = *given;
  return [variables, known = std::move(known)](const char* name) -> std::optional<std::string> {
    const auto entry = known.find(name);
    return entry == known.end() ? variables(name) : std::optional(entry->second);
  };
}

LOCKSTEP_INLINE std::vector<std::string> expand_node_list(std::string_view text) {
  std::vector<std::string> names;
  const std::string_view whole = text;
  while (true) {
    // Commas inside brackets separate ranges.
    std::size_t end = 0;
    int brackets = 0;  // each is a level of recursion
    for (int depth = 0; end < text.size() && (text[end] != ',' || depth > 0); ++end) {
      depth += text[end] == '[' ? 1 : text[end] == ']' ? -1 : 0;
      if (text[end] == '[' && ++brackets > 16) throw unparsable_hosts(whole, text.substr(0, end + 1));
    }
    expand_name(text.substr(0, end), whole, names);
    if (end == text.size()) return names;
    text.remove_prefix(end + 1);
  }
}

LOCKSTEP_INLINE std::vector<int> expand_task_counts(std::string_view text) {
  std::vector<int> counts;
  const std::string_view whole = text;
  while (true) {
    const std::string_view part = text.substr(0, text.find(','));
    const std::size_t times = part.find("(x");
    const auto count = whole_number(part.substr(0, times));
    std::optional<int> repeats = 1;
    if (times != std::string_view::npos)
      repeats =
          part.back() == ')' ? whole_number(part.substr(times + 2, part.size() - times - 3)) : std::nullopt;
    if (!count || !repeats || *count < 0 || *repeats < 1)
      throw UsageError(detail::formatted(
          "SLURM_STEP_TASKS_PER_NODE={} cannot be parsed at '{}': set RANK, WORLD_SIZE, LOCAL_RANK and "
          "LOCAL_WORLD_SIZE by hand",
          whole, part));
    if (counts.size() + static_cast<std::size_t>(*repeats) > most_hosts)
      throw too_many_hosts("SLURM_STEP_TASKS_PER_NODE", whole,
                           "set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand");
    counts.insert(counts.end(), static_cast<std::size_t>(*repeats), *count);
    if (part.size() == text.size()) return counts;
    text.remove_prefix(part.size() + 1);
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE RendezvousUrl parse_rendezvous(const std::string& url) {
  RendezvousUrl parsed;
  if (url.starts_with("tcp://")) {
    const auto rest = std::string_view(url).substr(6);
    const auto colon = rest.rfind(':');
    if (colon != std::string_view::npos && colon > 0) {
      const auto port = detail::whole_number(rest.substr(colon + 1));
      parsed.host = rest.substr(0, colon);
      if (parsed.host.size() > 2 && parsed.host.front() == '[' && parsed.host.back() == ']')
        parsed.host = parsed.host.substr(1, parsed.host.size() - 2);  // an IPv6 address
      parsed.port = port.value_or(-1);
      if (port && parsed.port > 0 && parsed.port <= 65535) return parsed;
    }
  }
  throw UsageError(detail::formatted("the rendezvous '{}' is not tcp://HOST:PORT: write it so", url));
}

LOCKSTEP_INLINE std::string read_store_secret(const Variables& variables) {
  auto secret = variables("LOCKSTEP_STORE_SECRET").value_or("");
  constexpr std::size_t longest = 256;
  if (secret.size() > longest)
    throw UsageError(detail::formatted("LOCKSTEP_STORE_SECRET has {} characters: give it at most {}",
                                       secret.size(), longest));
  return secret;
}

}  // namespace lockstep

namespace lockstep::detail {

/// Returns the rank that Slurm's srun assigned, from SLURM_PROCID and the other variables of a step of
/// several tasks. The store is on the first host of SLURM_STEP_NODELIST, or at MASTER_ADDR, at a port that
/// follows from job and step. Returns std::nullopt in a step of one task, whose process may start ranks
/// itself. Throws UsageError inside a batch script or an allocation of several tasks if srun did not start
/// this process, and for a step of several tasks without the variable of the rank, the step or the job.
inline std::optional<LaunchedRank> rank_of_slurm(const Variables& variables) {
  for (const char* name : {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_JOB_ID"})
    require_beside(variables, name, "SLURM_STEP_NUM_TASKS");
  const auto job = variables("SLURM_JOB_ID");
  if (!job) return std::nullopt;
  const auto step = variables("SLURM_STEP_ID");
  const auto rank = integer_variable(variables, "SLURM_PROCID", 0);
  if (!step || !rank) {
    // A batch script itself has SLURM_PROCID=0 and the tasks of the whole job.
    const auto tasks = integer_variable(variables, "SLURM_NTASKS", 1);
    if (tasks.value_or(1) == 1) return std::nullopt;
    throw UsageError(formatted(
        "this process is inside Slurm job {} of {} tasks (SLURM_NTASKS) but was not started by srun: start "
        "it as `srun PROGRAM`, with --nproc for ranks on this host alone, or with WORLD_SIZE=1 as one "
        "process",
        *job, *tasks));
  }
  LaunchedRank found{"srun", *rank};
  found.size = companion_variable(variables, "SLURM_STEP_NUM_TASKS", 1, "SLURM_PROCID");
  if (found.size == 1) return std::nullopt;
  require_below(variables, "SLURM_PROCID", found.rank, "SLURM_STEP_NUM_TASKS", found.size);
  found.local_rank = integer_variable(variables, "SLURM_LOCALID", 0);
  const auto node = integer_variable(variables, "SLURM_NODEID", 0);
  const auto counts = variables("SLURM_STEP_TASKS_PER_NODE");
  if (counts && node) {
    const auto tasks = expand_task_counts(*counts);
    if (static_cast<std::size_t>(*node) >= tasks.size())
      throw UsageError(
          formatted("SLURM_NODEID={} is out of range: SLURM_STEP_TASKS_PER_NODE={} has {} hosts. Pass "
                    "srun's whole environment on, or set RANK, WORLD_SIZE, LOCAL_RANK and "
                    "LOCAL_WORLD_SIZE by hand",
                    *node, *counts, tasks.size()));
    found.local_size = tasks[static_cast<std::size_t>(*node)];
    const auto all = std::accumulate(tasks.begin(), tasks.end(), std::int64_t{0});
    if (all != found.size)
      throw UsageError(formatted(
          "SLURM_STEP_TASKS_PER_NODE={} ({} tasks in all) contradicts SLURM_STEP_NUM_TASKS={}: pass srun's "
          "whole environment on, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE by hand",
          *counts, all, found.size));
  }
  found.variables = "SLURM_PROCID, SLURM_STEP_NUM_TASKS";
  found.local_variable = "SLURM_LOCALID";
  require_local_place(found, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE");
  // `srun -c 4` asks for the cores of a task; otherwise the tasks share those of the step.
  const auto cores = [&](const char* name) { return whole_number(variables(name).value_or("")); };
  if (const auto each = cores("SLURM_CPUS_PER_TASK"); each && found.local_size)
    found.host_cores = *each * *found.local_size;
  else
    found.host_cores = cores("SLURM_CPUS_ON_NODE");
  found.run = *job + "." + *step;
  found.master_port = port_of(found.run);
  // The job's list, SLURM_JOB_NODELIST, may begin with a host that this step does not use.
  if (const auto given = variables("MASTER_ADDR")) {
    found.master_addr = *given;
  } else if (const auto nodes = variables("SLURM_STEP_NODELIST"); nodes) {
    const auto hosts = expand_node_list(*nodes);
    if (counts && expand_task_counts(*counts).size() != hosts.size())
      throw UsageError(
          formatted("SLURM_STEP_NODELIST={} (hosts: {}) contradicts SLURM_STEP_TASKS_PER_NODE={} "
                    "(hosts: {}): pass srun's whole environment on, or set MASTER_ADDR to the host of rank 0",
                    *nodes, hosts.size(), *counts, expand_task_counts(*counts).size()));
    found.master_addr = hosts.front();
    found.address_variable = "SLURM_STEP_NODELIST";
    if (hosts.size() > 1 && variables("SLURM_DISTRIBUTION").value_or("").starts_with("arbitrary"))
      throw UsageError(
          "srun -m arbitrary: set MASTER_ADDR to the host of rank 0, the first of SLURM_HOSTFILE");
  }
  return found;
}

/// Returns the rank of a process that a launcher of MPI has started, from the launcher's variables.
inline std::optional<LaunchedRank> rank_of_mpi(const Variables& variables, const char* launcher,
                                               const char* rank, const char* size, const char* local_rank,
                                               const char* local_size) {
  LaunchedRank found{launcher, *integer_variable(variables, rank, 0)};
  found.size = companion_variable(variables, size, 1, rank);
  if (found.size == 1) return std::nullopt;
  require_below(variables, rank, found.rank, size, found.size);
  found.local_rank = integer_variable(variables, local_rank, 0);
  found.local_size = integer_variable(variables, local_size, 1);
  found.variables = formatted("{}, {}", rank, size);
  found.local_variable = local_rank;
  require_local_place(found, local_rank, local_size);
  rendezvous_on_this_host(variables, found);
  return found;
}

/// Returns the rank that the mpirun of Open MPI assigned, from OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and
/// their local counterparts. If all ranks are on one host, the store is there; otherwise the user sets
/// MASTER_ADDR and MASTER_PORT. Throws UsageError for variables that contradict each other.
inline std::optional<LaunchedRank> rank_of_open_mpi(const Variables& variables) {
  require_beside(variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  if (!variables("OMPI_COMM_WORLD_RANK")) return std::nullopt;
  return rank_of_mpi(variables, "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
}

/// Returns the rank that the mpiexec of MPICH or Intel MPI, or `srun --mpi=pmi2`, assigned, from PMI_RANK,
/// PMI_SIZE, MPI_LOCALRANKID and MPI_LOCALNRANKS. The store is as for Open MPI, or as for Slurm. Throws
/// UsageError for variables that contradict each other.
inline std::optional<LaunchedRank> rank_of_pmi(const Variables& variables) {
  require_beside(variables, "PMI_RANK", "PMI_SIZE");
  if (!variables("PMI_RANK")) return std::nullopt;
  // srun --mpi=pmi2 sets PMI's variables beside its own, which say more.
  if (variables("SLURM_STEP_ID") && !variables("MPI_LOCALRANKID")) return rank_of_slurm(variables);
  return rank_of_mpi(variables, "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
}

LOCKSTEP_INLINE std::optional<LaunchedRank> launched_rank(const Variables& variables) {
  // An inner launcher that has started one process alone wins, too: the process is no rank of the outer one.
  if (auto found = rank_of_open_mpi(variables); found || variables("OMPI_COMM_WORLD_RANK")) return found;
  if (auto found = rank_of_pmi(variables); found || variables("PMI_RANK")) return found;
  if (auto found = rank_of_slurm(variables)) return found;
  const auto rank = variables("PMIX_RANK");
  if (rank && !variables("SLURM_PROCID"))
    throw UsageError(
        formatted("PMIX_RANK={} is set, but no variable holds the number of ranks: start the program "
                  "by srun, mpirun or mpiexec, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or "
                  "WORLD_SIZE=1 for a process on its own",
                  *rank));
  return std::nullopt;
}

/// Returns the launcher of a process that is alone because the launcher has started one, or because WORLD_SIZE=1
/// replaces its number of ranks, and the names of the variables for rank and size; empty names if there is none.
inline std::pair<std::string, std::string> launcher_of_one(const Variables& variables) {
  const bool step = variables("SLURM_STEP_ID") && !variables("MPI_LOCALRANKID");  // see rank_of_pmi
  struct Known {
    const char *launcher, *rank, *size;
    bool possible;
  };
  for (const auto& [launcher, rank, size, possible] :
       {Known{"torchrun", "RANK", "WORLD_SIZE", variables("TORCHELASTIC_RUN_ID").has_value()},
        Known{"mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", true},
        Known{"mpiexec", "PMI_RANK", "PMI_SIZE", !step},
        Known{"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", variables("SLURM_STEP_ID").has_value()}})
    if (const auto number = variables(size);
        possible && number && variables(rank) && (*number == "1" || variables("WORLD_SIZE") == "1"))
      return {launcher, *number == "1" ? detail::formatted("{}, {}", rank, size)
                                       : detail::formatted("WORLD_SIZE=1 in place of {}={}", size, *number)};
  return {};
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE Environment read_environment(const Variables& given) {
  const auto found = detail::find_launched_rank(given);
  const Variables variables = detail::with_launched_rank(given, found);
  Environment env;
  const auto size = detail::integer_variable(variables, "WORLD_SIZE", 1);
  const auto rank = detail::integer_variable(variables, "RANK", 0);
  const auto local_size = detail::integer_variable(variables, "LOCAL_WORLD_SIZE", 1);
  const auto local_rank = detail::integer_variable(variables, "LOCAL_RANK", 0);
  if (rank && !size)
    throw UsageError(detail::formatted(
        "RANK={} is set but WORLD_SIZE is not: set WORLD_SIZE to the number of all ranks", *rank));
  if (!rank && size && *size > 1)
    throw UsageError(
        detail::formatted("WORLD_SIZE={} is set but RANK is not: set RANK to this process's number, 0 to {}",
                          *size, *size - 1));
  if (!rank && local_rank.value_or(0) > 0)
    throw UsageError(
        detail::formatted("LOCAL_RANK={} is set but RANK is not: set both, or neither", *local_rank));
  env.rank = rank.value_or(0);
  env.size = size.value_or(1);
  if (env.rank >= env.size)
    throw UsageError(detail::formatted("RANK={} is out of range: with WORLD_SIZE={} it must be in 0 to {}",
                                       env.rank, env.size, env.size - 1));
  env.launched = local_rank && rank && (local_size || env.size == 1);
  env.consecutive =
      given("LOCAL_RANK") && (given("TORCHELASTIC_RUN_ID") || given("LOCKSTEP_STORE_IS_HOSTED"));
  env.local_rank = local_rank.value_or(0);
  if (local_rank && !local_size && env.size > 1) env.expected_local_rank = local_rank;
  env.local_size = local_size.value_or(1);
  if (!found)
    detail::require_local_place(
        {{}, env.rank, env.size, local_rank, local_size, {}, 0, {}, "RANK, WORLD_SIZE"}, "LOCAL_RANK",
        "LOCAL_WORLD_SIZE", "set both for this host");
  // A process alone opens no port and looks up no name, whatever address is exported.
  if (env.size > 1) {
    env.rendezvous = detail::rendezvous_url(variables, true);

    env.rendezvous_origin = detail::rendezvous_origin(given, found);
  }
  env.store_secret = detail::store_secret(variables, found);
  const auto agent = variables("TORCHELASTIC_USE_AGENT_STORE");
  env.store_outlives_attempts = agent == "True" || agent == "1";
  env.store_is_hosted = env.store_outlives_attempts || variables("LOCKSTEP_STORE_IS_HOSTED").has_value();
  if (found) {
    env.launcher = found->launcher;
    env.rank_variables = found->variables;
    env.local_variable = found->local_variable;
    env.host_cores = found->host_cores;
    return env;
  }
  if (env.size == 1) {
    std::tie(env.launcher, env.rank_variables) = detail::launcher_of_one(variables);
    return env;
  }
  env.rank_variables = "RANK, WORLD_SIZE";
  env.local_variable = "LOCAL_RANK";
  if (variables("LOCKSTEP_STORE_IS_HOSTED"))
    env.launcher = "--nproc";
  else if (variables("TORCHELASTIC_RUN_ID"))
    env.launcher = "torchrun";
  return env;
}

}  // namespace lockstep
