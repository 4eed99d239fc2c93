#pragma once

#include <torch/nn/module.h>

#include <string>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/train/detail/epoch_partition.hpp"

namespace lockstep::detail {

/// Returns the name and type of the first module whose forward is collective, such as
/// "'1' (lockstep::SyncBatchNorm2dImpl)", or an empty string.
inline std::string collective_module(const torch::nn::Module& model) {
  for (const auto& child : model.named_modules())
    if (const auto* module = dynamic_cast<const CollectiveModule*>(child.value().get());
        module && module->ranks() > 1)
      return detail::formatted("'{}' ({})", child.key(), child.value()->name());
  return {};
}

/// Throws UsageError if the forward of a module is collective and the ranks run different numbers of
/// forwards, so that some ranks would wait for a forward that another rank does not run.
inline void require_equal_forwards(const torch::nn::Module& model, const EpochPartition& partition) {
  if (partition.equal_micro_batches()) return;
  if (const std::string module = collective_module(model); !module.empty())
    throw UsageError(detail::formatted(
        "{} is collective in its forward, and at the end of the epoch some ranks have one batch less than "
        "others: give every rank equally many, by pad = true or drop_last = true",
        module));
}

/// The state of a rank's stream at a micro-batch.
enum class Turn { none, more, last_of_step };

/// Checks that all ranks run equally many forwards on a stream, whose length is unknown beforehand: compares
/// the streams' states over the ranks before each forward. One small collective per micro-batch, only for
/// models with a collective forward.
template <Communicator C>
class CollectiveForwardCheck {
 public:
  CollectiveForwardCheck(const torch::nn::Module& model, C& comm)
      : comm_(comm), module_(comm.size() > 1 ? collective_module(model) : "") {}

  /// Throws an equal DataError on every rank if their turns differ. Collective and blocking; a no-op for
  /// models without a collective forward.
  void compare(Turn mine) const {
    if (module_.empty()) return;
    require_equal<DataError>(
        comm_, {{"the stream", text(mine)}},
        module_ + " is collective in its forward, and the ranks' streams differ in length",
        "give every rank equally many batches");
  }

 private:
  static const char* text(Turn turn) {
    switch (turn) {
      case Turn::none:
        return "exhausted";
      case Turn::more:
        return "within a step";
      case Turn::last_of_step:
        return "at the last batch of a step";
    }
    return "";
  }

  C& comm_;
  std::string module_;
};

}  // namespace lockstep::detail
