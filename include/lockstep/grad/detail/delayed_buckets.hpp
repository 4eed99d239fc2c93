#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Returns the buckets of DdpOptions::delayed, one for each dtype and device. `trained` holds the parameters
/// that require grad, and `sparse[i]` is nonzero for sparse gradients. Throws UsageError for a name that is
/// unknown, sparse or repeated, and for an `until` that is itself delayed.
inline DelayedBuckets delayed_buckets(const std::vector<NamedTensor>& trained,
                                      const std::vector<char>& sparse, const DelayedParameters& delayed) {
  const auto refuse = [](const std::string& name, const char* why) {
    throw UsageError(detail::formatted("DdpOptions::delayed names '{}', {}", name, why));
  };
  const auto index_of = [&](const std::string& name) {
    const auto found = std::find_if(trained.begin(), trained.end(),
                                    [&](const NamedTensor& parameter) { return parameter.name == name; });
    if (found == trained.end())
      refuse(name, "and the model trains no such parameter (a tied one has its first name)");
    return static_cast<std::size_t>(found - trained.begin());
  };
  DelayedBuckets result;
  std::vector<char> placed(trained.size(), 0);
  for (const std::string& name : delayed.names) {
    const std::size_t index = index_of(name);
    if (sparse[index]) refuse(name, "whose gradient is sparse and travels by itself: leave it out");
    if (placed[index]) refuse(name, "twice");
    placed[index] = 1;
    const at::Tensor& tensor = trained[index].tensor;
    const auto home = std::find_if(result.buckets.begin(), result.buckets.end(), [&](const auto& bucket) {
      const at::Tensor& first = trained[bucket[0]].tensor;
      return first.scalar_type() == tensor.scalar_type() && first.device() == tensor.device();
    });
    (home == result.buckets.end() ? result.buckets.emplace_back() : *home).push_back(index);
  }
  if (delayed.until.empty()) return result;
  result.until = index_of(delayed.until);
  if (placed[*result.until])
    refuse(delayed.until, "to wait for itself: let `until` be another parameter, or leave it empty");
  return result;
}

}  // namespace lockstep::detail
