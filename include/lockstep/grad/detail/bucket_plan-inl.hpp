#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/detail/linkage.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::vector<std::size_t> bucket_caps(const DdpOptions& options) {
  std::vector<std::size_t> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(static_cast<std::size_t>(cap * (1 << 20)));
  return caps;
}

LOCKSTEP_INLINE std::vector<std::size_t> caps_at_first(const DdpOptions& options) {
  const bool searches = options.find_unused_parameters && !options.static_graph;
  const auto& caps = options.bucket_cap_mb;
  const bool listed = caps.size() > 1 && caps != DdpOptions().bucket_cap_mb;
  return searches || listed ? bucket_caps(options) : std::vector<std::size_t>{};
}

LOCKSTEP_INLINE BucketPlan assign_buckets(std::span<const ParameterEntry> parameters,
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

LOCKSTEP_INLINE BucketPlan plan_by_registration(std::span<const ParameterEntry> parameters,
                                                const std::vector<std::size_t>& caps) {
  std::vector<std::size_t> order(parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  BucketPlan plan = assign_buckets(
      parameters, order, caps.empty() ? std::vector{std::numeric_limits<std::size_t>::max()} : caps);
  // Gradients become ready roughly in reverse: the bucket with the last parameters goes first.
  std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a[0] > b[0]; });
  return plan;
}

LOCKSTEP_INLINE std::vector<std::size_t> completion_order(const std::vector<std::size_t>& fired,
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

LOCKSTEP_INLINE bool is_order_of(const std::vector<std::size_t>& order, std::size_t parameters) {
  std::vector<char> named(parameters);
  return order.size() == parameters && std::all_of(order.begin(), order.end(), [&](std::size_t index) {
           return index < parameters && !std::exchange(named[index], true);
         });
}

}  // namespace lockstep::detail
