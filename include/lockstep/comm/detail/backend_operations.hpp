#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/tensor_checks.hpp"
#include "lockstep/detail/libtorch_version.hpp"

namespace lockstep::detail {

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
  c10::SmallVector<at::Tensor, 1> tensors;
  std::int64_t rows = 1;
  at::Tensor buffer = {};  // the tensor itself if there is only one and it is contiguous

  [[nodiscard]] bool in_place() const { return tensors.size() == 1 && buffer.is_same(tensors[0]); }

  void pack() {
    at::NoGradGuard no_grad;
    if (use_single_tensor()) return;
    std::vector<at::Tensor> flat;
    flat.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({rows, -1}));
    buffer = flat.size() == 1 ? flat[0].clone(at::MemoryFormat::Contiguous) : at::cat(flat, 1);
  }

  void allocate() {
    if (use_single_tensor()) return;
    std::int64_t length = 0;
    for (const at::Tensor& tensor : tensors) length += tensor.numel();
    buffer = at::empty({rows, length / rows}, tensors[0].options().requires_grad(false));
  }

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
inline c10::SmallVector<TensorBundle, 1> bundles_of(at::TensorList tensors, std::int64_t rows = 1) {
  c10::SmallVector<TensorBundle, 1> bundles;
  for (const at::Tensor& tensor : tensors) {
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

/// An operation of a backend in flight. The functions below start one on a contiguous tensor.
using BackendWork = c10::intrusive_ptr<c10d::Work>;

inline BackendWork start_all_reduce(c10d::Backend& backend, const at::Tensor& tensor, c10d::ReduceOp op) {
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(op);
  std::vector<at::Tensor> tensors{tensor};
  return backend.allreduce(tensors, options);
}

inline BackendWork start_reduce(c10d::Backend& backend, const at::Tensor& tensor, c10d::ReduceOp op,
                                int root) {
  c10d::ReduceOptions options;
  options.reduceOp = std::move(op);
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return backend.reduce(tensors, options);
}

inline BackendWork start_broadcast(c10d::Backend& backend, const at::Tensor& tensor, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return backend.broadcast(tensors, options);
}

inline BackendWork start_all_gather(c10d::Backend& backend, const at::Tensor& rows, const at::Tensor& row) {
  std::vector<std::vector<at::Tensor>> outputs{rows.detach().view({backend.getSize(), -1}).unbind(0)};
  std::vector<at::Tensor> inputs{row.detach().view({-1})};
  return backend.allgather(outputs, inputs);
}

/// Starts an all-gather into one tensor, which a device's backend does without a copy of each row.
template <class Backend>
BackendWork start_all_gather_single(Backend& backend, const at::Tensor& rows, const at::Tensor& row) {
  at::Tensor to = rows.detach().view({-1}), from = row.detach().view({-1});
  return all_gather_single(backend, to, from);
}

template <class Backend>
BackendWork start_reduce_scatter(Backend& backend, const at::Tensor& row, const at::Tensor& input,
                                 c10d::ReduceOp op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = std::move(op);
  at::Tensor to = row.detach().view({-1}), from = input.detach().view({-1});
  return reduce_scatter_single(backend, to, from, options);
}

/// Starts an all-to-all: sends row r of `input` [size, ...] to rank r; row s of `rows` comes from rank s.
template <class Backend>
BackendWork start_all_to_all(Backend& backend, const at::Tensor& rows, const at::Tensor& input) {
  auto to = rows.detach().view({backend.getSize(), -1}), from = input.detach().view({backend.getSize(), -1});
  return all_to_all_single(backend, to, from);
}

}  // namespace lockstep::detail
