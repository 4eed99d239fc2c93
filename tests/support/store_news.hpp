#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/store_connection.hpp"

/// What a test or one of its programs asks the store of a run, besides the keys.
namespace lockstep_test {

/// Blocks until `all(what the store knows of these ranks)`.
template <class All>
void await_at_store(const std::string& host, int port, const std::vector<int>& ranks, All all) {
  constexpr std::chrono::seconds timeout(30);
  lockstep::detail::StoreConnection store({host, port}, timeout);
  while (!all(lockstep::detail::RunClient(store, timeout).members(ranks)))
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

/// Blocks until these ranks have signed in at the store on `port`, which one of them hosts.
inline void await_sign_in(int port, const std::vector<int>& ranks) {
  await_at_store("127.0.0.1", port, ranks, [](const auto& known) {
    return std::all_of(known.begin(), known.end(), [](const auto& one) { return one.identity.has_value(); });
  });
}

/// Blocks until the store at `rendezvous` has noticed that a rank has ended, which it has not published yet.
inline void await_death(const std::string& rendezvous, int rank) {
  const auto url = lockstep::detail::parse_rendezvous(rendezvous);
  await_at_store(url.host, url.port, {rank}, [](const auto& known) { return known.at(0).lost; });
}

}  // namespace lockstep_test
