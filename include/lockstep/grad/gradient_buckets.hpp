#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/grad/bucket_plan.hpp"
#include "lockstep/grad/named_tensors.hpp"

namespace lockstep::detail {

/// The memory of the buckets, and the gradients in it.
///
/// A slot is a gradient's place: a tensor with the layout that autograd gives the gradient (the parameter's
/// where that is dense, else contiguous) over the bucket's memory. It is made by `set_`, so that autograd
/// does not know it as a view: `zero_grad(false)` detaches gradients in place, which views refuse.
class GradientBuckets {
 public:
  GradientBuckets(const std::vector<NamedTensor>& parameters, const BucketPlan& plan, int world_size)
      : parameters_(&parameters), slots_(parameters.size()), bucket_of_(parameters.size()) {
    for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
      std::int64_t length = 0;
      for (const std::size_t i : plan[bucket]) length += parameters[i].tensor.numel();
      const at::Tensor& first = parameters[plan[bucket].at(0)].tensor;
      buckets_.push_back({at::empty({length}, first.options()), plan[bucket], reciprocal(world_size, first)});
      std::int64_t offset = 0;
      for (const std::size_t i : plan[bucket]) {
        const at::Tensor& parameter = parameters[i].tensor;
        at::Tensor slot = at::empty({0}, first.options());
        const auto storage = buckets_.back().flat.storage();
        if (parameter.is_non_overlapping_and_dense())
          slot.set_(storage, offset, parameter.sizes(), parameter.strides());
        else
          slot.set_(storage, offset, parameter.sizes());
        slots_[i] = std::move(slot);
        bucket_of_[i] = bucket;
        offset += parameter.numel();
      }
    }
  }

  [[nodiscard]] std::size_t size() const { return buckets_.size(); }
  [[nodiscard]] const at::Tensor& flat(std::size_t bucket) const { return buckets_[bucket].flat; }
  [[nodiscard]] const std::vector<std::size_t>& members(std::size_t bucket) const {
    return buckets_[bucket].members;
  }
  [[nodiscard]] std::size_t bucket_of(std::size_t parameter) const { return bucket_of_[parameter]; }

  /// Puts the gradient of a parameter, times 1 / world size, into its slot, and makes the slot its gradient.
  /// One multiplication by the reciprocal in either case: that is Python's arithmetic, and at three ranks a
  /// division's bits are others. Throws GradientError where the gradient cannot lie there.
  void take(std::size_t i) {
    const NamedTensor& parameter = (*parameters_)[i];
    at::Tensor& grad = parameter.tensor.mutable_grad();
    at::Tensor& slot = slots_[i];
    if (!grad.defined()) {  // it took part, through an output that the loss does not depend on
      slot.zero_();
      grad = slot;
      return;
    }
    if (lies_in(grad, slot)) {
      slot.mul_(buckets_[bucket_of_[i]].scale);
      return;
    }
    if (grad.is_sparse())
      throw GradientError(
          fmt::format("the gradient of parameter {} '{}' is sparse, and only dense ones can be reduced; "
                      "build its layer without sparse gradients",
                      i, parameter.name));
    if (grad.scalar_type() != slot.scalar_type() || grad.device() != slot.device() ||
        grad.sizes() != slot.sizes())
      throw GradientError(
          fmt::format("the gradient of parameter {} '{}' has another dtype, device or shape than the "
                      "parameter had when DistributedDataParallel was made; convert the model before",
                      i, parameter.name));
    at::mul_out(slot, grad, buckets_[bucket_of_[i]].scale);
    grad = slot;
  }

  /// Marks a slot as without a gradient: not-a-number survives every sum, so all ranks find it.
  void poison(std::size_t i) { slots_[i].fill_(std::numeric_limits<double>::quiet_NaN()); }

  /// Whether a slot may be poisoned on some rank, once its bucket is reduced.
  [[nodiscard]] bool maybe_poisoned(std::size_t i) const {
    const at::Tensor& slot = slots_[i];
    if (slot.numel() == 0) return false;
    if (slot.is_cpu()) {
      const void* first = slot.const_data_ptr();
      if (slot.scalar_type() == at::kFloat) return std::isnan(*static_cast<const float*>(first));
      if (slot.scalar_type() == at::kDouble) return std::isnan(*static_cast<const double*>(first));
    }
    return slot.flatten()[0].isnan().item<bool>();
  }

  /// The slot with at least one element that is reduced last.
  [[nodiscard]] std::size_t last_slot() const {
    for (std::size_t bucket = buckets_.size(); bucket-- > 0;)
      for (const std::size_t i : buckets_[bucket].members)
        if (slots_[i].numel() > 0) return i;
    return 0;
  }

 private:
  struct Bucket {
    at::Tensor flat;
    std::vector<std::size_t> members;
    at::Tensor scale;
  };

  /// 1 / world size as Python multiplies with it: a double that takes the dtype of the gradient. Where
  /// rounding it beforehand changes nothing, that spares the conversion at each multiplication.
  static at::Tensor reciprocal(int world_size, const at::Tensor& like) {
    const at::Tensor scale = at::native::wrapped_scalar_tensor(1.0 / world_size);
    if (like.is_cpu() && (like.scalar_type() == at::kFloat || like.scalar_type() == at::kDouble))
      return scale.to(like.scalar_type());
    return scale;
  }

  static bool lies_in(const at::Tensor& grad, const at::Tensor& slot) {
    return grad.is_same(slot) ||
           (grad.layout() == at::kStrided && grad.const_data_ptr() == slot.const_data_ptr() &&
            grad.numel() > 0 && grad.sizes() == slot.sizes() && grad.strides() == slot.strides() &&
            grad.scalar_type() == slot.scalar_type());
  }

  const std::vector<NamedTensor>* parameters_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> slots_;
  std::vector<std::size_t> bucket_of_;
};

}  // namespace lockstep::detail
