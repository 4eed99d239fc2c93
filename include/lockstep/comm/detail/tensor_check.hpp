#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns whether Gloo, and every NCCL since 2.18, can reduce this dtype. Both can only move other dtypes.
/// A bool is reduced as a byte 0 or 1.
inline bool is_reducible(at::ScalarType type) {
  constexpr std::array reducible{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                                 at::kByte,  at::kBool,   at::kInt,  at::kLong};
  return std::find(reducible.begin(), reducible.end(), type) != reducible.end();
}

/// The tensors that a communicator supports. `backend` is its name in errors, such as "Gloo". Without a
/// `device`, tensors of any device.
struct TensorCheck {
  std::string backend;
  std::optional<at::DeviceType> device;
};

/// Throws CommunicationError unless the communicator can move the tensor, and reduce it by `op` if there is one.
inline void check_tensor(const TensorCheck& check, std::string_view collective, const at::Tensor& tensor,
                         std::optional<ReduceOp> op = {}) {
  std::string fault;
  if (!tensor.defined())
    fault = "undefined";
  else if (tensor.layout() != at::kStrided)
    fault = "not dense: call to_dense() first";
  else if (tensor.is_quantized())
    fault = "quantized: dequantize() it";
  else if (check.device && tensor.device().type() != *check.device)
    fault = formatted("on {}, and {} moves {} tensors: call {}() first", tensor.device().str(), check.backend,
                      c10::DeviceTypeName(*check.device), c10::DeviceTypeName(*check.device, true));
  if (!fault.empty())
    throw CommunicationError(formatted("{}: the tensor {}is {}", collective,
                                       tensor.defined() ? describe(tensor) + " " : "", fault));
  if (op && !is_reducible(tensor.scalar_type()))
    throw CommunicationError(
        formatted("{}: {} cannot reduce {}: convert it to float32, float64, float16, "
                  "bfloat16, int8, uint8, int32, int64 or bool",
                  collective, check.backend, describe(tensor)));
  if (op == ReduceOp::avg && !tensor.is_floating_point())
    throw CommunicationError(
        formatted("{}: the average of {} is no {}: sum it and divide, or convert it to a floating type",
                  collective, describe(tensor), dtype_name(tensor.scalar_type())));
}

/// Throws CommunicationError if an element of a tensor that receives a result lies in the place of another.
inline void check_outputs(std::string_view collective, at::TensorList outputs) {
  for (const at::Tensor& tensor : outputs)
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      throw CommunicationError(formatted("{}: elements of the tensor {} share memory: clone it first",
                                         collective, describe(tensor)));
}

/// Throws CommunicationError unless the lists match: each of `wholes` has the dtype of its counterpart in
/// `rows` and `times` as many elements.
inline void check_pairs(const TensorCheck& check, std::string_view collective, at::TensorList wholes,
                        at::TensorList rows, int times) {
  if (wholes.size() != rows.size())
    throw CommunicationError(formatted("{}: as many outputs as inputs are needed, not {} and {}", collective,
                                       wholes.size(), rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    check_tensor(check, collective, wholes[i]);
    check_tensor(check, collective, rows[i]);
    if (wholes[i].scalar_type() != rows[i].scalar_type() || wholes[i].numel() != times * rows[i].numel())
      throw CommunicationError(
          formatted("{}: {} is not {} times {}", collective, describe(wholes[i]), times, describe(rows[i])));
  }
}

/// Throws CommunicationError unless each input has one row for each of `ranks` ranks.
inline void check_rows(std::string_view collective, at::TensorList inputs, int ranks) {
  for (const at::Tensor& input : inputs)
    if (input.dim() == 0 || input.size(0) != ranks)
      throw CommunicationError(formatted("{}: the input {} must have one row for each of {} ranks",
                                         collective, describe(input), ranks));
}

}  // namespace lockstep::inline v0_1::detail
