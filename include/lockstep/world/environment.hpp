#pragma once

#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

namespace lockstep {

/// Looks up one environment variable. Returns std::nullopt if it is unset or empty.
using Variables = std::function<std::optional<std::string>(const char*)>;

/// Looks up a variable of this process's environment. Returns std::nullopt if it is unset or empty.
inline std::optional<std::string> process_variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

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
  /// What determines `rendezvous`, for messages: "MASTER_ADDR=a, MASTER_PORT=29500". Empty if it is unknown or
  /// `launch` has chosen the address.
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
};

}  // namespace lockstep
