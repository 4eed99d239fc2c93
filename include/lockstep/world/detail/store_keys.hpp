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

/// The key of World::local_zero_first's `call` on the host of `first`.
inline std::string local_zero_first(const std::string& first, std::int64_t call) {
  return formatted("lockstep/first/{}/{}", first, call);
}
/// The beginning of the names of communicators.
inline constexpr const char* communicators = "lockstep/comm";
/// The number of a rank's calls of `what`.
inline std::string calls_of_rank(std::string_view what, int rank) {
  return formatted("lockstep/{}/calls of rank {}", what, rank);
}
/// with_device's choice of number `call`.
inline std::string device(std::int64_t call) {
  return formatted("lockstep/device/{}", call);
}

}  // namespace lockstep::detail::store_keys
