#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

/// Looks up one environment variable. Returns std::nullopt if it is unset or empty.
using Variables = std::function<std::optional<std::string>(const char*)>;

/// Looks up a variable of this process's environment. Returns std::nullopt if it is unset or empty.
std::optional<std::string> process_variable(const char* name);

/// What determines the address of a rendezvous, and how to change it, for messages.
struct RendezvousOrigin {
  /// As "MASTER_ADDR=a, MASTER_PORT=29500". Empty if it is unknown or `launch` has chosen the address.
  std::string text = {};
  /// The beginnings of the remedies for a wrong host and a wrong port.
  std::string set_host = "set MASTER_ADDR to", set_port = "set MASTER_PORT to";
};

/// This process's place in the run, read from the environment variables of torchrun, srun, mpirun or mpiexec.
/// torchrun's may be set by hand; without any of them the process is alone. Reading them opens no socket.
struct Environment {
  int rank = 0;
  int size = 1;
  /// The rank among the processes of this host.
  int local_rank = 0;
  /// The number of the processes of this host.
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

/// Returns whether `host` names the loopback (127.0.0.1, ::1, localhost), which leads each host to itself.
bool names_loopback(std::string_view host);
/// Returns 127.0.0.1, or ::1 on a host whose loopback has no address of IPv4.
std::string loopback_address();

/// Returns the place of one of several processes that srun, mpirun or mpiexec, the innermost, has started.
/// Returns std::nullopt if torchrun's variables win (RANK is set, or WORLD_SIZE is 1) or there is one
/// process. `nproc`: the ranks that each process is to start, 0 if it is a rank itself. Throws UsageError for
/// variables that contradict each other, and where a launcher hides the number of ranks or has not started
/// this process.
std::optional<Environment> launched_environment(const Variables& variables, int nproc = 0);

/// Throws UsageError if WORLD_SIZE is set and is not the size of `env`, whose ranks a launcher has started.
void require_size(const Variables& variables, const Environment& env);

/// Returns the place that torchrun's variables give to this process or, without RANK, a process alone. Throws
/// UsageError without an address of the rendezvous, unless the `here` ranks that start on this host are all.
Environment environment_by_hand(const Variables& variables, int here = 1);

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

/// Reads torchrun's variables or, if RANK is not set, the place that srun, mpirun or mpiexec assigned. Throws
/// UsageError that names the variable, its value and a remedy.
Environment read_environment(const Variables& variables = process_variable);

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/environment-inl.hpp"
#endif
