#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::detail {

/// Checks that a backend supports the tensors of a call. `backend` is its name in errors, such as "Gloo".
struct TensorCheck {
  std::string backend;
  at::DeviceType device = at::kCPU;
};

/// Throws CommunicationError unless `tensor` can take part in a collective.
inline void check_tensor(const TensorCheck& check, std::string_view collective, const at::Tensor& tensor) {
  auto refuse = [&](const std::string& why) {
    throw CommunicationError(detail::formatted("{}: {}", collective, why));
  };
  if (!tensor.defined()) refuse("the tensor is undefined");
  if (tensor.layout() != at::kStrided)
    refuse(detail::formatted("the tensor {} is not dense: call to_dense() first", describe(tensor)));
  if (tensor.device().type() != check.device)
    refuse(detail::formatted("the tensor {} is on {}, and {} moves {} tensors: call {}() first",
                             describe(tensor), tensor.device().str(), check.backend,
                             c10::DeviceTypeName(check.device), c10::DeviceTypeName(check.device, true)));
  if (tensor.is_quantized())
    refuse(detail::formatted("the tensor {} is quantized: dequantize() it", describe(tensor)));
}

/// Throws CommunicationError if no backend can reduce this tensor's dtype with `op`.
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
inline void check_pairs(const TensorCheck& check, std::string_view collective,
                        const std::vector<at::Tensor>& wholes, const std::vector<at::Tensor>& rows,
                        int times) {
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

/// Returns the tensor itself, or a view of its bytes if a backend may not know its dtype.
inline at::Tensor movable(const at::Tensor& contiguous) {
  if (is_reducible(contiguous.scalar_type())) return contiguous;
  return contiguous.detach().view({-1}).view(at::kByte);
}

/// Returns the backend's operation for `op`. Without `averages`, an average is a sum that the caller divides:
/// Gloo has averages only since 2.13, and MPI has none.
inline c10d::ReduceOp native(ReduceOp op, at::ScalarType type, bool averages) {
  switch (op) {
    case ReduceOp::sum:
      // Backends add bools as bytes, and a bool must not become 2.
      return type == at::kBool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    case ReduceOp::avg:
      return averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
  }
  return c10d::ReduceOp::SUM;
}

inline void divide(at::Tensor tensor, int divisor) {
  if (divisor == 1) return;
  at::NoGradGuard no_grad;
  tensor.detach().div_(divisor);
}

/// Reduces the rows of `rows` [n, ...] into `output` [...], from the first to the last.
inline void combine_rows(const at::Tensor& output, const at::Tensor& rows, ReduceOp op) {
  at::NoGradGuard no_grad;
  at::Tensor result = rows[0];
  const bool logical = rows.scalar_type() == at::kBool;
  for (std::int64_t i = 1; i < rows.size(0); ++i) {
    const at::Tensor row = rows[i];
    if (op == ReduceOp::min)
      at::minimum_out(result, result, row);
    else if (op == ReduceOp::max || (logical && op == ReduceOp::sum))
      at::maximum_out(result, result, row);
    else if (op == ReduceOp::product)
      result.mul_(row);
    else
      result.add_(row);
  }
  if (op == ReduceOp::avg) divide(result, static_cast<int>(rows.size(0)));
  at::Tensor target = output;
  target.detach().copy_(result.view(output.sizes()));
}

/// The tensors of one dtype in a list, and the buffer [rows, ...] that is sent for them. Row r of the buffer
/// holds row r of each tensor, concatenated.
struct TensorBundle {
  std::vector<at::Tensor> tensors;
  std::int64_t rows = 1;
  at::Tensor buffer = {};  // the tensor itself if there is only one and it is contiguous

  [[nodiscard]] bool in_place() const { return tensors.size() == 1 && buffer.is_same(tensors[0]); }

  /// Creates the buffer and copies the tensors into it.
  void pack() {
    at::NoGradGuard no_grad;
    if (use_single_tensor()) return;
    std::vector<at::Tensor> flat;
    flat.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({rows, -1}));
    buffer = flat.size() == 1 ? flat[0].clone(at::MemoryFormat::Contiguous) : at::cat(flat, 1);
  }

  /// Creates an uninitialized buffer to receive into.
  void allocate() {
    if (use_single_tensor()) return;
    std::int64_t length = 0;
    for (const at::Tensor& tensor : tensors) length += tensor.numel();
    buffer = at::empty({rows, length / rows}, tensors[0].options().requires_grad(false));
  }

  /// Copies the buffer back into the tensors.
  void unpack() const {
    if (in_place()) return;
    at::NoGradGuard no_grad;
    const at::Tensor whole = buffer.view({rows, -1});
    std::int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      const std::int64_t length = tensor.numel() / rows;
      at::Tensor target = tensor;
      target.detach().copy_(whole.narrow(1, offset, length).reshape(tensor.sizes()));
      offset += length;
    }
  }

 private:
  bool use_single_tensor() {
    if (tensors.size() != 1 || !tensors[0].is_contiguous()) return false;
    buffer = tensors[0];
    return true;
  }
};

/// Groups a list into one bundle per dtype, in the order of each dtype's first appearance, without empty
/// tensors. `rows` divides the number of elements of each tensor.
inline std::vector<TensorBundle> bundles_of(const std::vector<at::Tensor>& list, std::int64_t rows = 1) {
  std::vector<TensorBundle> bundles;
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() == 0) continue;
    TensorBundle* home = nullptr;
    for (TensorBundle& bundle : bundles)
      if (bundle.tensors[0].scalar_type() == tensor.scalar_type()) home = &bundle;
    if (!home) {
      home = &bundles.emplace_back();
      home->rows = rows;
    }
    home->tensors.push_back(tensor);
  }
  return bundles;
}

}  // namespace lockstep::detail
