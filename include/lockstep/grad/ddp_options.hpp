#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep {

/// Where gradients are stored after backward, and which of Python's two averaging arithmetics is used. With
/// three or more ranks the two differ in their bits.
enum class GradientStorage {
  /// Gradients are bucket views; nothing is copied back. Bitwise equal to Python's default.
  in_bucket,
  /// Gradients are bucket views, bitwise equal to Python's `gradient_as_bucket_view=True`: a gradient that
  /// already lies in its bucket is divided by the world size, where the default multiplies by the reciprocal.
  /// With `find_unused_parameters`, a kept gradient that no rank has used is averaged again, as in Python.
  gradient_as_bucket_view,
  /// Gradients have memory of their own, at a fixed address. Python's default layout; costs one copy.
  separate
};

/// How buffers (running statistics) are synchronized before a training forward.
enum class BufferPolicy {
  /// Each rank keeps its own buffers.
  none,
  /// Broadcasts rank 0's buffers, as Python does.
  from_rank_zero,
  /// Averages floating-point buffers over the ranks and broadcasts rank 0's integer buffers.
  average
};

/// Parameters that are reduced together in buckets of their own, one per dtype and device.
struct DelayedParameters {
  /// Names of the parameters, in their memory order. Their gradients must be dense.
  std::vector<std::string> names = {};
  /// Name of another parameter: the delayed buckets are reduced right after the bucket that holds that
  /// parameter's gradient. Empty reduces them last.
  std::string until = {};
};

struct DdpOptions {
  /// Bucket size limits in MiB; fractions are allowed. The first value applies to the first bucket and so on;
  /// the last applies to all later buckets. One value is Python's bucket_cap_mb. Several values other than
  /// the default are Python's bucket_cap_mb_list and apply from the first reduction on. One value and the
  /// default apply from the rebuild of the buckets on, or from the first reduction with
  /// `find_unused_parameters`.
  std::vector<double> bucket_cap_mb = {1, 25};
  BufferPolicy broadcast_buffers = BufferPolicy::from_rank_zero;
  GradientStorage gradients = GradientStorage::in_bucket;
  /// Allows parameters to take no part in a backward. Each backward then traverses the graph of its loss,
  /// buckets are not rebuilt in ready order, and one more small all-reduce tells which parameters were used.
  /// A gradient that no rank has is left unchanged (except with GradientStorage::gradient_as_bucket_view). A
  /// gradient that some ranks have becomes the average on all ranks.
  bool find_unused_parameters = false;
  /// Promises that every backward follows the graph of the first: the same parameters are unused, and each
  /// gradient is produced as often. Needs no graph traversal and no further collective, and buckets are
  /// rebuilt. Takes precedence over `find_unused_parameters`.
  bool static_graph = false;
  /// Reduces many small, early gradients together without a bucket size limit, after other buckets have been
  /// launched. Bitwise equal to Python's delay_all_reduce_named_params and param_to_hook_all_reduce. Unlike
  /// in Python, the other options, the hook and the checks apply, and backward waits for these buckets.
  DelayedParameters delayed = {};
  /// Dtype of the parameters from a forward to the end of the reduction that follows it. Backward computes in
  /// this dtype; gradients are cast to the parameters' own dtype for the reduction. See
  /// DistributedDataParallel::before_forward. For hand-written loops only: Trainer and CapturedStep refuse it
  /// and have their Precision instead.
  ///
  /// Counterpart: param_dtype of Python's _MixedPrecision.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Dtype to which floating-point buffers are cast at construction, for good. Counterpart: buffer_dtype of
  /// Python's _MixedPrecision.
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  /// The device that the model is expected on; construction checks it. Leave it unset for a module that spans
  /// several devices. Counterpart: device_ids.
  std::optional<c10::Device> device = std::nullopt;
  /// Whether construction compares the models of the ranks and broadcasts rank 0's parameters and buffers.
  /// False promises that both are equal already, for example after another wrapper of the same model.
  bool init_sync = true;
  /// Names of parameters and buffers to exclude: they are not compared, broadcast or averaged, and a
  /// Trainer's optimizer does not get them.
  std::vector<std::string> ignored = {};
};

}  // namespace lockstep

namespace lockstep::detail {

/// Returns DdpOptions::bucket_cap_mb in bytes.
inline std::vector<std::size_t> bucket_caps(const DdpOptions& options) {
  std::vector<std::size_t> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(static_cast<std::size_t>(cap * (1 << 20)));
  return caps;
}

/// Returns the options that determine collectives and bits, which must be equal on every rank. `sparse` holds
/// the names of the parameters with sparse gradients.
template <class Hook>
NamedValues shared_options(const DdpOptions& options, const Hook& hook,
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
  for (const double cap : options.bucket_cap_mb) caps.push_back(detail::formatted("{}", cap));
  NamedValues named{{"bucket_cap_mb", list(caps)},
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
