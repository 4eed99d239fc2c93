#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/detail/process_group_gloo.hpp"

namespace lockstep::detail {

/// What Gloo has under way. The functions below start it, on one contiguous tensor.
using GlooPart = c10::intrusive_ptr<c10d::Work>;

/// Runs `finish` on Gloo's thread when the operation has succeeded, before it counts as complete: so a Work
/// that nobody waits for is finished too. Once for each operation: a second could run beside the first.
template <class Finish>
void after(const GlooPart& part, Finish finish) {
  part->getFuture()->addCallback([finish = std::move(finish)](c10::ivalue::Future& future) mutable {
    if (!future.hasError()) finish();
  });
}

/// Combines `tensor` over the ranks, in place on every one; of an average the sum.
inline GlooPart start_all_reduce(c10d::ProcessGroupGloo& gloo, const at::Tensor& tensor, ReduceOp op) {
  c10d::AllreduceOptions options;
  options.reduceOp = native(op, tensor.scalar_type());
  std::vector<at::Tensor> tensors{tensor};
  return gloo.allreduce(tensors, options);
}

/// The same, in place on `root` alone.
inline GlooPart start_reduce(c10d::ProcessGroupGloo& gloo, const at::Tensor& tensor, ReduceOp op, int root) {
  c10d::ReduceOptions options;
  options.reduceOp = native(op, tensor.scalar_type());
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return gloo.reduce(tensors, options);
}

/// Gives every rank `root`'s `tensor`.
inline GlooPart start_broadcast(c10d::ProcessGroupGloo& gloo, const at::Tensor& tensor, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return gloo.broadcast(tensors, options);
}

/// Gives every rank the `row` of all: `rows` [size, ...], by rank.
inline GlooPart start_all_gather(c10d::ProcessGroupGloo& gloo, const at::Tensor& rows,
                                 const at::Tensor& row) {
  std::vector<std::vector<at::Tensor>> outputs{rows.detach().view({gloo.getSize(), -1}).unbind(0)};
  std::vector<at::Tensor> inputs{row.detach().view({-1})};
  return gloo.allgather(outputs, inputs);
}

/// Sends row r of `input` [size, ...] to rank r; row s of `rows` [size, ...] comes from rank s.
template <class Gloo>
GlooPart start_all_to_all(Gloo& gloo, const at::Tensor& rows, const at::Tensor& input) {
  auto to = rows.detach().view({gloo.getSize(), -1}), from = input.detach().view({gloo.getSize(), -1});
  std::vector<std::int64_t> even;
  if constexpr (requires { gloo.all_to_all_single(to, from, even, even); })  // LibTorch has renamed it
    return gloo.all_to_all_single(to, from, even, even);
  else
    return gloo.alltoall_base(to, from, even, even);
}

}  // namespace lockstep::detail
