#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/same_errors.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/train/detail/epoch_partition.hpp"

namespace lockstep::detail {

/// Returns the name and type of the first module whose forward is collective, such as
/// "'1' (lockstep::SyncBatchNorm2dImpl)", or an empty string.
inline std::string meeting_module(const torch::nn::Module& model) {
  for (const auto& child : model.named_modules())
    if (const auto* meets = dynamic_cast<const CollectiveModule*>(child.value().get());
        meets && meets->ranks() > 1)
      return detail::formatted("'{}' ({})", child.key(), child.value()->name());
  return {};
}

/// Throws UsageError if the forward of a module is collective and the ranks run different numbers of
/// forwards, so that some ranks would wait for a forward that another rank does not run.
inline void require_equal_forwards(const torch::nn::Module& model, const EpochPartition& partition) {
  if (partition.equal_micro_batches()) return;
  if (const std::string module = meeting_module(model); !module.empty())
    throw UsageError(detail::formatted(
        "{} meets the other ranks in its forward, and at the end of the epoch some have one batch less than "
        "others: give them equally many, by pad = true or drop_last = true",
        module));
}

/// The state of a rank's stream at a micro-batch.
enum class Turn : char { none = 'n', more = 'm', last_of_step = 'l' };

/// Checks that all ranks run equally many forwards on a stream, whose length is unknown beforehand: compares
/// the streams' states over the ranks before each forward. One small collective per micro-batch, only for
/// models with a collective forward.
template <Gathering C>
class CollectiveForwardCheck {
 public:
  CollectiveForwardCheck(const torch::nn::Module& model, C& comm)
      : comm_(comm), module_(comm.size() > 1 ? meeting_module(model) : "") {}

  /// Throws an equal DataError on every rank if their turns differ. Collective and blocking; a no-op for
  /// models without a collective forward.
  void compare(Turn mine) const {
    if (module_.empty()) return;
    const std::vector<std::string> turns = comm_.all_gather_bytes(std::string(1, static_cast<char>(mine)));
    const auto other =
        std::find_if(turns.begin(), turns.end(), [&](const std::string& turn) { return turn != turns[0]; });
    if (other == turns.end()) return;
    const RankNames name_of(comm_);
    throw Common<DataError>(
        detail::formatted("the stream of rank {} {} where that of rank {} {}, and {} meets all ranks in its "
                          "forward: give every "
                          "rank equally many batches",
                          name_of(static_cast<std::size_t>(other - turns.begin())), text(*other), name_of(0),
                          text(turns[0]), module_));
  }

 private:
  static const char* text(const std::string& turn) {
    switch (static_cast<Turn>(turn[0])) {
      case Turn::none:
        return "has run out";
      case Turn::more:
        return "has more batches for this step";
      case Turn::last_of_step:
        return "has its last batch of this step";
    }
    return "";
  }

  C& comm_;
  std::string module_;
};

}  // namespace lockstep::detail
