#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/error.hpp"

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace lockstep::detail {

/// Throws CommunicationError unless `tensor` can take part in a collective on a CPU.
inline void check_tensor(std::string_view collective, const at::Tensor& tensor) {
  auto refuse = [&](const std::string& why) {
    throw CommunicationError(fmt::format("{}: {}", collective, why));
  };
  if (!tensor.defined()) refuse("the tensor is undefined");
  if (tensor.layout() != at::kStrided)
    refuse(fmt::format("the tensor {} is not dense: call to_dense() first", describe(tensor)));
  if (!tensor.device().is_cpu())
    refuse(fmt::format("the tensor {} is on {}, and Gloo moves CPU tensors: call cpu() first",
                       describe(tensor), tensor.device().str()));
  if (tensor.is_quantized())
    refuse(fmt::format("the tensor {} is quantized: dequantize() it", describe(tensor)));
}

/// True where Gloo can add, compare and multiply elements of this type. Everything else it can only move.
inline bool gloo_reduces(at::ScalarType type) {
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

/// Throws CommunicationError if Gloo cannot reduce this dtype by this operation.
inline void check_reducible(std::string_view collective, const at::Tensor& tensor, ReduceOp op) {
  check_tensor(collective, tensor);
  const auto type = tensor.scalar_type();
  if (!gloo_reduces(type))
    throw CommunicationError(
        fmt::format("{}: Gloo cannot reduce {}: convert it to float32, float64, float16, bfloat16, int8, "
                    "uint8, int32, int64 or "
                    "bool",
                    collective, describe(tensor)));
  if (op == ReduceOp::avg && !at::isFloatingType(type))
    throw CommunicationError(
        fmt::format("{}: the average of {} is no {}: sum it and divide, or convert it to a floating type",
                    collective, describe(tensor), dtype_name(type)));
}

/// Throws CommunicationError unless the lists go together: each of `wholes` holds `times` as many elements as
/// its one of `rows`.
inline void check_pairs(std::string_view collective, const std::vector<at::Tensor>& wholes,
                        const std::vector<at::Tensor>& rows, int times) {
  if (wholes.size() != rows.size())
    throw CommunicationError(fmt::format("{}: as many outputs as inputs are needed, not {} and {}",
                                         collective, wholes.size(), rows.size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    check_tensor(collective, wholes[i]);
    check_tensor(collective, rows[i]);
    if (wholes[i].scalar_type() != rows[i].scalar_type() || wholes[i].numel() != times * rows[i].numel())
      throw CommunicationError(fmt::format("{}: {} is not {} times {}", collective, describe(wholes[i]),
                                           times, describe(rows[i])));
  }
}

/// The bytes of a contiguous tensor whose type Gloo does not know, or the tensor itself.
inline at::Tensor movable(const at::Tensor& contiguous) {
  if (gloo_reduces(contiguous.scalar_type())) return contiguous;
  return contiguous.detach().view({-1}).view(at::kByte);
}

/// What Gloo is asked to do for an operation; averages are sums, divided afterwards (Gloo has had them
/// since 2.13 only).
inline c10d::ReduceOp native(ReduceOp op, at::ScalarType type) {
  switch (op) {
    case ReduceOp::sum:
      // Gloo adds bools as bytes, and a bool must not become 2.
      return type == at::kBool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    case ReduceOp::avg:
      return c10d::ReduceOp::SUM;
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

/// Combines the rows of `rows` [n, ...] into `output` [...], from the first to the last.
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

/// The tensors of one dtype in a list, and the one buffer that travels for them: [rows, ...], where row r
/// holds row r of each tensor, one behind the other.
struct TensorBundle {
  std::vector<at::Tensor> tensors;
  std::int64_t rows = 1;
  at::Tensor buffer = {};  // the only tensor itself where it is alone and contiguous

  [[nodiscard]] bool in_place() const { return tensors.size() == 1 && buffer.is_same(tensors[0]); }

  /// Makes the buffer, with the tensors copied into it.
  void pack() {
    at::NoGradGuard no_grad;
    if (take_alone()) return;
    std::vector<at::Tensor> flat;
    flat.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({rows, -1}));
    buffer = flat.size() == 1 ? flat[0].clone(at::MemoryFormat::Contiguous) : at::cat(flat, 1);
  }

  /// Makes the buffer, for what is to arrive in it.
  void make_room() {
    if (take_alone()) return;
    std::int64_t length = 0;
    for (const at::Tensor& tensor : tensors) length += tensor.numel();
    buffer = at::empty({rows, length / rows}, tensors[0].options().requires_grad(false));
  }

  /// Copies the buffer back.
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
  bool take_alone() {
    if (tensors.size() != 1 || !tensors[0].is_contiguous()) return false;
    buffer = tensors[0];
    return true;
  }
};

/// A list sorted into one bundle a dtype, in the order in which the dtypes first appear; empty tensors stay
/// out. `rows` divides the number of elements of each.
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
