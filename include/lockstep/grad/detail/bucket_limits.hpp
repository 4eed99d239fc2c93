#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Returns the bucket size limits of the first reduction in bytes; empty (no limit) unless Python applies its
/// limits from the first reduction on: when it searches for unused parameters or got a list of limits.
inline std::vector<std::size_t> caps_at_first(const DdpOptions& options) {
  const bool searches = options.find_unused_parameters && !options.static_graph;
  auto caps = bucket_caps(options);
  const bool listed = caps.size() > 1 && caps != default_bucket_caps();
  return searches || listed ? std::move(caps) : std::vector<std::size_t>{};
}

/// Returns what assign_buckets must know of each parameter.
inline std::vector<ParameterSize> sizes_of(const std::vector<NamedTensor>& parameters,
                                           const std::vector<char>& sparse, const DelayedBuckets& delayed) {
  std::vector<ParameterSize> sizes;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    sizes.push_back({static_cast<std::size_t>(tensor.numel()) * tensor.element_size(),
                     static_cast<int>(tensor.scalar_type()),
                     static_cast<int>(tensor.device().type()) * 256 + tensor.device().index(), sparse[i] != 0,
                     false});
  }
  for (const auto& bucket : delayed.buckets)
    for (const std::size_t i : bucket) sizes[i].delayed = true;
  return sizes;
}

}  // namespace lockstep::detail
