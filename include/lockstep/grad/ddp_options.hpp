#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace lockstep::inline v0_1 {

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

/// Options of DistributedDataParallel. They must be equal on every rank.
struct DdpOptions {
  /// Bucket size limits in MiB; fractions are allowed. The first value applies to the first bucket and so on; the last
  /// applies to all later buckets. One value is Python's bucket_cap_mb. Several values other than the default are
  /// Python's bucket_cap_mb_list and apply from the first reduction on. One value and the default apply from the
  /// rebuild of the buckets on, or from the first reduction with `find_unused_parameters`.
  std::vector<double> bucket_cap_mb = {1, 25};
  /// Whether rank 0's buffers (running statistics) are broadcast, at construction and before training forwards.
  /// If false, each rank keeps its own.
  bool broadcast_buffers = true;
  /// Whether they are broadcast before training forwards. If false, at construction alone.
  bool forward_sync_buffers = true;
  GradientStorage gradients = GradientStorage::in_bucket;  ///< counterpart: gradient_as_bucket_view
  /// Allows parameters to take no part in a backward. Each backward then traverses the graph of its loss,
  /// buckets are not rebuilt in ready order, and one more small all-reduce tells which parameters were used.
  /// A gradient that no rank has is left unchanged (except with GradientStorage::gradient_as_bucket_view). A
  /// gradient that some ranks have becomes the average on all ranks.
  bool find_unused_parameters = false;
  /// Promises that every backward follows the graph of the first: the same parameters are unused, and each
  /// gradient is produced as often. Needs no graph traversal and no further collective, and buckets are
  /// rebuilt. Takes precedence over `find_unused_parameters`.
  bool static_graph = false;
  /// Divides a whole bucket by the number of ranks, as Python's `batched_grad_copy=True` does. By default a copied
  /// gradient is multiplied by the reciprocal, as in Python's default; the bits differ unless the number of ranks is a
  /// power of two. Copies are batched either way. No effect on backward_sum and on hooks that do not predivide.
  bool batched_grad_copy = false;
  /// Allocates a bucket when its first gradient is ready and releases it after backward, so that buckets and
  /// activations overlap less. A gradient that is a bucket view keeps its bucket until it is cleared. Each backward then
  /// waits for its reduction, also on devices. Counterpart: lazy_bucket_allocation.
  bool lazy_bucket_allocation = false;
  /// Neither stores nor reduces buckets of parameters that no rank used in the first reduction. A later backward that
  /// uses such a parameter throws GradientError, where Python may hang. No effect unless `find_unused_parameters` or
  /// `static_graph` is set. Counterpart: skip_all_reduce_unused_params.
  bool skip_all_reduce_unused_params = false;
  /// The device that the model is expected on; construction checks it. Leave it unset for a module that spans
  /// several devices. Counterpart: device_ids.
  std::optional<c10::Device> device = std::nullopt;
  /// Whether construction compares the models of the ranks and broadcasts rank 0's parameters and buffers.
  /// False promises that both are equal already, for example after another wrapper of the same model.
  bool init_sync = true;
  /// Names of parameters and buffers to exclude. They are not compared, broadcast or averaged, and a Trainer
  /// does not pass them to its optimizer.
  std::vector<std::string> ignored = {};

  /// Returns whether training forwards synchronize the buffers, so that each rank's need not be saved.
  [[nodiscard]] bool syncs_buffers() const { return broadcast_buffers && forward_sync_buffers; }
};

/// One bucket of this rank's last reduction.
struct BucketReport {
  std::vector<std::size_t> parameters;  ///< indices into those that require grad, in memory order
  std::int64_t bytes = 0;               ///< 0 for a sparse bucket, whose number of rows varies
  bool sparse = false;                  ///< one parameter's sparse gradient, which is gathered
  double launched = 0;                  ///< seconds from the start of backward to the launch of its reduction
  /// Seconds from the start of backward to its completion; 0 unless DistributedDataParallel::record_completions.
  double completed = 0;
};

/// Statistics of this rank's last reduction, and totals over all reductions. Times are in seconds of host time.
struct DdpReport {
  std::int64_t reductions = 0;                       ///< completed so far
  std::chrono::steady_clock::time_point began = {};  ///< of the last backward; the times are relative to it
  std::string hook;                                  ///< the name of the communication hook
  std::vector<BucketReport> buckets;                 ///< in bucket order
  /// Indices into the parameters that require grad, in the order in which the gradients of the last reduction
  /// became ready, and of those that took no part in the last backward on this rank.
  std::vector<std::size_t> ready_order, unused;
  std::vector<std::string> unused_names;  ///< of `unused`
  double forward = 0;                     ///< from the last `before_forward` to the start of backward
  double backward = 0;                    ///< from the start of backward to the last gradient
  double communication = 0;       ///< from the launch of the first bucket to the completion of the last
  double overlap = 0;             ///< the part of `communication` that overlaps backward
  std::int64_t bytes = 0;         ///< passed to collectives by the last reduction
  std::int64_t bytes_so_far = 0;  ///< the sum of `bytes` over all reductions
};

}  // namespace lockstep::inline v0_1
