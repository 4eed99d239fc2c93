#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
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

}  // namespace lockstep::detail
