#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/world/detail/run_client.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "support/process.hpp"

namespace lockstep_test {

/// The variables of a rank that is started by hand: who it is, and where the ranks meet.
inline Variables by_hand(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

/// Blocks until these ranks have signed in at the store on `port`, which one of them hosts.
inline void await_sign_in(int port, const std::vector<int>& ranks) {
  using namespace lockstep::detail;
  constexpr std::chrono::seconds timeout(30);
  StoreConnection store({"127.0.0.1", port}, timeout);
  const auto joined = [&] {
    const auto known = RunClient(store, timeout).members(ranks);
    return std::all_of(known.begin(), known.end(),
                       [](const KnownRank& one) { return one.identity.has_value(); });
  };
  while (!joined()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

/// Several processes under one marker, as somebody starts them one by one: nobody watches over them.
struct Together {
  std::string marker = new_marker();
  std::vector<std::unique_ptr<Process>> all;

  Together() = default;
  /// `size` ranks of one command that meet on a port of their own, with `more` variables each.
  Together(const std::vector<std::string>& command, int size, const Variables& more = {}) {
    const int port = free_port();
    for (int rank = 0; rank < size; ++rank) {
      auto variables = by_hand(rank, size, port);
      variables.insert(more.begin(), more.end());
      add(command, std::move(variables));
    }
  }

  void add(std::vector<std::string> command, Variables variables) {
    variables[marker_variable] = marker;
    all.push_back(std::make_unique<Process>(std::move(command), std::move(variables), StartOptions{}));
  }
  Process& operator[](int rank) { return *all[static_cast<std::size_t>(rank)]; }

  /// Waits for all; returns their exit codes, -1 for those that do not end.
  std::vector<int> wait(Milliseconds timeout = Milliseconds(20000)) {
    std::vector<int> codes;
    for (auto& process : all) codes.push_back(process->wait(timeout) ? process->exit_code() : -1);
    return codes;
  }
};

}  // namespace lockstep_test
