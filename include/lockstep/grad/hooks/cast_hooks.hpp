#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "lockstep/grad/detail/float_types.hpp"
#include "lockstep/grad/detail/hooks/phased_reduction.hpp"
#include "lockstep/grad/detail/hooks/scratch.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::detail {

/// The all-reduce of a bucket in a narrower dtype, in flight.
template <class Work>
struct CastReduction : PhasedReduction<CastReduction<Work>> {
  CastReduction(Work work, at::Tensor flat, at::Tensor narrowed, int divisor)
      : work(std::move(work)), flat(std::move(flat)), narrowed(std::move(narrowed)), divisor(divisor) {}

  template <class Wait>
  void finish(Wait&& wait) {
    wait(work);
    if (divisor != 1) narrowed.div_(divisor);
    if (!narrowed.is_same(flat)) flat.copy_(narrowed);
  }

  Work work;
  at::Tensor flat, narrowed;
  int divisor;  // of the sum
};

/// Whether gradients are divided by the number of ranks before the sum, or the sum is.
enum class Division { before_sum, after_sum };

/// Casts a bucket to `type`, divides by the number of ranks in that dtype, sums, and casts back. Bitwise
/// equal to torch.distributed.algorithms.ddp_comm_hooks: default_hooks, or mixed_precision_hooks, which
/// divide the sum. Adds the bytes sent to `bytes`.
template <class Comm>
CastReduction<typename Comm::Work> start_cast(Comm& comm, const GradientBucket& bucket, at::ScalarType type,
                                              Scratch& scratch, std::uint64_t& bytes, Division division) {
  at::Tensor narrowed = bucket.flat;
  if (type != bucket.flat.scalar_type()) {
    narrowed = scratch.get(bucket.index, bucket.flat.sizes(),
                           bucket.flat.options().dtype(type).requires_grad(false));
    narrowed.copy_(bucket.flat);
  }
  if (division == Division::before_sum) narrowed.div_(comm.size());
  bytes += sent_bytes(comm, narrowed);
  return {comm.all_reduce(narrowed, ReduceOp::sum), bucket.flat, narrowed,
          division == Division::after_sum ? comm.size() : 1};
}

/// A communication hook that casts each bucket to one dtype, reduces it in that dtype, and casts it back.
class CastHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = true;
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <Reducing Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    return start_cast(comm, bucket, type_, scratch_, wire_bytes_, division_);
  }

  [[nodiscard]] std::string_view name() const { return name_; }
  /// Returns the bytes of all elements of all buckets in the hook's dtype.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 protected:
  CastHook(at::ScalarType type, const char* name, Division division)
      : type_(type), name_(name), division_(division) {}
  [[nodiscard]] at::ScalarType type() const { return type_; }

 private:
  at::ScalarType type_;
  const char* name_;
  Division division_;
  Scratch scratch_;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep::detail

namespace lockstep {

/// Compresses gradients to bfloat16: casts, divides by the number of ranks, sums, and casts back. Half the
/// bytes of float32 and all of its range, with 8 bits of precision. Each addition rounds to 8 bits; with many
/// ranks use Bf16Fp32Hook.
///
/// Counterpart: bf16_compress_hook.
class Bf16Hook : public detail::CastHook {
 public:
  Bf16Hook() : CastHook(at::kBFloat16, "bf16", detail::Division::before_sum) {}
};

/// Compresses gradients to float16: casts, divides by the number of ranks, sums, and casts back. Half the
/// bytes of float32. Values above 65504 become infinite and values below 6e-8 zero: scale the loss, or use
/// Bf16Hook.
///
/// Counterpart: fp16_compress_hook.
class Fp16Hook : public detail::CastHook {
 public:
  Fp16Hook() : CastHook(at::kHalf, "fp16", detail::Division::before_sum) {}
};

/// Sums gradients in a chosen dtype and divides the sum in it. Use it with DdpOptions::param_dtype. A sum in
/// float16 may overflow where the mean would not; Fp16Hook divides first.
///
/// Counterpart: reduce_dtype of Python's _MixedPrecision.
class ReduceDtypeHook : public detail::CastHook {
 public:
  /// Throws UsageError unless `type` is float16, bfloat16, float32 or float64.
  explicit ReduceDtypeHook(at::ScalarType type)
      : CastHook(type, "reduce_dtype", detail::Division::after_sum) {
    detail::require_float_type("the type of a ReduceDtypeHook", type);
  }

  [[nodiscard]] HookSettings settings() const { return {{"dtype", c10::toString(type())}}; }
};

/// Sends bfloat16 and sums in float32. Each rank receives one part of the elements from all ranks
/// (all_to_all), adds them in float32 in rank order, divides by the number of ranks, and sends the mean to
/// all ranks (all_gather). An element is rounded to bfloat16 twice, regardless of the number of ranks, and
/// its bits do not depend on its bucket or its position there.
class Bf16Fp32Hook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = true;

  template <class Comm>
  requires Reducing<Comm> && Gathering<Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    const auto ranks = static_cast<std::int64_t>(comm.size());
    const std::int64_t length = bucket.flat.numel(), share = (length + ranks - 1) / ranks;
    const auto options = bucket.flat.options().dtype(at::kBFloat16).requires_grad(false);
    const at::Tensor shares = mine_.get(bucket.index, {ranks, share}, options);
    const at::Tensor received = received_.get(bucket.index, {ranks, share}, options);
    const at::Tensor line = shares.view(-1);
    line.narrow(0, 0, length).copy_(bucket.flat);
    line.narrow(0, length, ranks * share - length).zero_();
    wire_bytes_ += detail::sent_bytes(comm, shares);
    return Sum<Comm>(comm.all_to_all(received, shares), *this, comm, bucket.flat, shares, received);
  }

  [[nodiscard]] std::string_view name() const { return "bf16_fp32"; }
  /// Returns 2 (ranks + 1) ceil(n / ranks) for each bucket of n elements.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 private:
  template <class Comm>
  struct Sum : detail::PhasedReduction<Sum<Comm>> {
    Sum(typename Comm::Work work, Bf16Fp32Hook& hook, Comm& comm, at::Tensor flat, at::Tensor shares,
        at::Tensor received)
        : exchange(std::move(work)),
          hook(&hook),
          comm(&comm),
          flat(std::move(flat)),
          shares(std::move(shares)),
          received(std::move(received)) {}

    template <class Wait>
    void finish(Wait&& wait) {
      wait(exchange);
      at::Tensor sum = received[0].to(at::kFloat);
      for (std::int64_t rank = 1; rank < received.size(0); ++rank) sum.add_(received[rank]);
      const at::Tensor mean = sum.div_(comm->size()).to(at::kBFloat16);
      hook->wire_bytes_ += detail::sent_bytes(*comm, mean);
      auto gather = comm->all_gather(shares, mean);
      wait(gather);
      flat.copy_(shares.view(-1).narrow(0, 0, flat.numel()));
    }

    typename Comm::Work exchange;
    Bf16Fp32Hook* hook;
    Comm* comm;
    at::Tensor flat, shares, received;
  };

  detail::Scratch mine_, received_;
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep
