#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/detail/linkage.hpp"

namespace lockstep {

/// This process's place in the run, read from torchrun's environment variables. The same variables may be set
/// by hand; without them the process is alone. Reading them opens no socket.
struct Environment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  /// The rendezvous: `tcp://host:port` or `file:///path`. Empty if the variables name none.
  std::string rendezvous;
  /// Whether a launcher hosts the store at `rendezvous`, so that rank 0 is a client like every other rank.
  bool store_is_hosted = false;
  /// Whether torchrun owns that store, which may then hold keys of an earlier attempt.
  bool store_outlives_attempts = false;
  /// Whether a launcher has assigned local ranks on this host (LOCAL_RANK).
  bool launched = false;
  /// The secret that a store hosted by lockstep requires of its clients (LOCKSTEP_STORE_SECRET). Equal on
  /// every rank.
  std::string store_secret;
};

/// Looks up one environment variable. Returns std::nullopt if it is unset or empty.
using Variables = std::function<std::optional<std::string>(const char*)>;

/// Looks up a variable of this process's environment. Returns std::nullopt if it is unset or empty.
std::optional<std::string> process_variable(const char* name);

}  // namespace lockstep

namespace lockstep::detail {

/// Parses `text` as an integer. Returns std::nullopt if it is not one.
std::optional<int> whole_number(std::string_view text);

/// Returns the value of an integer variable. Throws UsageError if it is not an integer in [least, most].
std::optional<int> integer_variable(const Variables& variables, const char* name, int least,
                                    int most = 2147483647);

/// Returns LOCKSTEP_TIMEOUT, the timeout of collectives in seconds, at least 1.
std::optional<int> timeout_variable(const Variables& variables);
/// Returns LOCKSTEP_HEARTBEAT_TIMEOUT in seconds, at least 1; see heartbeat_timeout().
std::optional<int> heartbeat_timeout_variable(const Variables& variables);

/// Returns LOCKSTEP_RENDEZVOUS, or a URL from MASTER_ADDR and MASTER_PORT. If neither is set, throws
/// UsageError if `needed`, else returns an empty string.
std::string rendezvous_url(const Variables& variables, bool needed);

}  // namespace lockstep::detail

namespace lockstep {

/// A parsed rendezvous URL: `tcp://host:port` or `file:///path`.
struct RendezvousUrl {
  std::string host;  ///< of tcp://
  int port = 0;
  std::string path;  ///< of file://
};

/// Parses a rendezvous URL. Throws UsageError if `url` is neither `tcp://host:port` nor `file:///path`.
RendezvousUrl parse_rendezvous(const std::string& url);

/// Returns LOCKSTEP_STORE_SECRET, empty if unset. Throws UsageError if it exceeds 256 characters.
std::string read_store_secret(const Variables& variables = process_variable);

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (or
/// LOCKSTEP_RENDEZVOUS). Throws UsageError that names the variable, its value and a remedy.
Environment read_environment(const Variables& variables = process_variable);

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/world/detail/environment-inl.hpp"
#endif
