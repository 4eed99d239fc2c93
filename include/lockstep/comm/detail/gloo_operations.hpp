#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/detail/process_group_gloo.hpp"

namespace lockstep::detail {

/// An operation of Gloo in flight. The functions below start one on a contiguous tensor.
using GlooPart = c10::intrusive_ptr<c10d::Work>;

/// Runs `finish` on Gloo's thread after the operation succeeded and before it counts as complete, so that a
/// Work that is never waited for is finished too. Call it once per operation: two callbacks could run
/// concurrently.
template <class Finish>
void after(const GlooPart& part, Finish finish) {
  part->getFuture()->addCallback([finish = std::move(finish)](c10::ivalue::Future& future) mutable {
    if (!future.hasError()) finish();
  });
}

/// Starts an all-reduce in place. ReduceOp::avg computes the sum; the caller divides.
inline GlooPart start_all_reduce(c10d::ProcessGroupGloo& gloo, const at::Tensor& tensor, ReduceOp op) {
  c10d::AllreduceOptions options;
  options.reduceOp = native(op, tensor.scalar_type());
  std::vector<at::Tensor> tensors{tensor};
  return gloo.allreduce(tensors, options);
}

/// Starts a reduce. Only `root` holds the result. ReduceOp::avg computes the sum; the caller divides.
inline GlooPart start_reduce(c10d::ProcessGroupGloo& gloo, const at::Tensor& tensor, ReduceOp op, int root) {
  c10d::ReduceOptions options;
  options.reduceOp = native(op, tensor.scalar_type());
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return gloo.reduce(tensors, options);
}

/// Starts a broadcast of `root`'s `tensor`, in place.
inline GlooPart start_broadcast(c10d::ProcessGroupGloo& gloo, const at::Tensor& tensor, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return gloo.broadcast(tensors, options);
}

/// Starts an all-gather of each rank's `row` into `rows` [size, ...].
inline GlooPart start_all_gather(c10d::ProcessGroupGloo& gloo, const at::Tensor& rows,
                                 const at::Tensor& row) {
  std::vector<std::vector<at::Tensor>> outputs{rows.detach().view({gloo.getSize(), -1}).unbind(0)};
  std::vector<at::Tensor> inputs{row.detach().view({-1})};
  return gloo.allgather(outputs, inputs);
}

/// Starts an all-to-all: sends row r of `input` [size, ...] to rank r; row s of `rows` comes from rank s.
template <class Gloo>
GlooPart start_all_to_all(Gloo& gloo, const at::Tensor& rows, const at::Tensor& input) {
  auto to = rows.detach().view({gloo.getSize(), -1}), from = input.detach().view({gloo.getSize(), -1});
  std::vector<std::int64_t> even;
  if constexpr (requires { gloo.all_to_all_single(to, from, even, even); })  // renamed from alltoall_base
    return gloo.all_to_all_single(to, from, even, even);
  else
    return gloo.alltoall_base(to, from, even, even);
}

}  // namespace lockstep::detail
