#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/tensor_check.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::inline v0_1 {

/// The Work of LocalComm. Always complete.
struct [[nodiscard]] LocalWork {
  LocalWork() = default;
  LocalWork(LocalWork&&) = default;
  LocalWork& operator=(LocalWork&&) = default;

  void wait() const noexcept {}
  void synchronize(std::chrono::milliseconds = {}) const noexcept {}
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
          "LocalComm is for one process, but the world has {}: use CpuComm, or start one process",
          world.size()));
  }

  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 1; }
  [[nodiscard]] const World& world() const { return world_; }

  Work all_reduce(at::TensorList, ReduceOp = ReduceOp::sum) { return done("all_reduce"); }
  Work reduce(at::TensorList, int /*root*/ = 0, ReduceOp = ReduceOp::sum) { return done("reduce"); }
  Work broadcast(at::TensorList, int /*root*/ = 0) { return done("broadcast"); }
  /// output: [...], input: [1, ...]
  Work reduce_scatter(at::TensorList outputs, at::TensorList inputs, ReduceOp = ReduceOp::sum) {
    return copy("reduce_scatter", outputs, inputs);
  }
  /// output: [1, ...], input: [...]
  Work all_gather(at::TensorList outputs, at::TensorList inputs) {
    return copy("all_gather", outputs, inputs);
  }
  /// output, input: [1, ...]
  Work all_to_all(at::TensorList outputs, at::TensorList inputs) {
    detail::check_rows("all_to_all", inputs, 1);
    return copy("all_to_all", outputs, inputs);
  }

  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    forbid_in_rank_zero_scope("all_gather_bytes");
    return {bytes};
  }
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int /*root*/ = 0) {
    forbid_in_rank_zero_scope("broadcast_bytes");
    return bytes;
  }

  [[nodiscard]] std::optional<LocalComm> new_group(const std::vector<int>& ranks) {
    forbid_in_rank_zero_scope("new_group");
    if (ranks.empty()) return std::nullopt;
    if (ranks != std::vector<int>{0})
      throw CommunicationError("new_group of LocalComm: the only rank is 0: give {0} or an empty list");
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
  // Copies element by element, whatever the strides, as the other communicators do.
  static Work copy(const char* name, at::TensorList outputs, at::TensorList inputs) {
    forbid_in_rank_zero_scope(name);
    detail::check_pairs({"LocalComm", {}}, name, outputs, inputs, 1);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor source = inputs[i].detach().reshape(outputs[i].sizes());
      outputs[i].detach().copy_(source.is_alias_of(outputs[i]) ? source.clone() : source);
    }
    return {};
  }

  World world_;
};

static_assert(Splittable<LocalComm>);

}  // namespace lockstep::inline v0_1
