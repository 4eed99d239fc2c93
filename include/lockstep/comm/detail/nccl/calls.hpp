#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/group.hpp"
#include "lockstep/comm/detail/nccl/operands.hpp"
#include "lockstep/comm/detail/nccl/tensor_check.hpp"
#include "lockstep/comm/detail/nccl/work.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

template <NcclDevice D>
using NcclGroupPtr = std::shared_ptr<NcclGroup<D>>;

/// Throws UsageError during a graph capture, for a call that needs the host: a replay would not repeat the
/// host's part.
template <NcclDevice D>
void refuse_in_capture(NcclGroup<D>& group, const char* name) {
  const D& device = group.device();
  const Call call{name, 0, -1, 0, std::chrono::steady_clock::now()};
  if (!group.guarded(call, [&] { return device.capturing(device.current_stream()); })) return;
  const int rank = group.world().rank();
  throw UsageError(
      detail::formatted("{} called on rank {} while a graph is captured: the host takes part in it, "
                        "which a graph cannot repeat, so call it before the capture",
                        name, rank),
      rank);
}

/// Starts a call. `issue(comm, stream, operands)` issues its NCCL operations on the contiguous operands. A
/// call without operands returns a complete Work.
template <NcclDevice D, class Issue>
NcclWork<D> start(const NcclGroupPtr<D>& group, const Call& call, const std::vector<at::Tensor>& written,
                  const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& changed,
                  Issue&& issue) {
  Operands<D> operands(group->device(), group->stream());
  operands.take(written, read, changed);
  if (operands.empty()) return {};
  auto op = group->launch(
      call, operands.own(), [&](std::vector<at::Tensor>& kept) { operands.copy_in(kept); },
      [&](auto comm, const auto& stream) { return issue(comm, stream, operands); },
      [&] { operands.copy_out(); });
  return NcclWork<D>(group, std::move(op));
}

/// Broadcasts `root`'s tensors, in place.
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

/// Gathers the inputs [...] of all ranks into outputs [size, ...].
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
