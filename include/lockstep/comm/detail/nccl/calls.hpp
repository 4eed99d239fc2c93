#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/group.hpp"
#include "lockstep/comm/detail/nccl/work.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Checks the tensors of a call before it reaches any other rank. The errors are CommunicationErrors that
/// name the rank. They leave the communicator usable.
template <NcclDevice D>
class NcclTensorCheck {
 public:
  NcclTensorCheck(const char* collective, const D& device, int rank)
      : collective_(collective), device_(device), rank_(rank) {}

  /// Requires a dense tensor on this rank's device.
  void moves(const at::Tensor& tensor) const {
    if (!tensor.defined()) refuse("the tensor is undefined");
    if (tensor.layout() != at::kStrided)
      refuse(detail::formatted("the tensor {} is not dense: call to_dense() first", describe(tensor)));
    if (tensor.is_quantized())
      refuse(detail::formatted("the tensor {} is quantized: dequantize() it", describe(tensor)));
    if (!device_.holds(tensor))
      refuse(
          detail::formatted("the tensor {} is on {}, and NCCL moves tensors on {}, the device of this rank: "
                            "call to() first{}",
                            describe(tensor), tensor.device().str(), device_.name(),
                            tensor.device().is_cpu() ? ", or use GlooComm" : ""));
  }
  void moves(const std::vector<at::Tensor>& list) const {
    for (const at::Tensor& tensor : list) moves(tensor);
  }

  /// Requires moves(), and a dtype that NCCL can reduce with `op`.
  void reduces(const at::Tensor& tensor, ReduceOp op) const {
    moves(tensor);
    const auto type = tensor.scalar_type();
    if (!is_reducible(type))
      refuse(
          detail::formatted("NCCL cannot reduce {}: convert it to float32, float64, float16, bfloat16, int8, "
                            "uint8, int32, int64 or bool",
                            describe(tensor)));
    if (op == ReduceOp::avg && !at::isFloatingType(type))
      refuse(
          detail::formatted("the average of {} is no {}: sum it and divide, or convert it to a floating type",
                            describe(tensor), dtype_name(type)));
  }
  void reduces(const std::vector<at::Tensor>& list, ReduceOp op) const {
    for (const at::Tensor& tensor : list) reduces(tensor, op);
  }

  /// Requires matching lists: each of `wholes` has the dtype of its counterpart in `rows` and `times` as many
  /// elements.
  void pairs(const std::vector<at::Tensor>& wholes, const std::vector<at::Tensor>& rows, int times) const {
    if (wholes.size() != rows.size())
      refuse(detail::formatted("as many outputs as inputs are needed, not {} and {}", wholes.size(),
                               rows.size()));
    moves(wholes);
    moves(rows);
    for (std::size_t i = 0; i < rows.size(); ++i)
      if (wholes[i].scalar_type() != rows[i].scalar_type() || wholes[i].numel() != times * rows[i].numel())
        refuse(detail::formatted("{} is not {} times {}", describe(wholes[i]), times, describe(rows[i])));
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw CommunicationError(detail::formatted("{} on rank {}: {}", collective_, rank_, why), rank_);
  }

 private:
  const char* collective_;
  const D& device_;
  int rank_;
};

/// How a tensor's elements are sent: an NCCL dtype and their number.
struct WireFormat {
  at::ScalarType type = at::kByte;
  std::size_t count = 0;
};

/// Returns the format for moving a tensor: bytes if NCCL does not know its dtype.
inline WireFormat moved_as(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (is_reducible(type) && type != at::kBool) return {type, static_cast<std::size_t>(tensor.numel())};
  return {at::kByte, static_cast<std::size_t>(tensor.nbytes())};
}

/// Returns the format for reducing a tensor: a bool is sent as a byte 0 or 1.
inline WireFormat reduced_as(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return {type == at::kBool ? at::kByte : type, static_cast<std::size_t>(tensor.numel())};
}

/// Returns the operation for reducing a tensor: max for a sum of bools, since added bytes could become 2.
inline ReduceOp reduced_by(const at::Tensor& tensor, ReduceOp op) {
  return tensor.scalar_type() == at::kBool && op == ReduceOp::sum ? ReduceOp::max : op;
}

