#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <utility>

#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/phased_reduction.hpp"
#include "lockstep/grad/hooks/scratch.hpp"

namespace lockstep {

/// bfloat16 on the wire, float32 in the sum: each rank gets one share of the elements from all (all_to_all),
/// adds them in float32 in the order of the ranks, divides by their number, and gives the mean to all
/// (all_gather). An element is so rounded to bfloat16 twice, however many ranks there are, and its bits do
/// not depend on the bucket it lies in, nor on its place there.
class Bf16Fp32Hook {
 public:
  static constexpr bool divides_first = false;
  static constexpr bool spreads_nan = true;

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
  /// 2 (ranks + 1) ceil(n / ranks) for each bucket of n elements.
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
