#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/process.hpp"

namespace lockstep_test {

/// The variables of a rank that is started by hand: who it is, and where the ranks meet.
inline Variables by_hand(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
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
