#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::detail {


/// The memory of the buckets, and the gradients in it.
///
/// A bucket view is a tensor over the bucket's memory with the layout that autograd gives the gradient: the
/// parameter's strides if the parameter is dense, else contiguous. It is created by `set_` and is not an
/// autograd view: `zero_grad(false)` detaches gradients in place, which autograd refuses for views. The
/// bucket of a sparse parameter holds that parameter alone and has no memory.
class GradientBuckets {
 public:
  /// Extra elements at the end of each bucket's memory; those of the last bucket carry sample counts.
  static constexpr std::int64_t tail = 2;

  /// Gradients are divided by `divisor` when copied in; 1 if the communication hook averages. With
  /// GradientStorage::gradient_as_bucket_view, existing gradients move into their bucket views; with
  /// `only_adoptable`, only those that are the `adoptable` of their entry.
  GradientBuckets(std::span<ParameterEntry> parameters, const BucketPlan& plan, GradientStorage storage,
                  int divisor, bool only_adoptable = false);

  [[nodiscard]] std::size_t size() const { return buckets_.size(); }
  /// Returns the bucket as communication hooks get it.
  [[nodiscard]] GradientBucket& operator[](std::size_t bucket) { return buckets_[bucket].gradients; }
  [[nodiscard]] const std::vector<std::size_t>& members(std::size_t bucket) const {
    return buckets_[bucket].gradients.parameters;
  }
  [[nodiscard]] bool sparse(std::size_t bucket) const { return parameters_[members(bucket)[0]].sparse; }
  [[nodiscard]] bool empty(std::size_t bucket) const {
    return !sparse(bucket) && buckets_[bucket].gradients.flat.numel() == 0;
  }
  /// Returns the bucket's memory including its tail.
  [[nodiscard]] const at::Tensor& with_tail(std::size_t bucket) const { return buckets_[bucket].with_tail; }

  /// Copies parameter i's gradient into its bucket view and scales it: by `weight` if that is defined, else
  /// by 1 / divisor if `scaled` (false if a later step divides). An undefined gradient is copied as zeros.
  /// `attach` makes `p.grad()` alias the bucket view; it is false for a parameter that no backward has
  /// reached, whose older gradient is reduced but keeps its own memory. Throws GradientError if the dtype,
  /// device or shape of the gradient does not match.
  ///
  /// With GradientStorage::gradient_as_bucket_view a gradient that no backward has reached is attached too,
  /// as in Python: the reduction averages it in place, which may change its last bit at three ranks and more.
  /// A reduction of sums with counts, which Python does not have, leaves such a gradient unchanged.
  ///
  /// Scaling multiplies by the reciprocal, except for gradients that lie in their bucket view with
  /// gradient_as_bucket_view, which are divided: Python's arithmetic, whose bits differ at three ranks.
  void copy_to_bucket(std::size_t i, const at::Tensor& weight, bool scaled, bool attach);

  /// Sets parameter i's gradient to the reduced values in its bucket view.
  void copy_from_bucket(std::size_t i);

  /// Multiplies the whole bucket by `factor`; a factor of 0 also clears NaN.
  void scale(std::size_t bucket, double factor);

  /// Fills a bucket view whose parameter has no gradient with NaN, which survives every sum: all ranks find
  /// it.
  void poison(std::size_t i);

  /// Returns the parameter of the last non-empty bucket view in reduction order, or nullopt if all parameters
  /// are sparse or empty.
  [[nodiscard]] std::optional<std::size_t> last_view() const { return last_view_; }

 private:
  struct Bucket {
    GradientBucket gradients;
    at::Tensor with_tail;
    at::Tensor divisor, factor;  // the divisor and its reciprocal
  };

  void add(const std::vector<std::size_t>& members, std::size_t count);

  /// Moves an existing gradient into its bucket view, as Python does when it builds its buckets; the gradient
  /// is divided in place from then on.
  static void adopt(ParameterEntry& parameter);

  void copy_rows(std::size_t i, bool scaled);

  /// Returns the scalar with which Python multiplies and divides a gradient: a double that each operation
  /// converts to the gradient's dtype. Converts it here, once, if that does not change the bits.
  [[nodiscard]] static at::Tensor number_for(const at::Tensor& like, double value);

  static bool lies_in(const at::Tensor& grad, const at::Tensor& view);

  std::span<ParameterEntry> parameters_;
  GradientStorage storage_;
  int divisor_;
  std::vector<Bucket> buckets_;
  std::optional<std::size_t> last_view_;
};

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/gradient_buckets-inl.hpp"
#endif
