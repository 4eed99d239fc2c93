#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// What a bucket plan must know of a parameter: its bytes, and what it can share a bucket with (`dtype` and
/// `device` are only compared; a sparse gradient shares none, and a delayed one is in no bucket here).
struct ParameterSize {
  std::size_t bytes = 0;
  int dtype = 0;
  int device = 0;
  bool sparse = false;
  bool delayed = false;
};

/// The buckets in the order in which they are reduced, each a list of parameter indices in the order in which
/// they lie in memory.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// Python's size limits in bytes: 1 MiB for the first bucket, so that communication starts early, 25 MiB
/// after it.
inline std::vector<std::size_t> default_bucket_caps() {
  return {std::size_t{1} << 20, std::size_t{25} << 20};
}

/// Fills buckets with the parameters in `order`, one sequence of buckets for each (dtype, device). A bucket
/// closes after the parameter that reaches its limit: `caps[k]` for the k-th bucket of its sequence, the last
/// for all after. Buckets come in the order in which they close; those left open follow, the one opened first
/// before.
///
/// Contents, order within a bucket and limits are those of c10d::compute_bucket_assignment_by_size: at three
/// ranks and more, moving an element inside an all-reduce changes its bits.
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

/// The plan of the first iteration. Without `caps` one bucket for each (dtype, device), the parameters in
/// registration order: no order is known yet, and a bucket launched in a wrong one could meet another
/// collective of the model. With `caps`, which is Python's way where it searches for unused parameters and so
/// never rebuilds, and where it got a list of sizes, buckets of these sizes, in registration order too.
inline BucketPlan plan_by_registration(const std::vector<ParameterSize>& parameters,
                                       const std::vector<std::size_t>& caps = {}) {
  std::vector<std::size_t> order(parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  BucketPlan plan = assign_buckets(
      parameters, order, caps.empty() ? std::vector{std::numeric_limits<std::size_t>::max()} : caps);
  // Gradients come roughly in reverse: the bucket with the last parameters goes first.
  std::sort(plan.begin(), plan.end(), [](const auto& a, const auto& b) { return a[0] > b[0]; });
  return plan;
}

/// The plan of all later iterations, from the order in which the gradients of the first became ready.
inline BucketPlan plan_by_ready_order(const std::vector<ParameterSize>& parameters,
                                      const std::vector<std::size_t>& ready_order,
                                      const std::vector<std::size_t>& caps) {
  return assign_buckets(parameters, ready_order, caps);
}

/// Buckets that are reduced behind the one with the gradient of `until`, or behind all others without it.
struct DelayedBuckets {
  BucketPlan buckets;
  std::optional<std::size_t> until;
};

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
