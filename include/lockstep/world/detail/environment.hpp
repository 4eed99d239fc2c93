#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/process.hpp"

namespace lockstep::inline v0_1::detail {

/// Looks up one environment variable. Returns std::nullopt if it is unset or empty.
using Variables = std::function<std::optional<std::string>(const char*)>;

/// Looks up a variable of this process's environment. Returns std::nullopt if it is unset or empty.
inline std::optional<std::string> process_variable(const char* name) {
  const char* text = std::getenv(name);
  return text && *text ? std::optional<std::string>(text) : std::nullopt;
}

/// This process's place in the run, read from the environment variables of torchrun, srun, mpirun or mpiexec.
/// torchrun's may be set by hand; without any of them the process is alone. Reading them opens no socket.
struct Environment {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  ///< among the processes of this host
  /// The rendezvous: `tcp://host:port`. Empty if the process is alone.
  std::string rendezvous;
  /// What determines `rendezvous`, for messages: "MASTER_ADDR=a, MASTER_PORT=29500". Empty if `launch` has chosen it.
  std::string rendezvous_origin;
  /// Whether a launcher hosts the store at `rendezvous`, so that rank 0 is a client like every other rank.
  bool store_is_hosted = false;
  /// Whether torchrun owns that store, which may then hold keys of an earlier attempt.
  bool store_outlives_attempts = false;
  /// Whether a launcher has assigned local ranks on this host (LOCAL_RANK and LOCAL_WORLD_SIZE).
  bool launched = false;
  /// LOCAL_RANK without LOCAL_WORLD_SIZE. The rendezvous refuses it if the ranks that join contradict it.
  std::optional<int> expected_local_rank = {};
  /// Whether the ranks of a host are consecutive, as those of torchrun and `--nproc` are. Those of srun and
  /// mpirun, or numbers given by hand, may not be.
  bool consecutive = false;
  /// The secret that a store hosted by lockstep requires of its clients: LOCKSTEP_STORE_SECRET, else one that
  /// follows from the launcher's name of the run. Equal on every rank.
  std::string store_secret;
  /// What assigned the rank: "torchrun", "srun", "mpirun of Open MPI", "mpiexec", "--nproc" for `launch`, or
  /// "srun with --nproc" where srun has started `launch` once on each host. Empty if the variables were set
  /// by hand or no launcher has started the process.
  std::string launcher;
  /// The names of the variables that hold rank and size, for messages. Empty if there are none: a process
  /// alone that no launcher has started, or numbers that lockstep has derived.
  std::string rank_variables;
  /// The name of the variable that holds the local rank, for messages. Empty if there is none.
  std::string local_variable;
  /// How often `launch` has started the ranks again (TORCHELASTIC_RESTART_COUNT).
  int restart = 0;
};

/// The most ranks of a run.
inline constexpr int most_ranks = 1 << 20;

/// Parses `text` as an integer. Returns std::nullopt if it is not one.
inline std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Splits a list such as "0,1" at its commas. Keeps empty entries.
inline std::vector<std::string> entries_of(std::string_view list) {
  std::vector<std::string> entries;
  for (std::size_t begin = 0; begin <= list.size();) {
    const auto end = std::min(list.find(',', begin), list.size());
    entries.emplace_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return entries;
}

/// Returns the value of an integer variable, std::nullopt if it is unset. Throws UsageError if the value is
/// not an integer in [least, most].
inline std::optional<int> integer_variable(const Variables& variables, const char* name, int least,
                                           int most = 2147483647) {
  const auto text = variables(name);
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (value && *value >= least && *value <= most) return value;
  if (text->find_first_not_of("0123456789", text->starts_with('-') ? 1 : 0) == std::string::npos)
    throw UsageError(formatted("{}={} is out of range: it must be in {} to {}", name, *text, least, most));
  throw UsageError(formatted("{}='{}' is not a whole number. Set it to one, or unset it", name, *text));
}

/// Returns a variable that holds the number of all ranks.
inline std::optional<int> size_variable(const Variables& variables, const char* name) {
  return integer_variable(variables, name, 1, most_ranks);
}

/// Returns the descriptor on which a supervising parent receives the failure report, -1 if there is none.
LOCKSTEP_PROCESS_WIDE inline int report_descriptor() {
  static const int fd = [] {
    const int number = whole_number(process_variable("LOCKSTEP_REPORT_FD").value_or("")).value_or(-1);
    if (number <= 2 || fcntl(number, F_SETFD, FD_CLOEXEC) != 0) return -1;
    unsetenv("LOCKSTEP_REPORT_FD");
    return number;
  }();
  return fd;
}

/// Throws UsageError if LOCKSTEP_LOG_LEVEL is no level.
inline void require_level(const Variables& variables) {
  const auto name = variables("LOCKSTEP_LOG_LEVEL");
  if (name && !level_named(*name))
    throw UsageError(
        formatted("LOCKSTEP_LOG_LEVEL={} is no level: give debug, info, warning or error", *name));
}

/// Returns whether `host` names the loopback (127.0.0.1, ::1, localhost), which leads each host to itself.
inline bool names_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.") || host.starts_with("::ffff:127.");
}

/// Returns 127.0.0.1, or ::1 on a host whose loopback has no address of IPv4.
inline std::string loopback_address() {
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const Descriptor fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return bind(fd.get(), reinterpret_cast<const sockaddr*>(&four), sizeof four) == 0 ? "127.0.0.1" : "::1";
}

/// A parsed rendezvous URL, `tcp://host:port`.
struct RendezvousUrl {
  std::string host;
  int port = 0;  ///< 1 to 65535
};

/// Parses a rendezvous URL. Throws UsageError if `url` is not `tcp://host:port`.
inline RendezvousUrl parse_rendezvous(const std::string& url) {
  const auto rest = std::string_view(url).substr(url.starts_with("tcp://") ? 6 : url.size());
  const auto colon = rest.rfind(':');
  const auto port = colon == std::string_view::npos ? std::nullopt : whole_number(rest.substr(colon + 1));
  if (!port || *port < 1 || *port > 65535 || colon == 0)
    throw UsageError(formatted("the rendezvous '{}' is not tcp://HOST:PORT: write it so", url));
  auto host = rest.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);  // IPv6
  return {std::string(host), *port};
}

