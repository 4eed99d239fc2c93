#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/grad/bucket_plan.hpp"

namespace lockstep {

/// Where gradients lie after a backward, and with which of Python's two arithmetics they were averaged. At
/// three ranks and more the bits of the two differ.
enum class GradientStorage {
  /// In the buckets: nothing is copied back. The bits of Python's default.
  in_bucket,
  /// In the buckets, with the bits of Python's `gradient_as_bucket_view=True`: what lies in the bucket
  /// already is divided by the world size, where the default multiplies by its reciprocal.
  bucket_view,
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

struct DdpOptions {
  /// Size limits of the buckets in bytes, of the first, the second and so on; the last holds for all after
  /// it. One value alone is what Python's bucket_cap_mb sets (times 2^20), several are its
  /// bucket_cap_mb_list, which holds from the first reduction on; the others hold once buckets are rebuilt.
  std::vector<std::size_t> bucket_caps = default_bucket_caps();
  BufferPolicy buffers = BufferPolicy::from_rank_zero;
  GradientStorage gradients = GradientStorage::in_bucket;
  /// Parameters may take no part in a backward, others each time. Each backward then walks the graph of its
  /// loss, buckets are not rebuilt in ready order, and one more small all-reduce tells who took part: a
  /// gradient that no rank has stays as it is, one that some have becomes the average on all.
  bool find_unused_parameters = false;
  /// Every backward takes the way of the first: the parameters that took no part in it never will, and each
  /// gradient comes as often as in it. No walk, no further exchange, and buckets are rebuilt. Goes before
  /// `find_unused_parameters`.
  bool static_graph = false;
  /// The device that the model is on, where the caller wants that checked (Python's device_ids). A module
  /// whose parts live on several devices has none: leave it out then, as with any other.
  std::optional<c10::Device> device = std::nullopt;
  /// Parameters and buffers, by name, that stay out: not compared, not sent, not averaged.
  std::vector<std::string> ignored = {};
};

}  // namespace lockstep
