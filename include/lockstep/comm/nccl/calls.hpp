#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/nccl/device.hpp"
#include "lockstep/comm/nccl/group.hpp"
#include "lockstep/comm/nccl/operands.hpp"
#include "lockstep/comm/nccl/tensor_check.hpp"
#include "lockstep/comm/nccl/work.hpp"

namespace lockstep::detail {

template <NcclDevice D>
using NcclGroupPtr = std::shared_ptr<NcclGroup<D>>;

/// Starts a call: `issue(comm, stream, operands)` issues NCCL's part for the operands as dense tensors. A
/// call without any is complete.
template <NcclDevice D, class Issue>
NcclWork<D> start(const NcclGroupPtr<D>& group, const Call& call, const std::vector<at::Tensor>& written,
                  const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& changed,
                  Issue&& issue) {
  Operands<D> operands(group->device(), group->stream());
  operands.take(written, read, changed);
  if (operands.empty()) return {};
  auto flight = group->fly(
      call, operands.own(), [&](std::vector<at::Tensor>& kept) { operands.copy_in(kept); },
      [&](auto comm, const auto& stream) { return issue(comm, stream, operands); },
      [&] { operands.copy_out(); });
  return NcclWork<D>(group, std::move(flight));
}

/// Gives every rank `root`'s tensors, in place.
template <NcclDevice D>
NcclWork<D> start_broadcast(const NcclGroupPtr<D>& group, const Call& call,
                            const std::vector<at::Tensor>& list, int root) {
  return start<D>(group, call, {}, {}, list, [&](auto comm, const auto& stream, const auto& operands) {
    return operands.for_each_changed([&](const at::Tensor& tensor) {
      const auto wire = moved_as(tensor);
      return group->device().broadcast(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(),
                                       wire.count, wire.type, root);
    });
  });
}

/// Gives every rank the inputs [...] of all: outputs [size, ...].
template <NcclDevice D>
NcclWork<D> start_all_gather(const NcclGroupPtr<D>& group, const Call& call,
                             const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  return start<D>(group, call, outputs, inputs, {}, [&](auto comm, const auto& stream, const auto& operands) {
    return operands.for_each_pair([&](const at::Tensor& output, const at::Tensor& input) {
      const auto wire = moved_as(input);
      return group->device().all_gather(comm, stream, input.const_data_ptr(), output.mutable_data_ptr(),
                                        wire.count, wire.type);
    });
  });
}

}  // namespace lockstep::detail
