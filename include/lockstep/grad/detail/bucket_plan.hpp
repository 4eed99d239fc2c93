#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::inline v0_1::detail {

/// The buckets in reduction order, each a list of parameter indices in memory order.
using BucketPlan = std::vector<std::vector<std::size_t>>;

inline std::vector<std::size_t> bucket_caps(const DdpOptions& options) {
  std::vector<std::size_t> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(static_cast<std::size_t>(cap * (1 << 20)));
  return caps;
}

/// Returns the bucket size limits of the first reduction in bytes; empty (no limit) unless Python applies its
/// limits from the first reduction on: when it searches for unused parameters or got a list of limits.
inline std::vector<std::size_t> caps_at_first(const DdpOptions& options) {
  const bool searches = options.find_unused_parameters && !options.static_graph;
  const auto& caps = options.bucket_cap_mb;
  const bool listed = caps.size() > 1 && caps != DdpOptions().bucket_cap_mb;
  return searches || listed ? bucket_caps(options) : std::vector<std::size_t>{};
}

/// Assigns the parameters in `order` to buckets, one sequence of buckets for each (dtype, device). A bucket
/// closes after the parameter that reaches its limit: `caps[k]` for the k-th bucket of its sequence, and
/// the last cap for all later ones. A sparse parameter gets a bucket of its own. Buckets are sorted by the
/// order in which they close; buckets that remain open follow, in the order in which their sequences began.
///
/// Contents, order within a bucket and limits match c10d::compute_bucket_assignment_by_size: with three or
/// more ranks, moving an element inside an all-reduce changes its bits.
inline BucketPlan assign_buckets(std::span<const ParameterEntry> parameters,
                                 const std::vector<std::size_t>& order,
                                 const std::vector<std::size_t>& caps) {
  struct Sequence {
    at::ScalarType dtype;
    at::Device device;
    std::size_t cap = 0, bytes = 0;
    std::vector<std::size_t> open;
  };
  BucketPlan plan;
  std::vector<Sequence> sequences;
  for (const std::size_t index : order) {
    const ParameterEntry& parameter = parameters[index];
    if (parameter.sparse) {
      plan.push_back({index});
      continue;
    }
    auto sequence = std::find_if(sequences.begin(), sequences.end(), [&](const Sequence& candidate) {
      return candidate.dtype == parameter.dtype && candidate.device == parameter.device;
    });
    if (sequence == sequences.end())
      sequence = sequences.insert(sequences.end(), Sequence{parameter.dtype, parameter.device, 0, 0, {}});
    sequence->open.push_back(index);
    sequence->bytes += parameter.bytes;
    if (sequence->bytes < caps.at(sequence->cap)) continue;
    plan.push_back(std::exchange(sequence->open, {}));
    sequence->bytes = 0;
    sequence->cap = std::min(sequence->cap + 1, caps.size() - 1);
  }
  for (Sequence& sequence : sequences)
    if (!sequence.open.empty()) plan.push_back(std::move(sequence.open));
  return plan;
}

/// Returns the plan of the first iteration, with the parameters in registration order. Without `caps` there
/// is one bucket for each (dtype, device): the ready order is unknown, and a bucket launched in a wrong order
/// could pair with another collective of the model.
inline BucketPlan plan_by_registration(std::span<const ParameterEntry> parameters,
                                       const std::vector<std::size_t>& caps = {}) {
  std::vector<std::size_t> order(parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  BucketPlan plan = assign_buckets(
      parameters, order, caps.empty() ? std::vector{std::numeric_limits<std::size_t>::max()} : caps);
  // Gradients become ready roughly in reverse: the bucket with the last parameters goes first.
  std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a[0] > b[0]; });
  return plan;
}

/// Returns the parameters in the order of their last entry in `fired`, which lists a parameter for each hook
/// call; parameters that did not fire follow.
inline std::vector<std::size_t> completion_order(const std::vector<std::size_t>& fired,
                                                 std::size_t parameters) {
  std::vector<std::size_t> order;
  std::vector<char> placed(parameters);
  for (std::size_t k = fired.size(); k-- > 0;)
    if (!std::exchange(placed[fired[k]], true)) order.push_back(fired[k]);
  std::reverse(order.begin(), order.end());
  for (std::size_t i = 0; i < placed.size(); ++i)
    if (!placed[i]) order.push_back(i);
  // A rank without data has no order. Reverse registration order is the best guess.
  if (fired.empty()) std::reverse(order.begin(), order.end());
  return order;
}

inline bool is_order_of(const std::vector<std::size_t>& order, std::size_t parameters) {
  std::vector<char> named(parameters);
  return order.size() == parameters && std::all_of(order.begin(), order.end(), [&](std::size_t index) {
           return index < parameters && !std::exchange(named[index], true);
         });
}

/// Returns rank 0's order on every rank. Collective and blocking.
template <Communicator Comm>
std::vector<std::size_t> order_of_rank_zero(Comm& comm, const std::vector<std::size_t>& mine,
                                            at::Device device) {
  const auto length = static_cast<std::int64_t>(mine.size());
  at::Tensor order = at::empty({length}, at::TensorOptions(at::kLong).device(device));
  at::Tensor host = at::empty({length}, at::kLong);
  std::copy(mine.begin(), mine.end(), host.mutable_data_ptr<std::int64_t>());
  order.copy_(host);
  comm.broadcast(order, 0).synchronize();
  host.copy_(order);
  const auto* first = const_data<std::int64_t>(host);
  return {first, first + length};
}

}  // namespace lockstep::inline v0_1::detail
