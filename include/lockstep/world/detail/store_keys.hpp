#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/detail/format.hpp"

/// The keys of the rendezvous store. Two ranks that disagree on one of them wait for each other, so no other
/// header writes a key.
namespace lockstep::detail::store_keys {

/// On the store of torchrun's agent: the address and secret of this attempt's own store.
inline constexpr const char* board = "lockstep/store";

// The sign-in.
inline constexpr const char* size = "lockstep/size";
inline constexpr const char* host = "lockstep/host";
inline constexpr const char* several_hosts = "lockstep/several hosts";
inline constexpr const char* present = "lockstep/present";
/// The outcome of the rendezvous for waiting ranks: "complete", "failed", or "refused" and the reason.
inline constexpr const char* outcome = "lockstep/outcome";
inline std::string rank(int rank) {
  return formatted("lockstep/rank/{}", rank);
}
inline std::string signed_in(int rank) {
  return formatted("lockstep/signed in/{}", rank);
}
/// Set by the server: the address of the last client that it refused, and the reason.
inline constexpr const char* refusal = "lockstep/refusal";

// Failures and exits.
/// The run's first Failure, encoded.
inline constexpr const char* failure = "lockstep/failure";
/// Its exit code, set by a rank at its end; -1 by the server, when it loses one that has made a communicator.
inline std::string finished(int rank) {
  return formatted("lockstep/finished/{}", rank);
}
/// Set by the server when it loses another rank: the name of its process.
inline std::string lost(int rank) {
  return formatted("lockstep/lost/{}", rank);
}
/// Set by a rank that has made a communicator, whose other ranks notice its death from then on.
inline std::string communicates(int rank) {
  return formatted("lockstep/communicates/{}", rank);
}
/// Set by rank `rank` of the group when it throws for the `times`-th time together with all other ranks.
inline std::string thrown(const std::string& group, int times, int rank) {
  return formatted("lockstep/thrown/{}/{}/{}", group, times, rank);
}

// World::local_zero_first.
inline std::string local_zero_first_calls(int rank) {
  return formatted("lockstep/first/calls/{}", rank);
}
inline std::string local_zero_first(const std::string& first, std::int64_t call) {
  return formatted("lockstep/first/{}/{}", first, call);
}

// Communicators.
/// The prefix of the names of communicators of a kind, such as "comm" or "nccl".
inline std::string communicators(std::string_view kind) {
  return formatted("lockstep/{}", kind);
}
inline std::string calls_of_rank(std::string_view what, int rank) {
  return formatted("lockstep/{}/calls of rank {}", what, rank);
}
/// The prefix of with_device's choices.
inline constexpr const char* device = "lockstep/device";

// Inside a communicator's prefix.
inline constexpr const char* joined = "here";
inline constexpr const char* all_joined = "all here";
inline std::string joined_rank(int rank) {
  return formatted("here/{}", rank);
}

/// An exchange of bytes over the store.
inline std::string bytes(std::uint64_t sequence) {
  return formatted("bytes/{}", sequence);
}

}  // namespace lockstep::detail::store_keys
