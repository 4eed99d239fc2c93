#pragma once

#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::detail {

/// The memory of the buckets, and the gradients in it.
///
/// A bucket view has the layout that autograd gives the gradient: the parameter's strides if the parameter is
/// dense, else contiguous. It is created by `set_` and is not an autograd view: `zero_grad(false)` detaches
/// gradients in place, which autograd refuses for views. The bucket of a sparse parameter has no memory.
class GradientBuckets {
 public:
  /// Extra elements at the end of each bucket's memory; those of the last bucket carry sample counts.
  static constexpr std::int64_t tail = 2;

  /// Gradients are divided by `divisor` when copied in; 1 if the communication hook averages. With
  /// GradientStorage::gradient_as_bucket_view, existing gradients move into their bucket views; with
  /// `only_adoptable`, only those that are the `adoptable` of their entry.
  GradientBuckets(std::span<ParameterEntry> parameters, const BucketPlan& plan, GradientStorage storage,
                  int divisor, bool only_adoptable = false)
      : parameters_(parameters), storage_(storage), divisor_(divisor) {
    // Release the memory of earlier buckets first.
    for (ParameterEntry& parameter : parameters_) {
      parameter.view.reset();
      parameter.rows.reset();
    }
    for (const auto& members : plan) add(members, plan.size());
    if (storage_ == GradientStorage::gradient_as_bucket_view)
      for (ParameterEntry& parameter : parameters_)
        if (parameter.view.defined() &&
            (!only_adoptable || parameter.gradient().is_same(parameter.adoptable)))
          adopt(parameter);
    for (const auto& members : plan)
      for (const std::size_t i : members)
        if (parameters_[i].view.defined() && parameters_[i].view.numel() > 0) last_view_ = i;
  }

  [[nodiscard]] std::size_t size() const { return buckets_.size(); }
  [[nodiscard]] GradientBucket& operator[](std::size_t bucket) { return buckets_[bucket].gradients; }
  [[nodiscard]] const std::vector<std::size_t>& members(std::size_t bucket) const {
    return buckets_[bucket].gradients.parameters;
  }
  [[nodiscard]] bool sparse(std::size_t bucket) const { return parameters_[members(bucket)[0]].sparse; }
  [[nodiscard]] bool empty(std::size_t bucket) const {
    return !sparse(bucket) && buckets_[bucket].gradients.flat.numel() == 0;
  }
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
  void copy_to_bucket(std::size_t i, const at::Tensor& weight, bool scaled, bool attach) {
    ParameterEntry& parameter = parameters_[i];
    if (parameter.sparse) return copy_rows(i, scaled);
    at::Tensor& grad = parameter.gradient();
    at::Tensor& view = parameter.view;
    if (!grad.defined()) {
      view.zero_();
      return;
    }
    if (storage_ == GradientStorage::gradient_as_bucket_view && scaled && !weight.defined()) attach = true;
    const bool divide = !weight.defined() && scaled && divisor_ != 1;
    const Bucket& bucket = buckets_[parameter.bucket];
    if (lies_in(grad, view)) {
      if (!attach) grad = grad.clone();
      if (weight.defined()) view.mul_(weight);
      if (!divide) return;
      if (storage_ == GradientStorage::gradient_as_bucket_view)
        view.div_(bucket.divisor);
      else
        view.mul_(bucket.factor);
      return;
    }
    if (grad.layout() != at::kStrided)
      throw GradientError(detail::formatted(
          "the gradient of parameter {} '{}' is {}, which only Embedding and EmbeddingBag with sparse(true) "
          "support; build its layer with dense gradients",
          i, parameter.name, grad.is_sparse() ? "sparse" : "of a layout without strides (CSR, mkldnn)"));
    if (grad.scalar_type() != view.scalar_type() || grad.device() != view.device() ||
        grad.sizes() != view.sizes())
      throw GradientError(
          detail::formatted("the gradient of parameter {} '{}' has another dtype, device or shape than the "
                            "parameter had when DistributedDataParallel was made; convert the model before",
                            i, parameter.name));
    if (weight.defined())
      at::mul_out(view, grad, weight);
    else if (divide)
      at::mul_out(view, grad, bucket.factor);
    else
      view.copy_(grad);
    if (attach && storage_ != GradientStorage::separate) grad = view;
  }

  void copy_from_bucket(std::size_t i) {
    at::Tensor& grad = parameters_[i].gradient();
    const at::Tensor& view = parameters_[i].view;
    if (storage_ != GradientStorage::separate) {
      if (!grad.defined() || !lies_in(grad, view)) grad = view;
    } else if (grad.defined()) {
      grad.copy_(view);
    } else {
      grad = at::empty_like(view).copy_(view);
    }
  }

