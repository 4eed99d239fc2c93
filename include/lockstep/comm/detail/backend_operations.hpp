#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/detail/libtorch_version.hpp"

namespace lockstep::detail {

/// An operation of a backend in flight. The functions below start one on a contiguous tensor.
using BackendWork = c10::intrusive_ptr<c10d::Work>;

/// Starts an all-reduce in place.
inline BackendWork start_all_reduce(c10d::Backend& backend, const at::Tensor& tensor, c10d::ReduceOp op) {
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  std::vector<at::Tensor> tensors{tensor};
  return backend.allreduce(tensors, options);
}

/// Starts a reduce. Only `root` holds the result.
inline BackendWork start_reduce(c10d::Backend& backend, const at::Tensor& tensor, c10d::ReduceOp op,
                                int root) {
  c10d::ReduceOptions options;
  options.reduceOp = std::move(op);
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return backend.reduce(tensors, options);
}

/// Starts a broadcast of `root`'s `tensor`, in place.
inline BackendWork start_broadcast(c10d::Backend& backend, const at::Tensor& tensor, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return backend.broadcast(tensors, options);
}

/// Starts an all-gather of each rank's `row` into `rows` [size, ...].
inline BackendWork start_all_gather(c10d::Backend& backend, const at::Tensor& rows, const at::Tensor& row) {
  std::vector<std::vector<at::Tensor>> outputs{rows.detach().view({backend.getSize(), -1}).unbind(0)};
  std::vector<at::Tensor> inputs{row.detach().view({-1})};
  return backend.allgather(outputs, inputs);
}

/// Starts an all-gather into one tensor, which a device's backend does without a copy of each row.
template <class Backend>
BackendWork start_all_gather_single(Backend& backend, const at::Tensor& rows, const at::Tensor& row) {
  at::Tensor to = rows.detach().view({-1}), from = row.detach().view({-1});
  return all_gather_single(backend, to, from);
}

/// Starts a reduce-scatter of `input` [size, ...] into each rank's `row`.
template <class Backend>
BackendWork start_reduce_scatter(Backend& backend, const at::Tensor& row, const at::Tensor& input,
                                 c10d::ReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  at::Tensor to = row.detach().view({-1}), from = input.detach().view({-1});
  return reduce_scatter_single(backend, to, from, options);
}

/// Starts an all-to-all: sends row r of `input` [size, ...] to rank r; row s of `rows` comes from rank s.
template <class Backend>
BackendWork start_all_to_all(Backend& backend, const at::Tensor& rows, const at::Tensor& input) {
  auto to = rows.detach().view({backend.getSize(), -1}), from = input.detach().view({backend.getSize(), -1});
  return all_to_all_single(backend, to, from);
}

}  // namespace lockstep::detail
