#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Returns whether Gloo, and every NCCL since 2.18, can reduce this dtype. Both can only move other dtypes.
/// A bool is reduced as a byte 0 or 1.
inline bool is_reducible(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

/// The tensors that a communicator supports. `backend` is its name in errors, such as "Gloo". Without a
/// `device`, tensors of any device.
struct TensorCheck {
  std::string backend;
  std::optional<at::DeviceType> device;
};

inline void check_tensor(const TensorCheck& check, std::string_view collective, const at::Tensor& tensor) {
  auto refuse = [&](const std::string& why) {
    throw CommunicationError(detail::formatted("{}: {}", collective, why));
  };
  if (!tensor.defined()) refuse("the tensor is undefined");
  if (tensor.layout() != at::kStrided)
    refuse(detail::formatted("the tensor {} is not dense: call to_dense() first", describe(tensor)));
  if (check.device && tensor.device().type() != *check.device)
    refuse(detail::formatted("the tensor {} is on {}, and {} moves {} tensors: call {}() first",
                             describe(tensor), tensor.device().str(), check.backend,
                             c10::DeviceTypeName(*check.device), c10::DeviceTypeName(*check.device, true)));
  if (tensor.is_quantized())
    refuse(detail::formatted("the tensor {} is quantized: dequantize() it", describe(tensor)));
}

inline void check_reducible(const TensorCheck& check, std::string_view collective, const at::Tensor& tensor,
                            ReduceOp op) {
  check_tensor(check, collective, tensor);
  const auto type = tensor.scalar_type();
  if (!is_reducible(type))
    throw CommunicationError(
        detail::formatted("{}: {} cannot reduce {}: convert it to float32, float64, float16, bfloat16, "
                          "int8, uint8, int32, int64 or bool",
                          collective, check.backend, describe(tensor)));
  if (op == ReduceOp::avg && !at::isFloatingType(type))
    throw CommunicationError(detail::formatted(
        "{}: the average of {} is no {}: sum it and divide, or convert it to a floating type", collective,
        describe(tensor), dtype_name(type)));
}

/// Throws CommunicationError unless the lists match: each of `wholes` has the dtype of its counterpart in
/// `rows` and `times` as many elements.
inline void check_pairs(const TensorCheck& check, std::string_view collective, at::TensorList wholes,
                        at::TensorList rows, int times) {
  if (wholes.size() != rows.size())
    throw CommunicationError(detail::formatted("{}: as many outputs as inputs are needed, not {} and {}",
                                               collective, wholes.size(), rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    check_tensor(check, collective, wholes[i]);
    check_tensor(check, collective, rows[i]);
    if (wholes[i].scalar_type() != rows[i].scalar_type() || wholes[i].numel() != times * rows[i].numel())
      throw CommunicationError(detail::formatted("{}: {} is not {} times {}", collective, describe(wholes[i]),
                                                 times, describe(rows[i])));
  }
}

/// Throws CommunicationError unless each input has one row for each of `ranks` ranks.
inline void check_rows(std::string_view collective, at::TensorList inputs, int ranks) {
  for (const at::Tensor& input : inputs)
    if (input.dim() == 0 || input.size(0) != ranks)
      throw CommunicationError(detail::formatted("{}: the input {} must have one row for each of {} ranks",
                                                 collective, describe(input), ranks));
}

}  // namespace lockstep::detail
