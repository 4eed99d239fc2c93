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

}  // namespace lockstep::detail::store_keys
