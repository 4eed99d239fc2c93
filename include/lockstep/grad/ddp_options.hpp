#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/same_options.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"

namespace lockstep {

/// Where gradients lie after a backward, and with which of Python's two arithmetics they were averaged. At
/// three ranks and more the bits of the two differ.
enum class GradientStorage {
  /// In the buckets: nothing is copied back. The bits of Python's default.
  in_bucket,
  /// In the buckets, with the bits of Python's `gradient_as_bucket_view=True`: what lies in the bucket
  /// already is divided by the world size, where the default multiplies by its reciprocal. With
  /// `find_unused_parameters` a kept gradient that no rank has used is averaged again, as in Python.
  gradient_as_bucket_view,
  /// In memory of their own, which stays where it is: Python's default, at the price of a copy.
  separate
};

/// What happens to buffers (running statistics) before a forward in training.
enum class BufferPolicy {
  /// Each rank keeps its own.
  none,
  /// Rank 0's go to all ranks: what Python does.
  from_rank_zero,
  /// Floating ones become the average over the ranks; whole numbers are rank 0's.
  average
};

/// Parameters that are reduced together, apart from the buckets of the others.
struct DelayedParameters {
  /// By name, in the order in which they lie in memory. They have dense gradients.
  std::vector<std::string> names = {};
  /// Another parameter: theirs is the turn after the bucket with its gradient. Empty for the last turn of
  /// all.
  std::string until = {};
};

struct DdpOptions {
  /// Size limits of the buckets in MiB, fractions included: of the first, the second and so on; the last holds
  /// for all after it. One value is Python's bucket_cap_mb; several are its bucket_cap_mb_list, which holds
  /// from the first reduction on, the others from the rebuild of the buckets.
  std::vector<double> bucket_cap_mb = {1, 25};
  BufferPolicy broadcast_buffers = BufferPolicy::from_rank_zero;
  GradientStorage gradients = GradientStorage::in_bucket;
  /// Parameters may take no part in a backward, others each time. Each backward then walks the graph of its
  /// loss, buckets are not rebuilt in ready order, and one more small all-reduce tells who took part: a
  /// gradient that no rank has stays as it is (but see GradientStorage::gradient_as_bucket_view), one that some have
  /// becomes the average on all.
  bool find_unused_parameters = false;
  /// Every backward takes the way of the first: the parameters that took no part in it never will, and each
  /// gradient comes as often as in it. No search, no further exchange, and buckets are rebuilt. Goes before
  /// `find_unused_parameters`.
  bool static_graph = false;
  /// Python's delay_all_reduce_named_params and param_to_hook_all_reduce, with its bits: many small gradients
  /// that come early go in one reduction, a bucket without limit, when others are on their way. Unlike
  /// Python's they keep to the other options, the hook and the checks, and backward waits for them.
  DelayedParameters delayed = {};
  /// The type of the parameters from a forward to the end of the reduction that follows (param_dtype of
  /// Python's _MixedPrecision): backward computes in it, and its gradients are brought to the parameters' own
  /// type for the reduction. See DistributedDataParallel::before_forward. For loops by hand: a Trainer and a
  /// CapturedStep refuse it, which have their Precision.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// The type that floating-point buffers get when it is made, and keep (buffer_dtype of the same).
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  /// The device that the model is on, where the caller wants that checked (Python's device_ids). A module
  /// whose parts live on several devices has none: leave it out then, as with any other.
  std::optional<c10::Device> device = std::nullopt;
  /// Whether, when it is made, the ranks compare their models and take rank 0's parameters and buffers. False
  /// is a promise that both are equal already, such as after another wrapper of the same model.
  bool init_sync = true;
  /// Parameters and buffers, by name, that stay out: not compared, not sent, not averaged; a Trainer's
  /// optimizer does not get them.
  std::vector<std::string> ignored = {};
};

}  // namespace lockstep

namespace lockstep::detail {

/// DdpOptions::bucket_cap_mb in bytes.
inline std::vector<std::size_t> bucket_caps(const DdpOptions& options) {
  std::vector<std::size_t> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(static_cast<std::size_t>(cap * (1 << 20)));
  return caps;
}

/// What of the options decides about collectives and bits, and must be equal on every rank. `sparse` names
/// the parameters with sparse gradients.
template <class Hook>
NamedOptions shared_options(const DdpOptions& options, const Hook& hook,
                            const std::vector<std::string>& sparse) {
  static constexpr std::array gradients{"in_bucket", "gradient_as_bucket_view", "separate"};
  static constexpr std::array buffers{"none", "from_rank_zero", "average"};
  const auto text = [](bool on) { return on ? "true" : "false"; };
  const auto dtype = [](const auto& type) { return type ? c10::toString(*type) : "the parameters' own"; };
  const auto list = [](const std::vector<std::string>& items) {
    std::string all;
    for (const std::string& item : items) all += (all.empty() ? "{" : ", ") + item;
    return (all.empty() ? "{" : all) + "}";
  };
  std::vector<std::string> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(fmt::to_string(cap));
  NamedOptions named{{"bucket_cap_mb", list(caps)},
                     {"broadcast_buffers", buffers.at(static_cast<std::size_t>(options.broadcast_buffers))},
                     {"gradients", gradients.at(static_cast<std::size_t>(options.gradients))},
                     {"find_unused_parameters", text(options.find_unused_parameters)},
                     {"static_graph", text(options.static_graph)},
                     {"delayed.names", list(options.delayed.names)},
                     {"delayed.until", "'" + options.delayed.until + "'"},
                     {"param_dtype", dtype(options.param_dtype)},
                     {"buffer_dtype", dtype(options.buffer_dtype)},
                     {"init_sync", text(options.init_sync)},
                     {"the list of sparse gradients", list(sparse)},
                     {"the communication hook", std::string(hook.name())}};
  if constexpr (requires { hook.settings(); })
    for (auto& [name, value] : hook.settings())
      named.emplace_back("the hook's " + std::move(name), std::move(value));
  return named;
}

}  // namespace lockstep::detail
