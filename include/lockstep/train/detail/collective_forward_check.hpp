#pragma once

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/same_errors.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/train/detail/epoch_partition.hpp"

namespace lockstep::detail {

/// "'1' (lockstep::SyncBatchNorm2dImpl)" of the first module that meets other ranks in its forward, or
/// nothing.
inline std::string meeting_module(const torch::nn::Module& model) {
  for (const auto& child : model.named_modules())
    if (const auto* meets = dynamic_cast<const CollectiveModule*>(child.value().get());
        meets && meets->ranks() > 1)
      return fmt::format("'{}' ({})", child.key(), child.value()->name());
  return {};
}

/// Throws UsageError where a module meets the other ranks in its forward and some rank would have no forward
/// for the others' last: they would wait for it.
inline void require_equal_forwards(const torch::nn::Module& model, const EpochPartition& partition) {
  if (partition.equal_micro_batches()) return;
  if (const std::string module = meeting_module(model); !module.empty())
    throw UsageError(fmt::format(
        "{} meets the other ranks in its forward, and at the end of the epoch some have one batch less than "
        "others: give them equally many, by pad = true or drop_last = true",
        module));
}

/// What a rank's stream has for the coming micro-batch.
enum class Turn : char { none = 'n', more = 'm', last_of_step = 'l' };

/// The same for a stream, of which only each turn tells: compares it over all ranks before anyone's forward
/// may wait for another's. One small collective a micro-batch, for models that meet alone.
template <Gathering C>
class CollectiveForwardCheck {
 public:
  CollectiveForwardCheck(const torch::nn::Module& model, C& comm)
      : comm_(comm), module_(comm.size() > 1 ? meeting_module(model) : "") {}

  /// Throws one and the same DataError on every rank where their turns differ.
  void compare(Turn mine) const {
    if (module_.empty()) return;
    const std::vector<std::string> turns = comm_.all_gather_bytes(std::string(1, static_cast<char>(mine)));
    const auto other =
        std::find_if(turns.begin(), turns.end(), [&](const std::string& turn) { return turn != turns[0]; });
    if (other == turns.end()) return;
    const RankNames name_of(comm_);
    throw Common<DataError>(
        fmt::format("the stream of rank {} {} where that of rank {} {}, and {} meets all ranks in its "
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