inline bool no_error(NcclResult result) {
  return result == NcclResult::success || result == NcclResult::in_progress;
}

/// The tensors of a call as NCCL requires them: contiguous and not empty. Non-contiguous tensors are copied
/// on the communicator's stream, before and after the call. `written` and `read` are pairs if both are given;
/// `changed` tensors are read and written.
///
/// copy_in() alone allocates the copies, on the communicator's stream, once that stream is ordered after the
/// caller's. In a graph capture the stream has then joined the capture and the memory belongs to the graph. A
/// block allocated earlier could be in use elsewhere during a replay.
template <NcclDevice D>
class Operands {
 public:
  using Stream = typename D::Stream;

  Operands(const D& device, const Stream& stream) : device_(device), stream_(stream) {}

  void take(const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read,
            const std::vector<at::Tensor>& changed) {
    add(written_, written);
    add(read_, read);
    add(changed_, changed);
  }

  [[nodiscard]] bool empty() const { return written_.empty() && read_.empty() && changed_.empty(); }

  /// Returns the caller's tensors.
  [[nodiscard]] std::vector<at::Tensor> own() const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(written_.size() + read_.size() + changed_.size());
    for (const auto* list : {&written_, &read_, &changed_})
      for (const Operand& operand : *list) tensors.push_back(operand.own);
    return tensors;
  }

  /// Makes the copies and adds them to `kept`.
  void copy_in(std::vector<at::Tensor>& kept) {
    for (auto* list : {&written_, &read_, &changed_})
      for (auto& [own, dense] : *list) {
        if (dense.defined()) continue;
        dense = device_.allocate(stream_, own.sizes(), own.scalar_type());
        kept.push_back(dense);
        if (list != &written_) device_.copy(stream_, dense, own);
      }
  }
  void copy_out() const {
    for (const auto* list : {&written_, &changed_})
      for (const auto& [own, dense] : *list)
        if (!own.is_same(dense)) device_.copy(stream_, own, dense);
  }

  // Each calls `issue` until a call fails, and returns the last result.
  template <class Issue>
  NcclResult for_each_changed(Issue&& issue) const {
    return for_each(changed_, issue);
  }
  template <class Issue>
  NcclResult for_each_read(Issue&& issue) const {
    return for_each(read_, issue);
  }
  template <class Issue>
  NcclResult for_each_written(Issue&& issue) const {
    return for_each(written_, issue);
  }
  template <class Issue>
  NcclResult for_each_pair(Issue&& issue) const {
    auto result = NcclResult::success;
    for (std::size_t i = 0; i < written_.size() && no_error(result); ++i)
      result = issue(written_[i].dense, read_[i].dense);
    return result;
  }

 private:
  struct Operand {
    at::Tensor own, dense;  // equal if `own` is contiguous; otherwise copy_in() sets `dense`
  };

  void add(std::vector<Operand>& operands, const std::vector<at::Tensor>& tensors) {
    operands.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors)
      if (tensor.numel() > 0) operands.push_back({tensor, tensor.is_contiguous() ? tensor : at::Tensor()});
  }
  template <class Issue>
  static NcclResult for_each(const std::vector<Operand>& operands, Issue&& issue) {
    auto result = NcclResult::success;
    for (std::size_t i = 0; i < operands.size() && no_error(result); ++i) result = issue(operands[i].dense);
    return result;
  }

  const D& device_;
  const Stream& stream_;
  std::vector<Operand> written_, read_, changed_;
};

template <NcclDevice D>
using NcclGroupPtr = std::shared_ptr<NcclGroup<D>>;

/// Throws UsageError during a graph capture, for a call that needs the host: a replay would not repeat the
/// host's part.
template <NcclDevice D>
void refuse_in_capture(NcclGroup<D>& group, const char* name) {
  const D& device = group.device();
  const Call call{name, 0, {}, 0, std::chrono::steady_clock::now()};
  if (!group.guarded(call, [&] { return device.capturing(device.current_stream()); })) return;
  const int rank = group.state().world().rank();
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
