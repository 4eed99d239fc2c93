#pragma once

#include <torch/nn/module.h>

#include <exception>
#include <filesystem>
#include <string>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/own_error.hpp"
#include "lockstep/comm/same_errors.hpp"
#include "lockstep/train/model_file.hpp"
#include "lockstep/world/rank_zero_scope.hpp"

namespace lockstep {

namespace detail {

// Runs `work` on rank 0 and gives every rank the bytes it returned, or throws its CheckpointError on every
// rank.
template <Gathering C, class Work>
std::string on_rank_zero_for_all(C& comm, Work&& work) {
  std::string answer;
  if (comm.rank() == 0) {
    try {
      answer = '+' + work();
    } catch (const std::exception& error) {
      answer = '-' + std::string(error.what());
    }
  }
  answer = comm.broadcast_bytes(answer, 0);
  const bool failed = answer.at(0) == '-';
  answer.erase(0, 1);
  if (failed) throw Common<CheckpointError>(answer);
  return answer;
}

// Runs `work`, which calls no collective, on every rank. Where it throws on some rank, every rank throws the
// same CheckpointError, so that none goes on to wait for another.
template <Gathering C, class Work>
void on_every_rank(C& comm, Work&& work) {
  std::string mine;
  try {
    work();
  } catch (...) {
    mine = first_line(std::current_exception());
    if (mine.empty()) mine = "an exception without a text";
  }
  if (const auto text = joined_errors(comm.all_gather_bytes(mine), RankNames(comm)))
    throw Common<CheckpointError>(*text);
}

}  // namespace detail

/// Writes the model of rank 0, whole or not at all. Collective: every rank returns once the file is there, or
/// throws the same CheckpointError.
template <Gathering C>
void save_model(const torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("save_model");
  detail::on_rank_zero_for_all(comm, [&] {
    save_model(model, path);
    return std::string();
  });
}

/// Reads a model on rank 0 and gives it to every rank, which needs no access to the file. Collective; the
/// errors of load_model are the same on every rank.
template <Gathering C>
void load_model(torch::nn::Module& model, const std::filesystem::path& path, C& comm) {
  forbid_in_rank_zero_scope("load_model");
  const std::string bytes = detail::on_rank_zero_for_all(comm, [&] { return read_whole(path); });
  detail::on_every_rank(comm, [&] { deserialize_model(model, bytes, path.string()); });
}

}  // namespace lockstep
