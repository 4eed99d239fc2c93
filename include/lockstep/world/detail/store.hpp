#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_client.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Returns the timeout of the rendezvous: LOCKSTEP_RENDEZVOUS_TIMEOUT in seconds, 5 minutes by default.
inline std::chrono::milliseconds rendezvous_timeout() {
  const auto seconds = integer_variable(process_variable, "LOCKSTEP_RENDEZVOUS_TIMEOUT", 1, 1'000'000);
  return std::chrono::seconds(seconds.value_or(300));
}

/// Listens where rank 0 hosts the store. `all_here`: every rank is on this host. Returns no listener if a store of lockstep
/// with this secret answers there: another process has the rank 0, and signing in at its store names both. Throws as
/// listen_on.
inline std::optional<Listener> listen_as_rank_zero(const StoreEndpoint& endpoint, bool all_here) {
  try {
    auto listener = listen_on(endpoint.host, endpoint.port, endpoint.origin);
    if (!all_here && listener.host_is_elsewhere)
      listener.doubt = formatted(
          "{} is no address of this host ({}): rank 0 must run on the host that it names",
          endpoint.origin.text.empty() ? endpoint.host
                                       : endpoint.origin.text.substr(0, endpoint.origin.text.find(", ")),
          host_name());
    else if (!all_here &&
             (names_loopback(endpoint.host) || endpoint.host == "0.0.0.0" || endpoint.host == "::"))
      listener.doubt =
          formatted("ranks on other hosts cannot reach this one ({}) by the address {} of rank 0",
                    host_name(), endpoint.host);
    return listener;
  } catch (const PortInUse&) {
    try {
      const StoreConnection other(endpoint, last_request_timeout);
      return std::nullopt;
    } catch (const RendezvousError&) {  // no store of this run
    }
    throw;
  }
}

/// Opens the store of `env` within `timeout`. Rank 0 hosts it unless a launcher does. While the store cannot
/// be opened, calls `waiting` with what this rank waits for, and the reason.
inline Rendezvous join_rendezvous(
    const Environment& env, std::chrono::milliseconds timeout,
    const std::function<void(const std::string&)>& waiting = [](const std::string&) {}) {
  if (env.rendezvous.empty()) {
    StorePtr store = c10::make_intrusive<c10d::HashStore>();  // one process needs no rendezvous
    return {store};
  }
  const auto url = parse_rendezvous(env.rendezvous);
  StoreEndpoint endpoint{url.host, url.port, env.store_secret, env.rendezvous_origin};

  if (env.store_outlives_attempts) {
    endpoint.remedy =
        "torchrun's agent hosts it: look at the output of torchrun and start it again, or unset "
        "TORCHELASTIC_USE_AGENT_STORE if torchrun has not started this process";
    return rendezvous_under_torchrun(endpoint, env.rank, timeout, waiting);
  }
  if (env.rank == 0 && !env.store_is_hosted) {
    if (auto listener = listen_as_rank_zero(endpoint, env.launched && env.local_size == env.size)) {
      const bool doubted = !listener->doubt.empty();
      auto joined = rendezvous_at(host_store(std::move(*listener), env.store_secret, timeout), timeout, true);
      joined.doubted = doubted;
      return joined;
    }
  }
  const auto waiting_here = [&](const std::string& reason) {
    waiting(detail::formatted(
        "the store of rank 0 at {}{}: {}", env.rendezvous,
        env.rendezvous_origin.text.empty() ? std::string() : " (" + env.rendezvous_origin.text + ")",
        reason));
  };
  return rendezvous_at(std::make_shared<StoreConnection>(endpoint, timeout, waiting_here), timeout, false);
}

}  // namespace lockstep::detail
