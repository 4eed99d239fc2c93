#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// The properties of a parameter that determine its bucket. `dtype` and `device` are only compared. A sparse
/// parameter gets a bucket of its own; assign_buckets skips delayed parameters.
struct ParameterSize {
  std::size_t bytes = 0;
  int dtype = 0;
  int device = 0;
  bool sparse = false;
  bool delayed = false;
};

/// The buckets in reduction order, each a list of parameter indices in memory order.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// Returns Python's size limits in bytes: 1 MiB for the first bucket, so that communication starts early, and
/// 25 MiB for all others.
inline std::vector<std::size_t> default_bucket_caps() {
  return {std::size_t{1} << 20, std::size_t{25} << 20};
}

/// Assigns the parameters in `order` to buckets, one sequence of buckets for each (dtype, device). A bucket
/// closes after the parameter that reaches its limit: `caps[k]` for the k-th bucket of its sequence, and the
/// last cap for all later ones. Buckets are sorted by the order in which they close; buckets that remain open
/// follow, in the order in which their sequences began.
///
/// Contents, order within a bucket and limits match c10d::compute_bucket_assignment_by_size: with three or
/// more ranks, moving an element inside an all-reduce changes its bits.
inline BucketPlan assign_buckets(const std::vector<ParameterSize>& parameters,
                                 const std::vector<std::size_t>& order,
                                 const std::vector<std::size_t>& caps) {
  struct Sequence {
    int dtype, device;
    std::size_t cap = 0, bytes = 0;
    std::vector<std::size_t> open;
  };
  BucketPlan plan;
  std::vector<Sequence> sequences;
  for (const std::size_t index : order) {
    const ParameterSize& parameter = parameters.at(index);
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

/// Returns the plan of the first iteration, with the parameters in registration order. Without `caps` there
/// is one bucket for each (dtype, device): the ready order is unknown, and a bucket launched in a wrong order
/// could pair with another collective of the model. With `caps` the buckets have these size limits, as in
/// Python if it searches for unused parameters, and so never rebuilds, or got a list of limits.
inline BucketPlan plan_by_registration(const std::vector<ParameterSize>& parameters,
                                       const std::vector<std::size_t>& caps = {}) {
  std::vector<std::size_t> order(parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  BucketPlan plan = assign_buckets(
      parameters, order, caps.empty() ? std::vector{std::numeric_limits<std::size_t>::max()} : caps);
  // Gradients become ready roughly in reverse: the bucket with the last parameters goes first.
  std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a[0] > b[0]; });
  return plan;
}

/// Returns the plan of all later iterations, from the ready order of the first.
inline BucketPlan plan_by_ready_order(const std::vector<ParameterSize>& parameters,
                                      const std::vector<std::size_t>& ready_order,
                                      const std::vector<std::size_t>& caps) {
  return assign_buckets(parameters, ready_order, caps);
}

/// The buckets of DdpOptions::delayed, reduced right after the bucket that holds parameter `until`, or last
/// if `until` is unset.
struct DelayedBuckets {
  BucketPlan buckets;
  std::optional<std::size_t> until;
};

/// Returns `plan` with the delayed buckets inserted.
inline BucketPlan with_delayed(BucketPlan plan, const DelayedBuckets& delayed) {
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

}  // namespace lockstep::detail
