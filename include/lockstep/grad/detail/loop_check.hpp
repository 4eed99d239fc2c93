#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "lockstep/detail/drawn_batch.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::inline v0_1::detail {

/// Warns once of each mistake of a loop by hand that makes the ranks' parameters or steps differ without an error.
class LoopCheck {
 public:
  /// Call them at the start and the end of a guard of `no_sync`. Warns, on rank 0, if the optimizer has stepped.
  template <class Comm>
  void begin_no_sync(const Comm& comm, std::span<const ParameterEntry> parameters) {
    accumulates_ = true;
    watches_ = comm.size() > 1 && comm.rank() == 0 && !served_call.name && !warned_of_step_;
    if (watches_) before_ = fingerprint(parameters);
  }
  template <class Comm>
  void end_no_sync(const Comm& comm, std::span<const ParameterEntry> parameters) noexcept try {
    if (!watches_ || fingerprint(parameters) == before_) return;
    warned_of_step_ = true;
    comm.world().log.all().warning(
        "parameters changed inside no_sync, where each rank has the gradients of its own samples: unless the "
        "ranks average them, call optimizer.step() after the first backward outside of no_sync");
  } catch (...) {  // the destructor of a guard must not throw
  }

  /// Call it before a `backward` that reduces. Warns if another rank has no such batch, unless batches are
  /// accumulated: ranks with unequal numbers of batches may then reduce equally often.
  template <class Comm>
  void begin_backward(const Comm& comm) {
    // A loader may have drawn batches ahead, or one that it drops.
    if (drawn_batch.number < last_.number || drawn_batch.pass != last_.pass) reductions_ = 0;
    last_ = drawn_batch;
    if (std::exchange(accumulates_, false) || ++reductions_ <= last_.fewest || last_.number <= last_.fewest ||
        last_.ranks != comm.size() || comm.rank() != 0 || std::exchange(warned_of_batch_, true))
      return;
    comm.world().log.all().warning(
        "batch {} of a pass is drawn, of which rank {} has {}: unless that rank now calls backward_empty, it "
        "averages a batch of its next pass with this one, or this rank waits for ever. Pad or drop_last, so "
        "that all ranks have equally many, or call backward_sum on every rank, with count 0 at the end",
        drawn_batch.number, drawn_batch.ranks - 1, drawn_batch.fewest);
  }

 private:
  /// Returns a hash of each parameter's first element, or its version on a device, which is not read: that would
  /// block the host. torch::optim::SGD does not change the version.
  static std::uint64_t fingerprint(std::span<const ParameterEntry> parameters) {
    std::uint64_t hash = 0;
    for (const ParameterEntry& parameter : parameters) {
      const at::Tensor& tensor = parameter.tensor;
      std::uint32_t first = 0;
      if (tensor.is_cpu() && tensor.nbytes() > 0)
        std::memcpy(&first, tensor.const_data_ptr(), std::min(sizeof first, tensor.nbytes()));
      else if (!tensor.is_cpu() && !tensor.is_inference())
        first = tensor._version();
      hash = hash * 31 + first;
    }
    return hash;
  }

  bool accumulates_ = false, watches_ = false, warned_of_step_ = false, warned_of_batch_ = false;
  std::uint64_t before_ = 0;
  DrawnBatch last_{};           // at the last backward
  std::size_t reductions_ = 0;  // in its pass
};

}  // namespace lockstep::inline v0_1::detail
