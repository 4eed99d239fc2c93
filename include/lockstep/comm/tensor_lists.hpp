#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// "[4, 3] float32", as the error messages name a tensor.
inline std::string describe(const at::Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t size : tensor.sizes()) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", size);
  return text + "] " + std::string(c10::toString(tensor.scalar_type()));
}

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
  const auto type = tensor.scalar_type();
  if (!gloo_reduces(type))
    throw CommunicationError(
        fmt::format("{}: Gloo cannot reduce {}: convert it to float32, float64, float16, bfloat16, int8, "
                    "uint8, int32, int64 or "
                    "bool",
                    collective, describe(tensor)));
  if (op == ReduceOp::average && !at::isFloatingType(type))
    throw CommunicationError(
        fmt::format("{}: the average of {} is no {}: sum it and divide, or convert it to a floating type",
                    collective, describe(tensor), c10::toString(type)));
}

/// The bytes of a contiguous tensor whose type Gloo does not know, or the tensor itself.
inline at::Tensor movable(const at::Tensor& contiguous) {
  if (gloo_reduces(contiguous.scalar_type())) return contiguous;
  return contiguous.detach().view({-1}).view(at::kByte);
}

/// The tensors of one dtype in a list, and the one buffer that travels for them.
struct TensorBundle {
  std::vector<at::Tensor> tensors;
  at::Tensor buffer;  // the only tensor itself where it is alone and contiguous

  [[nodiscard]] bool in_place() const { return tensors.size() == 1 && buffer.is_same(tensors[0]); }

  /// Copies the tensors into the buffer, one behind the other.
  void pack() {
    at::NoGradGuard no_grad;
    if (tensors.size() == 1 && tensors[0].is_contiguous()) {
      buffer = tensors[0];
      return;
    }
    std::vector<at::Tensor> flat;
    flat.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({-1}));
    buffer = flat.size() == 1 ? flat[0].clone() : at::cat(flat);
  }

  /// Copies the buffer back.
  void unpack() const {
    if (in_place()) return;
    at::NoGradGuard no_grad;
    std::int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      at::Tensor target = tensor;
      target.detach().copy_(buffer.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }
};

/// A list sorted into one bundle a dtype, in the order in which the dtypes first appear; empty tensors stay
/// out.
inline std::vector<TensorBundle> bundles_of(const std::vector<at::Tensor>& list) {
  std::vector<TensorBundle> bundles;
  for (const at::Tensor& tensor : list) {
    if (tensor.numel() == 0) continue;
    TensorBundle* home = nullptr;
    for (TensorBundle& bundle : bundles)
      if (bundle.tensors[0].scalar_type() == tensor.scalar_type()) home = &bundle;
    if (!home) home = &bundles.emplace_back();
    home->tensors.push_back(tensor);
  }
  return bundles;
}

}  // namespace lockstep::detail
