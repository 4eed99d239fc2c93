#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <utility>

#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/phased_reduction.hpp"
#include "lockstep/grad/hooks/scratch.hpp"

namespace lockstep::detail {

/// The sum of a bucket in a shorter type, under way.
template <class Work>
struct CastReduction : PhasedReduction<CastReduction<Work>> {
  CastReduction(Work work, at::Tensor flat, at::Tensor shorter, int divisor)
      : work(std::move(work)), flat(std::move(flat)), shorter(std::move(shorter)), divisor(divisor) {}

  template <class Wait>
  void finish(Wait&& wait) {
    wait(work);
    if (divisor != 1) shorter.div_(divisor);
    if (!shorter.is_same(flat)) flat.copy_(shorter);
  }

  Work work;
  at::Tensor flat, shorter;
  int divisor;  // of the sum
};

/// Whether gradients are divided by the number of ranks before they are added, or their sum is.
enum class Division { before_sum, after_sum };

/// Casts a bucket to `type`, divides by the number of ranks there, sums, and casts back: the arithmetic of
/// torch.distributed.algorithms.ddp_comm_hooks, to the bit (default_hooks, or mixed_precision_hooks, which
/// divide the sum). `bytes` counts what is sent.
template <class Comm>
CastReduction<typename Comm::Work> start_cast(Comm& comm, const GradientBucket& bucket, at::ScalarType type,
                                              Scratch& scratch, std::uint64_t& bytes,
                                              Division division = Division::before_sum) {
  at::Tensor shorter = bucket.flat;
  if (type != bucket.flat.scalar_type()) {
    shorter = scratch.get(bucket.index, bucket.flat.sizes(),
                          bucket.flat.options().dtype(type).requires_grad(false));
    shorter.copy_(bucket.flat);
  }
  if (division == Division::before_sum) shorter.div_(comm.size());
  bytes += sent_bytes(comm, shorter);
  return {comm.all_reduce(shorter, ReduceOp::sum), bucket.flat, shorter,
          division == Division::after_sum ? comm.size() : 1};
}

}  // namespace lockstep::detail
