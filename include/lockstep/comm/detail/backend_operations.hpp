#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"

namespace lockstep::detail {

/// An operation of a backend in flight. The functions below start one on a contiguous tensor. LibTorch has
/// renamed some functions of c10d::Backend; their templates call the name that exists.
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
  if constexpr (requires { backend.all_gather_single(to, from); })  // renamed from _allgather_base
    return backend.all_gather_single(to, from);
  else
    return backend._allgather_base(to, from);
}

/// Starts a reduce-scatter of `input` [size, ...] into each rank's `row`.
template <class Backend>
BackendWork start_reduce_scatter(Backend& backend, const at::Tensor& row, const at::Tensor& input,
                                 c10d::ReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  at::Tensor to = row.detach().view({-1}), from = input.detach().view({-1});
  if constexpr (requires { backend.reduce_scatter_single(to, from, options); })
    return backend.reduce_scatter_single(to, from, options);  // renamed from _reduce_scatter_base
  else
    return backend._reduce_scatter_base(to, from, options);
}

/// Starts an all-to-all: sends row r of `input` [size, ...] to rank r; row s of `rows` comes from rank s.
template <class Backend>
BackendWork start_all_to_all(Backend& backend, const at::Tensor& rows, const at::Tensor& input) {
  auto to = rows.detach().view({backend.getSize(), -1}), from = input.detach().view({backend.getSize(), -1});
  std::vector<std::int64_t> even;
  if constexpr (requires { backend.all_to_all_single(to, from, even, even); })  // renamed from alltoall_base
    return backend.all_to_all_single(to, from, even, even);
  else
    return backend.alltoall_base(to, from, even, even);
}

/// Returns whether the backend can split off sub-groups by itself. False before LibTorch had
/// c10d::Backend::split.
template <class Backend>
bool splits(const Backend& backend) {
  if constexpr (requires { backend.supportsSplitting(); })
    return backend.supportsSplitting();
  else
    return false;
}

/// Splits off a group of `ranks`, which rendezvous through `store`. Every rank of the backend calls it. Null
/// on the other ranks, and before LibTorch had c10d::Backend::split.
template <class Backend, class Store>
c10::intrusive_ptr<Backend> split(Backend& backend, const Store& store, const std::vector<int>& ranks,
                                  const std::string& name) {
  if constexpr (requires { backend.split(store, ranks, backend.getBackendOptions()); }) {
    auto options = backend.getBackendOptions();
    // A backend writes into the options of its sub-group: they must not be its own.
    if constexpr (requires { options->clone(); }) options = options->clone();
    options->group_name = name;
    return backend.split(store, ranks, options);
  } else {
    return nullptr;
  }
}

/// Ends the backend's operations in flight, if it can. May block.
template <class Backend>
void abort_operations(Backend& backend) {
  if constexpr (requires { backend.abort(); }) backend.abort();
}

}  // namespace lockstep::detail