/// Returns LOCKSTEP_STORE_SECRET, empty if unset. Throws UsageError if it exceeds 256 characters.
inline std::string read_store_secret(const Variables& variables = process_variable) {
  auto secret = variables("LOCKSTEP_STORE_SECRET").value_or("");
  if (secret.size() > 256)
    throw UsageError(
        formatted("LOCKSTEP_STORE_SECRET has {} characters: give it at most 256", secret.size()));
  return secret;
}

/// The names of a launcher's variables, and how the user passes on the address of the rendezvous.
struct LauncherVariables {
  const char *launcher, *rank, *size, *local_rank, *local_size, *pass_address = "";

  [[nodiscard]] bool by_hand() const { return *launcher == '\0'; }
};
inline constexpr LauncherVariables by_torchrun{"", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
inline constexpr LauncherVariables by_open_mpi{
    "mpirun of Open MPI",         "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",       "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", " (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500)"};
/// Of MPICH and Intel MPI; `srun --mpi=pmi2` sets the first two.
inline constexpr LauncherVariables by_pmi{
    "mpiexec",         "PMI_RANK",        "PMI_SIZE",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", " (mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500)"};
inline constexpr LauncherVariables by_slurm{"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
                                            "SLURM_STEP_TASKS_PER_NODE"};

/// Returns the variables of the innermost launcher that has started this process, a null pointer if there is
/// none. mpirun and mpiexec start their helpers by srun. A batch script of Slurm has SLURM_PROCID alone.
inline const LauncherVariables* launcher_of(const Variables& variables) {
  if (variables("OMPI_COMM_WORLD_RANK")) return &by_open_mpi;
  const bool step = variables("SLURM_STEP_ID").has_value();
  if (variables("PMI_RANK") && (!step || variables("MPI_LOCALRANKID"))) return &by_pmi;
  const bool srun = variables("SLURM_PROCID") && (step || variables("SLURM_STEP_NUM_TASKS"));
  return srun ? &by_slurm : nullptr;
}

/// Returns this host's number in Slurm's counts, as "2(x3),1"; std::nullopt if there is none.
inline std::optional<int> tasks_here(const Variables& variables) {
  auto node = integer_variable(variables, "SLURM_NODEID", 0).value_or(-1);
  for (const auto& part : entries_of(variables("SLURM_STEP_TASKS_PER_NODE").value_or(""))) {
    const auto times = part.find("(x");
    const int count = whole_number(part.substr(0, times)).value_or(0);
    const int repeats = times == std::string::npos
                            ? 1
                            : whole_number(part.substr(times + 2, part.size() - times - 3)).value_or(0);
    if (node < 0 || count < 1 || repeats < 1) break;
    if (node < repeats) return count;
    node -= repeats;
  }
  return std::nullopt;
}

/// Returns the first host of Slurm's list: n09 of "n[09-11,15],x". Throws UsageError if the list has none.
inline std::string first_host(std::string_view list) {
  std::string host;
  for (std::string_view rest = list; !rest.empty() && rest[0] != ',';) {
    const std::size_t end = rest[0] == '[' ? rest.find(']') : 0;
    const std::size_t digits = rest[0] == '[' ? rest.find_first_not_of("0123456789", 1) : 0;
    if (end == std::string_view::npos || digits == 1 || rest[0] == ']')
      throw UsageError(
          formatted("SLURM_STEP_NODELIST={} cannot be parsed: set MASTER_ADDR to the host of rank 0", list));
    host += end == 0 ? rest.substr(0, 1) : rest.substr(1, digits - 1);
    rest.remove_prefix(end + 1);
  }
  return host;
}

/// Returns rank, size and place on the host, std::nullopt if there is no rank. Throws UsageError for variables that
/// contradict each other, and for several ranks without this one's: each process would train alone.
inline std::optional<Environment> place_by(const Variables& variables, const LauncherVariables& names) {
  const bool hand = names.by_hand(), slurm = names.local_size == by_slurm.local_size;
  const auto rank = integer_variable(variables, names.rank, 0), size = size_variable(variables, names.size);
  const auto local_rank = integer_variable(variables, names.local_rank, 0);
  const auto local_size = slurm ? tasks_here(variables) : integer_variable(variables, names.local_size, 1);
  if (!rank && size.value_or(1) == 1 && (!hand || local_rank.value_or(0) == 0)) return std::nullopt;
  if (!rank || !size) {
    const char* set = rank ? names.rank : size > 1 ? names.size : names.local_rank;
    const char* remedy =
        hand ? "set RANK to the number of this process (with --nproc, of the first on this host) and "
               "WORLD_SIZE to the number of all ranks"
             : "the launcher sets both, so pass its whole environment on";
    throw UsageError(formatted("{}={} is set but {} is not: {}, or unset {}", set,
                               variables(set).value_or(""), rank ? names.size : names.rank, remedy, set));
  }
  const auto require = [&](const char* name, int value, int least, int most, const char* limit) {
    if (value > most)
      throw UsageError(formatted("{}={} is out of range: with {}={} it must be in {} to {}{}", name, value,
                                 limit, variables(limit).value_or(""), least, most,
                                 hand ? "" : ": pass the launcher's whole environment on"));
  };
  require(names.rank, *rank, 0, *size - 1, names.size);
  if (local_size) require(names.local_size, *local_size, 1, *size, names.size);
  if (local_rank && local_size) require(names.local_rank, *local_rank, 0, *local_size - 1, names.local_size);
  Environment env;
  env.rank = *rank;
  env.size = *size;
  env.launcher = names.launcher;
  env.rank_variables = formatted("{}, {}", names.rank, names.size);
  env.local_variable = names.local_rank;
  env.launched = local_rank && (local_size || *size == 1);
  if (env.launched) env.local_size = local_size.value_or(1);
  if (env.launched || hand) env.local_rank = local_rank.value_or(0);
  if (hand && !env.launched) env.expected_local_rank = local_rank;
  return env;
}

/// Sets the rendezvous: MASTER_ADDR, else `host`, which `origin` determines, and MASTER_PORT, else a port
/// that follows from `job`. Throws UsageError if one of them is missing.
inline void set_rendezvous(const Variables& variables, const LauncherVariables& names, Environment& env,
                           std::string host = {}, std::string origin = {},
                           const std::optional<std::string>& job = {}) {
  const auto address = variables("MASTER_ADDR");
  auto port = integer_variable(variables, "MASTER_PORT", 1, 65535);
  if (address) {
    host = *address;
    origin = "MASTER_ADDR=" + host;
  }
  origin += port ? formatted(", MASTER_PORT={}", *port) : ", a port derived from the job";
  // Outside of the range from which Linux assigns ports itself.
  if (!port && job) port = 61000 + static_cast<int>(fnv1a(*job) % 4500);
  if (host.empty() || !port) {
    const bool hand = names.by_hand();
    std::string hint = names.pass_address;
    // RANK may be left from another run, and hides the launcher's rank.
    if (const LauncherVariables* hidden = hand ? launcher_of(variables) : nullptr)
      hint = formatted("; or unset RANK and WORLD_SIZE, for the rank of {}", hidden->launcher);
    throw UsageError(formatted(
        "{}{}: the ranks need the address of their rendezvous. Set MASTER_ADDR to the host of rank 0 and "
        "MASTER_PORT to a free port there, the same on every rank{}",
        hand ? (address ? "MASTER_PORT" : "MASTER_ADDR") : names.launcher,
        hand ? " is not set" : " has started ranks on several hosts and names no address", hint));
  }
  env.rendezvous = formatted("tcp://{}:{}", host, *port);
  env.rendezvous_origin = origin;
}

/// Sets the rendezvous and the secret of a rank that a launcher has started. The store is on the first host of
/// srun's step, or on the only host of MPI's ranks; port and secret follow from the launcher's name of the run.
inline void join_launched(const Variables& variables, const LauncherVariables& names, Environment& env) {
  const bool one_host = env.launched && env.local_size == env.size;
  std::string host, origin;
  std::optional<std::string> job;
  if (names.rank == by_slurm.rank) {
    const auto job_id = variables("SLURM_JOB_ID"), step_id = variables("SLURM_STEP_ID");
    if (!job_id || !step_id)  // without them two jobs would take each other for one
      throw UsageError(formatted("SLURM_PROCID={} is set but {} is not: pass srun's whole environment on",
                                 env.rank, job_id ? "SLURM_STEP_ID" : "SLURM_JOB_ID"));
    job = *job_id + "." + *step_id;
    // The job's list, SLURM_JOB_NODELIST, may begin with a host that this step does not use.
    const auto hosts = variables("MASTER_ADDR") ? std::nullopt : variables("SLURM_STEP_NODELIST");
    if (hosts && !one_host && variables("SLURM_DISTRIBUTION").value_or("").starts_with("arbitrary"))
      throw UsageError(
          "srun -m arbitrary: set MASTER_ADDR to the host of rank 0, the first of SLURM_HOSTFILE");
    host = first_host(hosts.value_or(""));
    origin = "SLURM_STEP_NODELIST=" + hosts.value_or("");
  } else if (one_host) {
    job = variables("PMIX_NAMESPACE");
    if (!job) job = variables("OMPI_MCA_ess_base_jobid");
    // The parent, which may be a script of this rank alone, only if the launcher is unknown.
    if (const pid_t launcher = job ? 0 : launcher_process(names.rank); !job)
      job = std::to_string(launcher > 0 ? launcher : getppid());
    host = loopback_address();
    origin = "the loopback address";
  }
  if (job && env.store_secret.empty())
    env.store_secret = formatted("run {}", fnv1a(env.launcher + " " + *job));
  set_rendezvous(variables, names, env, host, origin, job);
}

/// Throws UsageError if WORLD_SIZE is set and is not the size of `env`, whose ranks a launcher has started.
inline void require_size(const Variables& variables, const Environment& env) {
  const auto size = size_variable(variables, "WORLD_SIZE");
  if (size && *size != env.size)
    throw UsageError(
        formatted("WORLD_SIZE={} contradicts {}, which has started {} processes: unset WORLD_SIZE", *size,
                  env.launcher, env.size));
}

/// Returns the place of one of several processes that srun, mpirun or mpiexec, the innermost, has started. Returns
/// std::nullopt if torchrun's variables win (RANK is set, or WORLD_SIZE is 1) or there is one process. `nproc`: the
/// ranks that each process is to start, 0 if it is a rank itself. Throws UsageError for variables that contradict each
/// other, and where a launcher hides the number of ranks or has not started this process.
inline std::optional<Environment> launched_environment(const Variables& variables, int nproc = 0) {
  if (size_variable(variables, "WORLD_SIZE") == 1 || variables("RANK")) return std::nullopt;
  const LauncherVariables* names = launcher_of(variables);
  if (names == nullptr) {
    for (const LauncherVariables& other : {by_open_mpi, by_pmi, by_slurm})
      if (size_variable(variables, other.size) > 1) place_by(variables, other);  // throws
    const auto job = variables("SLURM_JOB_ID"), pmix = variables("PMIX_RANK");
    if (const auto tasks = integer_variable(variables, "SLURM_NTASKS", 1); job && tasks > 1 && nproc == 0)
      throw UsageError(formatted(
          "this process is inside Slurm job {} of {} tasks (SLURM_NTASKS) but was not started by srun: start "
          "it as `srun PROGRAM`, with --nproc for ranks on this host alone, or with WORLD_SIZE=1 as one "
          "process",
          *job, *tasks));
    if (pmix && !variables("SLURM_PROCID"))
      throw UsageError(
          formatted("PMIX_RANK={} is set, but no variable holds the number of ranks: start the program "
                    "by srun, mpirun or mpiexec, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or "
                    "WORLD_SIZE=1 for a process on its own",
                    *pmix));
    return std::nullopt;
  }
  auto env = place_by(variables, *names);
  if (!env || env->size == 1) return std::nullopt;  // a process alone, which may start ranks itself
  if (nproc == 0) require_size(variables, *env);
  if (!env->launched && variables("LOCAL_RANK")) {  // a script may say what the launcher leaves open
    env = place_by(variables, {"", names->rank, names->size, "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
    env->launcher = names->launcher;
  }
  env->store_secret = read_store_secret(variables);
  join_launched(variables, *names, *env);
  return env;
}

/// Returns the place that torchrun's variables give to this process or, without RANK, a process alone. Throws
/// UsageError without an address of the rendezvous, unless the `here` ranks that start on this host are all.
inline Environment environment_by_hand(const Variables& variables, int here = 1) {
  Environment env = place_by(variables, by_torchrun).value_or(Environment{});
  env.store_secret = read_store_secret(variables);
  const auto agent = variables("TORCHELASTIC_USE_AGENT_STORE"),
             starter = variables("LOCKSTEP_STORE_IS_HOSTED");
  const bool torchrun = variables("TORCHELASTIC_RUN_ID") && variables("RANK");
  env.store_outlives_attempts = agent == "True" || agent == "1";
  env.store_is_hosted = env.store_outlives_attempts || starter;
  env.consecutive = variables("LOCAL_RANK") && (torchrun || starter);
  if (torchrun) env.launcher = "torchrun";
  if (starter) env.launcher = *starter == "1" ? "--nproc" : *starter + " with --nproc";
  if (starter) env.restart = integer_variable(variables, "TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  if (env.size > 1) {
    // A process alone opens no port and looks up no name, whatever address is exported.
    if (env.size > here || (variables("MASTER_ADDR") && variables("MASTER_PORT")))
      set_rendezvous(variables, by_torchrun, env);
    // These are lockstep's own.
    if (starter && *starter != "1") env.rank_variables.clear();
    if (starter && (*starter != "1" || names_loopback(variables("MASTER_ADDR").value_or(""))))
      env.rendezvous_origin.clear();
  } else if (!torchrun) {
    env.rank_variables.clear();
    if (const LauncherVariables* names = launcher_of(variables)) {
      const auto size = variables(names->size);
      env.launcher = names->launcher;
      env.rank_variables = size == "1"
                               ? formatted("{}, {}", names->rank, names->size)
                               : formatted("WORLD_SIZE=1 in place of {}={}", names->size, size.value_or(""));
    }
  }
  return env;
}

/// Reads torchrun's variables or, if RANK is not set, the place that srun, mpirun or mpiexec assigned. Throws
/// UsageError that names the variable, its value and a remedy.
inline Environment read_environment(const Variables& variables = process_variable) {
  const auto launched = launched_environment(variables);
  return launched ? *launched : environment_by_hand(variables);
}

}  // namespace lockstep::inline v0_1::detail
