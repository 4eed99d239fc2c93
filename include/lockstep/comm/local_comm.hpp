#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep {

/// The Work of LocalComm. Always complete.
class [[nodiscard]] LocalWork {
 public:
  LocalWork() = default;
  LocalWork(LocalWork&&) = default;
  LocalWork& operator=(LocalWork&&) = default;

  void wait() const noexcept {}
  void synchronize() const noexcept {}
  void synchronize(std::chrono::milliseconds) const noexcept {}
  [[nodiscard]] std::exception_ptr error() const noexcept { return nullptr; }
};

/// The communicator of a single process. Reductions and broadcasts compile to no-ops; a collective with
/// separate input and output copies the input to the output. Inside a rank-zero scope each collective throws
/// CommunicationError, so that a run with one process finds the mistake too.
///
/// Thread-safe: it holds no state.
class LocalComm {
 public:
  using Work = LocalWork;
  /// A graph can capture its collectives; see CapturedStep.
  static constexpr bool capturable = true;

  /// Throws UsageError unless the world has one process.
  explicit LocalComm(const World& world) : world_(world) {
    if (world.size() != 1)
      throw UsageError(detail::formatted(
          "LocalComm is for one process, but the world has {}: use GlooComm, or start one process",
          world.size()));
  }

  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 1; }
  [[nodiscard]] const World& world() const { return world_; }

  Work all_reduce(const at::Tensor&, ReduceOp = ReduceOp::sum) { return done("all_reduce"); }
  Work all_reduce(const std::vector<at::Tensor>&, ReduceOp = ReduceOp::sum) { return done("all_reduce"); }
  Work reduce(const at::Tensor&, int /*root*/ = 0, ReduceOp = ReduceOp::sum) { return done("reduce"); }
  Work reduce(const std::vector<at::Tensor>&, int /*root*/ = 0, ReduceOp = ReduceOp::sum) {
    return done("reduce");
  }
  Work broadcast(const at::Tensor&, int /*root*/ = 0) { return done("broadcast"); }
  Work broadcast(const std::vector<at::Tensor>&, int /*root*/ = 0) { return done("broadcast"); }
  /// output: [...], input: [1, ...]
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp = ReduceOp::sum) {
    return copy("reduce_scatter", output, input);
  }
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp = ReduceOp::sum) {
    return copy("reduce_scatter", outputs, inputs);
  }
  /// output: [1, ...], input: [...]
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return copy("all_gather", output, input);
  }
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    return copy("all_gather", outputs, inputs);
  }
  /// output, input: [1, ...]
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    return copy("all_to_all", output, input);
  }
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    return copy("all_to_all", outputs, inputs);
  }

  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    forbid_in_rank_zero_scope("all_gather_bytes");
    return {bytes};
  }
  Work all_gather_bytes_async(std::vector<std::string>& all, std::string bytes) {
    all = all_gather_bytes(bytes);
    return {};
  }
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int /*root*/ = 0) {
    forbid_in_rank_zero_scope("broadcast_bytes");
    return bytes;
  }
  Work broadcast_bytes_async(std::string&, int /*root*/ = 0) { return done("broadcast_bytes"); }

  /// Returns a copy of this communicator for the list {0} and std::nullopt for an empty list. Throws
  /// CommunicationError for a list with any other rank.
  [[nodiscard]] std::optional<LocalComm> new_group(const std::vector<int>& ranks) {
    forbid_in_rank_zero_scope("new_group");
    if (std::any_of(ranks.begin(), ranks.end(), [](int rank) { return rank != 0; }))
      throw CommunicationError("new_group of LocalComm: the only rank is 0: give {0} or an empty list");
    if (ranks.empty()) return std::nullopt;
    return *this;
  }

  void barrier() { forbid_in_rank_zero_scope("barrier"); }
  Work barrier_async() { return done("barrier"); }
  void abort(const std::string& /*reason*/) {}
  void shutdown() {}

 private:
  static Work done(const char* name) {
    forbid_in_rank_zero_scope(name);
    return {};
  }
  static Work copy(const char* name, const at::Tensor& output, const at::Tensor& input) {
    forbid_in_rank_zero_scope(name);
    if (output.numel() != input.numel() || output.scalar_type() != input.scalar_type())
      throw CommunicationError(detail::formatted(
          "{}: the output {} and the input {} must have equal dtypes and numbers of elements", name,
          detail::describe(output), detail::describe(input)));
    if (output.data_ptr() != input.data_ptr()) {
      at::Tensor target = output;
      target.detach().view(input.sizes()).copy_(input.detach());
    }
    return {};
  }
  static Work copy(const char* name, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs) {
    forbid_in_rank_zero_scope(name);
    if (outputs.size() != inputs.size())
      throw CommunicationError(detail::formatted("{}: as many outputs as inputs are needed, not {} and {}",
                                                 name, outputs.size(), inputs.size()));
    for (std::size_t i = 0; i < outputs.size(); ++i) static_cast<void>(copy(name, outputs[i], inputs[i]));
    return {};
  }

  World world_;
};

static_assert(Reducing<LocalComm> && Gathering<LocalComm> && Splittable<LocalComm>);

}  // namespace lockstep