  /// Multiplies the whole bucket by `factor`; a factor of 0 also clears NaN.
  void scale(std::size_t bucket, double factor) {
    at::Tensor& flat = buckets_[bucket].gradients.flat;
    factor == 0 ? flat.zero_() : flat.mul_(factor);
  }

  /// Fills a bucket view with NaN, which survives every sum.
  void poison(std::size_t i) {
    if (parameters_[i].view.defined()) parameters_[i].view.fill_(std::numeric_limits<double>::quiet_NaN());
  }

  /// Returns the parameter of the last non-empty bucket view in reduction order, or nullopt if all parameters
  /// are sparse or empty.
  [[nodiscard]] std::optional<std::size_t> last_view() const { return last_view_; }

 private:
  struct Bucket {
    GradientBucket gradients;
    at::Tensor with_tail;
    at::Tensor divisor, factor;  // the divisor and its reciprocal
  };

  void add(const std::vector<std::size_t>& members, std::size_t count) {
    const ParameterEntry& leader = parameters_[members.at(0)];
    const at::Tensor first = at::empty({0}, leader.tensor.options().dtype(leader.dtype));
    Bucket bucket;
    bucket.gradients.index = buckets_.size();
    bucket.gradients.count = count;
    bucket.gradients.parameters = members;
    for (const std::size_t i : members) parameters_[i].bucket = buckets_.size();
    if (!leader.sparse) {
      std::int64_t length = 0;
      for (const std::size_t i : members) length += parameters_[i].tensor.numel();
      bucket.with_tail = at::empty({length + tail}, first.options());
      const auto storage = bucket.with_tail.storage();
      bucket.gradients.flat = at::empty({0}, first.options()).set_(storage, 0, {length});
      // Gloo does not support complex dtypes: they travel as pairs of real numbers.
      if (first.is_complex()) bucket.gradients.flat = at::view_as_real(bucket.gradients.flat).view({-1});
      bucket.divisor = number_for(first, divisor_);
      bucket.factor = number_for(first, 1.0 / divisor_);
      std::int64_t offset = 0;
      for (const std::size_t i : members) {
        const at::Tensor& parameter = parameters_[i].tensor;
        at::Tensor view = at::empty({0}, first.options());
        if (parameter.is_non_overlapping_and_dense())
          view.set_(storage, offset, parameter.sizes(), parameter.strides());
        else
          view.set_(storage, offset, parameter.sizes());
        parameters_[i].view = view;
        bucket.gradients.gradients.push_back(std::move(view));
        offset += parameter.numel();
      }
    }
    buckets_.push_back(std::move(bucket));
  }

  /// Moves an existing gradient into its bucket view, as Python does when it builds its buckets.
  static void adopt(ParameterEntry& parameter) {
    at::Tensor& grad = parameter.gradient();
    if (!grad.defined() || grad.is_sparse() || grad.sizes() != parameter.view.sizes()) return;
    parameter.view.copy_(grad);
    grad = parameter.view;
  }

  void copy_rows(std::size_t i, bool scaled) {
    ParameterEntry& parameter = parameters_[i];
    const at::Tensor& grad = parameter.gradient();
    parameter.rows.reset();
    if (!grad.defined()) return;
    if (!grad.is_sparse() || grad.sparse_dim() != 1)
      throw GradientError(detail::formatted(
          "the gradient of parameter {} '{}' was expected to be sparse in its first dimension, as "
          "an Embedding made with sparse(true) has it; let nothing else use that parameter",
          i, parameter.name));
    // Out of place: if no rank has used the parameter, its gradient must stay unchanged.
    parameter.rows = scaled && divisor_ != 1 ? grad.div(divisor_) : grad;
  }

  /// Returns the scalar with which Python multiplies and divides a gradient: a double that each operation
  /// converts to the gradient's dtype. Converts it here, once, if that does not change the bits.
  [[nodiscard]] static at::Tensor number_for(const at::Tensor& like, double value) {
    const at::Tensor number = at::native::wrapped_scalar_tensor(value);
    const at::ScalarType type = like.scalar_type();
    if (!like.is_cpu() || !at::isFloatingType(type)) return number;
    const at::Tensor typed = number.to(type);
    const bool same = type == at::kFloat || type == at::kDouble || typed.item<double>() == value;
    return same ? typed : number;
  }

  static bool lies_in(const at::Tensor& grad, const at::Tensor& view) {
    return grad.is_same(view) ||
           (grad.layout() == at::kStrided && grad.const_data_ptr() == view.const_data_ptr() &&
            grad.numel() > 0 && grad.sizes() == view.sizes() && grad.strides() == view.strides() &&
            grad.scalar_type() == view.scalar_type());
  }

  std::span<ParameterEntry> parameters_;
  GradientStorage storage_;
  int divisor_;
  std::vector<Bucket> buckets_;
  std::optional<std::size_t> last_view_;
};

}  // namespace lockstep::detail
