#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
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
#include "lockstep/grad/detail/poison_check.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::inline v0_1::detail {

/// Copies of tensors of one device. Those on the CPU run at once: an operator takes far longer than a small copy.
/// Those on a device are deferred and launched together.
class BatchedCopies {
 public:
  /// `to` has the dtype and the shape of `from`, and is dense.
  void add(const at::Tensor& to, const at::Tensor& from) {
    if (to.is_conj() || to.is_neg() || from.is_conj() ||
        from.is_neg()) {  // which neither of the others resolves
      to.copy_(from);
    } else if (!to.is_cpu() || checks_cpu_late) {
      to_.push_back(to);
      from_.push_back(from);
      // The sources stay allocated until they are copied: bound that memory by the default size of a bucket.
      if ((bytes_ += from.nbytes()) >= (25 << 20)) run();
    } else if (to.strides() == from.strides()) {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
      to.unsafeGetTensorImpl()->bump_version();
    } else {
      to.copy_(from);
    }
  }
  void run() {
    if (!to_.empty()) at::_foreach_copy_(to_, from_, /*non_blocking=*/true);
    clear();
  }
  void clear() {
    to_.clear();
    from_.clear();
    bytes_ = 0;
  }

 private:
  std::vector<at::Tensor> to_, from_;
  std::size_t bytes_ = 0;
};

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
  GradientBuckets(std::span<ParameterEntry> parameters, const BucketPlan& plan, const DdpOptions& options,
                  int divisor, bool only_adoptable = false)
      : parameters_(parameters), options_(options), storage_(options.gradients), divisor_(divisor) {
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
    for (std::size_t b = 0; b < size(); ++b)
      for (const std::size_t i : members(b))
        if (!sparse(b) && !empty(b) && parameters_[i].tensor.numel() > 0) last_view_ = i;
  }

  [[nodiscard]] std::size_t size() const { return buckets_.size(); }
  [[nodiscard]] GradientBucket& operator[](std::size_t bucket) { return buckets_[bucket].gradients; }
  [[nodiscard]] const std::vector<std::size_t>& members(std::size_t bucket) const {
    return buckets_[bucket].gradients.parameters;
  }
  [[nodiscard]] bool sparse(std::size_t bucket) const { return parameters_[members(bucket)[0]].sparse; }
  [[nodiscard]] bool empty(std::size_t bucket) const {
    return !sparse(bucket) && buckets_[bucket].length == 0;
  }
  [[nodiscard]] const at::Tensor& with_tail(std::size_t bucket) const { return buckets_[bucket].with_tail; }

  /// Copies parameter i's gradient into its bucket view and scales it: by `weight` if that is defined, else
  /// by 1 / divisor if `scaled` (false if a later step divides). An undefined gradient is copied as zeros.
  /// `finish` ends what is batched: call it with the same arguments before the bucket is read.
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
    Bucket& bucket = buckets_[parameter.bucket];
    if (!bucket.dense) return;  // skipped
    allocate(parameter.bucket);
    const bool in_place = grad.defined() && lies_in(grad, view);
    parameter.divided =
        options_.batched_grad_copy || (in_place && storage_ == GradientStorage::gradient_as_bucket_view);
    bucket.divided += parameter.divided;
    if (!grad.defined()) {
      view.zero_();
      return;
    }
    if (storage_ == GradientStorage::gradient_as_bucket_view && scaled && !weight.defined()) attach = true;
    if (in_place) {
      if (!attach) grad = grad.clone();
      if (!bucket.batched) scale(view, bucket, weight, scaled, parameter.divided);
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
    if (bucket.batched || !(weight.defined() || (scaled && divisor_ != 1)))
      bucket.copies.add(view, grad);
    else
      at::mul_out(view, grad, weight.defined() ? weight : bucket.factor);
    if (attach && storage_ != GradientStorage::separate) grad = view;
  }

  /// Ends the copies into a dense bucket.
  void finish(std::size_t b, const at::Tensor& weight, bool scaled) {
    Bucket& bucket = buckets_[b];
    bucket.copies.run();
    const std::size_t divided = std::exchange(bucket.divided, 0);
    if (!bucket.batched) return;
    if (divided == 0 || divided == members(b).size())
      return scale(bucket.elements, bucket, weight, scaled, divided > 0);
    for (const std::size_t i : members(b))
      scale(parameters_[i].view, bucket, weight, scaled, parameters_[i].divided);
  }

  /// Allocates a dense bucket, if `lazy_bucket_allocation` has not done so yet.
  void allocate(std::size_t b) {
    Bucket& bucket = buckets_[b];
    if (!bucket.dense || bucket.elements.defined()) return;
    const ParameterEntry& leader = parameters_[bucket.gradients.parameters[0]];
    const auto options = leader.tensor.options().dtype(leader.dtype);
    bucket.with_tail = at::empty({bucket.length + tail}, options);
    const auto storage = bucket.with_tail.storage();
    bucket.elements = at::empty({0}, options).set_(storage, 0, {bucket.length});
    // Gloo does not support complex dtypes: they travel as pairs of real numbers.
    bucket.gradients.flat =
        bucket.elements.is_complex() ? at::view_as_real(bucket.elements).view({-1}) : bucket.elements;
    std::int64_t offset = 0;
    for (const std::size_t i : bucket.gradients.parameters) {
      const at::Tensor& parameter = parameters_[i].tensor;
      at::Tensor view = at::empty({0}, options);
      if (parameter.is_non_overlapping_and_dense())
        view.set_(storage, offset, parameter.sizes(), parameter.strides());
      else
        view.set_(storage, offset, parameter.sizes());
      parameters_[i].view = view;
      bucket.gradients.gradients.push_back(std::move(view));
      offset += parameter.numel();
      // Those that exist when the first gradient is ready, and so that one too, as in Python.
      if (storage_ == GradientStorage::gradient_as_bucket_view && options_.lazy_bucket_allocation)
        adopt(parameters_[i]);
    }
  }

  /// Makes parameter i's gradient the average in its bucket; `end` ends what is batched.
  void copy_from_bucket(std::size_t i) {
    at::Tensor& grad = parameters_[i].gradient();
    const at::Tensor& view = parameters_[i].view;
    if (storage_ != GradientStorage::separate) {
      if (!grad.defined() || !lies_in(grad, view)) grad = view;
    } else if (grad.defined()) {
      buckets_[parameters_[i].bucket].copies.add(grad, view);
    } else {
      grad = at::empty_like(view).copy_(view);
    }
  }

  /// Ends a reduction: its copies, without those of one that is `abandoned`, and, with `lazy_bucket_allocation`, the life of
  /// the buckets.
  void end(bool abandoned) {
    for (Bucket& bucket : buckets_) {
      abandoned ? bucket.copies.clear() : bucket.copies.run();
      bucket.divided = 0;
      if (!options_.lazy_bucket_allocation) continue;
      bucket.elements = bucket.with_tail = bucket.gradients.flat = at::Tensor();
      bucket.gradients.gradients.clear();
      for (const std::size_t i : bucket.gradients.parameters) parameters_[i].view.reset();
    }
  }

  /// Multiplies the whole bucket by `factor`; a factor of 0 also clears NaN.
  void multiply(std::size_t bucket, double factor) {
    at::Tensor& flat = buckets_[bucket].gradients.flat;
    factor == 0 ? flat.zero_() : flat.mul_(factor);
  }

  /// Fills a bucket view with NaN, which survives every sum.
  void poison(std::size_t i) {
    Bucket& bucket = buckets_[parameters_[i].bucket];
    if (!bucket.dense) return;
    allocate(parameters_[i].bucket);
    bucket.copies.run();  // a deferred copy would overwrite the NaN
    parameters_[i].view.fill_(std::numeric_limits<double>::quiet_NaN());
  }

  /// Returns the parameter of the last non-empty bucket view in reduction order, or nullopt if all parameters
  /// are sparse or empty.
  [[nodiscard]] std::optional<std::size_t> last_view() const { return last_view_; }

 private:
  struct Bucket {
    GradientBucket gradients;
    at::Tensor elements;  // `gradients.flat` in the dtype of the parameters, which may be complex
    at::Tensor with_tail;
    at::Tensor divisor, factor;  // the divisor and its reciprocal
    bool dense = false;          // neither sparse nor skipped
    std::int64_t length = 0;     // in elements; 0 unless dense
    bool batched = false;        // `finish` scales the whole bucket
    std::size_t divided = 0;     // gradients of the open reduction that Python divides
    BatchedCopies copies;
  };
  /// On the CPU, a multiplication while copying saves the second pass over larger gradients.
  static constexpr std::size_t small_gradient = 4096;

  void scale(at::Tensor& values, const Bucket& bucket, const at::Tensor& weight, bool scaled,
             bool divide) const {
    if (weight.defined())
      values.mul_(weight);
    else if (scaled && divisor_ != 1)
      divide ? values.div_(bucket.divisor) : values.mul_(bucket.factor);
  }

  void add(const std::vector<std::size_t>& members, std::size_t count) {
    const ParameterEntry& leader = parameters_[members.at(0)];
    Bucket bucket;
    bucket.gradients.index = static_cast<std::int64_t>(buckets_.size());
    bucket.gradients.count = static_cast<std::int64_t>(count);
    bucket.gradients.parameters = members;
    const auto skipped = [&](std::size_t i) { return parameters_[i].skipped; };
    bucket.dense = !leader.sparse && !std::all_of(members.begin(), members.end(), skipped);
    for (const std::size_t i : members) {
      parameters_[i].bucket = buckets_.size();
      if (bucket.dense) bucket.length += parameters_[i].tensor.numel();
    }
    const at::Tensor first = at::empty({0}, leader.tensor.options().dtype(leader.dtype));
    bucket.divisor = number_for(first, divisor_);
    bucket.factor = number_for(first, 1.0 / divisor_);
    bucket.batched =
        options_.batched_grad_copy || !first.is_cpu() ||
        static_cast<std::size_t>(bucket.length) * first.element_size() <= small_gradient * members.size();
    buckets_.push_back(std::move(bucket));
    if (!options_.lazy_bucket_allocation) allocate(buckets_.size() - 1);
  }

  /// Moves an existing gradient into its bucket view, as Python does when it builds its buckets.
  static void adopt(ParameterEntry& parameter) {
    at::Tensor& grad = parameter.gradient();
    if (!grad.defined() || grad.is_sparse() || grad.sizes() != parameter.view.sizes() ||
        grad.scalar_type() != parameter.dtype || grad.device() != parameter.device)
      return;
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
  const DdpOptions& options_;
  GradientStorage storage_;
  int divisor_;
  std::vector<Bucket> buckets_;
  std::optional<std::size_t> last_view_;
};

}  // namespace lockstep::inline v0_1::detail
