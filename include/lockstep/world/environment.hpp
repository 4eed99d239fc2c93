#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Looks up one environment variable. Returns std::nullopt if it is unset or empty.
using Variables = std::function<std::optional<std::string>(const char*)>;

/// Looks up a variable of this process's environment. Returns std::nullopt if it is unset or empty.
std::optional<std::string> process_variable(const char* name);

/// What determines the address of a rendezvous, and how to change it, for messages.
struct RendezvousOrigin {
  /// As "MASTER_ADDR=a, MASTER_PORT from srun". Empty if it is unknown.
  std::string text = {};
  /// The beginnings of the remedies for a wrong host and a wrong port.
  std::string set_host = "set MASTER_ADDR to", set_port = "set MASTER_PORT to";
};

/// This process's place in the run, read from the environment variables of torchrun, srun, mpirun or mpiexec.
/// torchrun's variables may be set by hand; without any of them the process is alone. Reading them opens no socket.
struct Environment {
  int rank = 0;
  int size = 1;
  /// The rank among the processes of this host, and their number.
  int local_rank = 0;
  int local_size = 1;
  /// The rendezvous: `tcp://host:port`. Empty if the process is alone.
  std::string rendezvous;
  /// What determines `rendezvous`.
  RendezvousOrigin rendezvous_origin;
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
  /// The secret that a store hosted by lockstep requires of its clients: LOCKSTEP_STORE_SECRET, else one that follows
  /// from the launcher's name of the run. Equal on every rank.
  std::string store_secret;
  /// What assigned the rank: "torchrun", "srun", "mpirun of Open MPI", "mpiexec", or "--nproc" for `launch`. Empty if
  /// the variables were set by hand or no launcher has started the process.
  std::string launcher;
  /// The names of the variables that hold rank and size, for messages. Empty if no launcher has started the
  /// process and it is alone.
  std::string rank_variables;
  /// The name of the variable that holds the local rank, for messages. Empty if there is none.
  std::string local_variable;
  /// The cores of this host that its ranks share, as the launcher says. Unset if it does not say.
  std::optional<int> host_cores;
};

}  // namespace lockstep

namespace lockstep::detail {

/// Parses `text` as an integer. Returns std::nullopt if it is not one.
std::optional<int> whole_number(std::string_view text);

/// Returns the value of an integer variable, std::nullopt if it is unset. Throws UsageError if the value is
/// not an integer in [least, most].
std::optional<int> integer_variable(const Variables& variables, const char* name, int least,
                                    int most = 2147483647);

/// Throws UsageError if LOCKSTEP_LOG_LEVEL is no level.
void require_level(const Variables& variables);

/// Returns whether `host` names the loopback explicitly (127.0.0.1, ::1, localhost): it leads each host to itself.
bool names_loopback(std::string_view host);
/// Returns 127.0.0.1, or ::1 on a host whose loopback has no address of IPv4.
std::string loopback_address();

/// Returns the URL of MASTER_ADDR and MASTER_PORT. If neither is set, throws
/// UsageError if `needed`, else returns an empty string.
std::string rendezvous_url(const Variables& variables, bool needed);

/// A process's place in the run, as a launcher assigned it.
struct LaunchedRank {
  /// The launcher's name, such as "srun".
  std::string launcher;
  int rank = 0;
  int size = 1;
  /// The place on this host. Unset if the launcher does not assign one.
  std::optional<int> local_rank = {}, local_size = {};
  /// Where rank 0 can host the store. Empty and 0 if the launcher does not determine it.
  std::string master_addr = {};
  /// The port of `master_addr`.
  int master_port = 0;
  /// The name of the variable that determines `master_addr`, for messages.
  std::string address_variable = {};
  /// The names of the variables that hold rank and size, as "A, B". The nearest ancestor process without the
  /// first one is the launcher's.
  std::string variables = {};
  /// The cores of this host that its ranks share. Unset if the launcher does not say.
  std::optional<int> host_cores = {};
  /// The name of the variable that holds `local_rank`, for messages.
  std::string local_variable = {};
  /// The launcher's name of this run, equal on all its ranks and unlike that of another run, or empty. Ranks
  /// with another name are refused, unless LOCKSTEP_STORE_SECRET is set.
  std::string run = {};
};

/// Returns the place that Open MPI, PMI or Slurm assigned. The inner launcher wins: mpirun and mpiexec start their
/// helpers by srun. Returns std::nullopt if it has started one process alone. Throws UsageError for variables that
/// contradict each other, and under a PMIx launcher (`prun`) that sets PMIX_RANK and none of their variables, since
/// PMIx has no variable for the number of ranks.
std::optional<LaunchedRank> launched_rank(const Variables& variables);

/// Returns what determines rendezvous_url(with_launched_rank(given, found)), see Environment::rendezvous_origin.
RendezvousOrigin rendezvous_origin(const Variables& given, const std::optional<LaunchedRank>& found);

/// Returns the secret of the store: LOCKSTEP_STORE_SECRET, else one that follows from LaunchedRank::run of `found`,
/// else an empty one.
std::string store_secret(const Variables& variables, const std::optional<LaunchedRank>& found);

/// Returns `variables` without Slurm's job in a batch script, which is no rank itself: a number of processes
/// that the program gives is for the script's host alone.
Variables without_batch_job(const Variables& variables);

/// Returns launched_rank(), std::nullopt if RANK is set or WORLD_SIZE is 1: torchrun's variables win. Throws UsageError
/// also if WORLD_SIZE or LOCAL_RANK contradicts the launcher.
std::optional<LaunchedRank> find_launched_rank(const Variables& variables);

/// Returns `variables` with torchrun's names for the place `found`, unchanged if there is none. Throws
/// UsageError if the launcher determines no address for the store.
Variables with_launched_rank(const Variables& variables, const std::optional<LaunchedRank>& found);

/// The most hosts of a step of Slurm, whose own lists hold no more.
inline constexpr int most_hosts = 65536;

/// Expands Slurm's notation of hosts: "n[09-11],x" is n09, n10, n11, x. Throws UsageError, also for more than
/// most_hosts.
std::vector<std::string> expand_node_list(std::string_view text);

/// Expands Slurm's notation of counts: "2(x3),1" is 2, 2, 2, 1. Throws UsageError, also for more than most_hosts.
std::vector<int> expand_task_counts(std::string_view text);

}  // namespace lockstep::detail

namespace lockstep {

/// A parsed rendezvous URL, `tcp://host:port`.
struct RendezvousUrl {
  std::string host;
  int port = 0;  ///< 1 to 65535
};

/// Parses a rendezvous URL. Throws UsageError if `url` is not `tcp://host:port`.
RendezvousUrl parse_rendezvous(const std::string& url);

/// Returns LOCKSTEP_STORE_SECRET, empty if unset. Throws UsageError if it exceeds 256 characters.
std::string read_store_secret(const Variables& variables = process_variable);

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If RANK
/// is not set, reads the place that srun, mpirun or mpiexec assigned. Throws UsageError that names the variable, its
/// value and a remedy.
Environment read_environment(const Variables& variables = process_variable);

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/environment-inl.hpp"
#endif
