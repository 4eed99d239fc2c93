#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::vector<std::size_t> default_bucket_caps() {
  return {std::size_t{1} << 20, std::size_t{25} << 20};
}

LOCKSTEP_INLINE std::vector<std::size_t> bucket_caps(const DdpOptions& options) {
  std::vector<std::size_t> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(static_cast<std::size_t>(cap * (1 << 20)));
  return caps;
}

LOCKSTEP_INLINE std::vector<std::size_t> caps_at_first(const DdpOptions& options) {
  const bool searches = options.find_unused_parameters && !options.static_graph;
  auto caps = bucket_caps(options);
  const bool listed = caps.size() > 1 && caps != default_bucket_caps();
  return searches || listed ? std::move(caps) : std::vector<std::size_t>{};
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
    if (parameter.delayed) continue;
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

LOCKSTEP_INLINE BucketPlan with_delayed(BucketPlan plan, const DelayedBuckets& delayed) {
  auto place = plan.end();
  if (delayed.until) {
    place = std::find_if(plan.begin(), plan.end(), [&](const auto& bucket) {
      return std::find(bucket.begin(), bucket.end(), *delayed.until) != bucket.end();
    });
    if (place != plan.end()) ++place;
  }
  plan.insert(place, delayed.buckets.begin(), delayed.buckets.end());
  return plan;
}

LOCKSTEP_INLINE DelayedBuckets delayed_buckets(std::span<ParameterEntry> trained,
                                               const DelayedParameters& delayed) {
  const auto refuse = [](const std::string& name, const char* why) {
    throw UsageError(detail::formatted("DdpOptions::delayed names '{}', {}", name, why));
  };
  const auto index_of = [&](const std::string& name) {
    const auto found = std::find_if(trained.begin(), trained.end(),
                                    [&](const ParameterEntry& parameter) { return parameter.name == name; });
    if (found == trained.end())
      refuse(name, "and the model trains no such parameter (a tied one has its first name)");
    return static_cast<std::size_t>(found - trained.begin());
  };
  DelayedBuckets result;
  for (ParameterEntry& parameter : trained) parameter.delayed = false;
  for (const std::string& name : delayed.names) {
    const std::size_t index = index_of(name);
    ParameterEntry& parameter = trained[index];
    if (parameter.sparse) refuse(name, "whose gradient is sparse and travels by itself: leave it out");
    if (std::exchange(parameter.delayed, true)) refuse(name, "twice: name it once");
    const auto home = std::find_if(result.buckets.begin(), result.buckets.end(), [&](const auto& bucket) {
      const ParameterEntry& first = trained[bucket[0]];
      return first.dtype == parameter.dtype && first.device == parameter.device;
    });
    (home == result.buckets.end() ? result.buckets.emplace_back() : *home).push_back(index);
  }
  if (!delayed.until) return result;
  result.until = index_of(*delayed.until);
  if (trained[*result.until].delayed)
    refuse(*delayed.until, "to wait for itself: let `until` be another parameter, or leave it out");
  return result;
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
