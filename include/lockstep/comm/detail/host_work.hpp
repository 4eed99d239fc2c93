#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"

namespace lockstep::detail {

/// What a Work of lockstep's backends throws where the ranks have launched different operations.
struct OtherOperation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Returns the operation by which lockstep's backends reduce `type` for `op`, std::nullopt for one that they refuse. A sum
/// of bool is a logical or (Gloo adds the bytes), and its product a logical and. An average is a sum that is divided
/// afterwards.
inline std::optional<c10d::ReduceOp::RedOpType> computed_op(at::ScalarType type,
                                                            c10d::ReduceOp::RedOpType op) {
  using Op = c10d::ReduceOp;
  if (op == Op::AVG) return at::isFloatingType(type) ? std::optional(Op::SUM) : std::nullopt;
  if (type == at::kBool && op == Op::SUM) return Op::MAX;
  if (type == at::kBool && op == Op::PRODUCT) return Op::MIN;
  return op;
}

/// An operation of a HostBackend.
class HostWork : public c10d::Work {
 public:
  /// Blocks until the operation has completed or failed, at most until `until`. Returns whether it has.
  virtual bool wait_until(std::chrono::steady_clock::time_point until) = 0;
  /// Calls `function(failed)` when the operation has completed or failed, at once if it has. The function must neither
  /// launch an operation nor wait for one.
  virtual void at_end(std::function<void(bool failed)> function) = 0;

  bool wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) override {
    const auto now = std::chrono::steady_clock::now();
    if (!wait_until(timeout.count() > 0 ? now + timeout : now + std::chrono::hours(24 * 365)))
      throw std::runtime_error(formatted("not complete after {} ms", timeout.count()));
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override { static_cast<void>(wait()); }
};

/// A backend of lockstep's own, on the host. It may have no thread: a thread that waits for one operation moves the others
/// on. So the group waits by HostWork::wait_until, and does not ask in a loop whether the operation has completed.
///
/// A derived class implements the operations on one tensor. Those on lists of tensors, one for each rank, are made of
/// them here.
class HostBackend : public c10d::Backend, public AbortableBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  using c10d::Backend::Backend;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    at::Tensor input = one(inputs);
    return into_list(outputs.at(0), input,
                     [&](at::Tensor output) { return _allgather_base(output, input, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    at::Tensor output = one(outputs), input = joined_rows(inputs.at(0), output);
    return _reduce_scatter_base(output, input, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    at::Tensor input = joined_rows(inputs, inputs.at(0));
    std::vector<std::int64_t> even;
    return into_list(outputs, inputs[0],
                     [&](at::Tensor output) { return alltoall_base(output, input, even, even, options); });
  }
  /// Completes the operations that were launched, whether or not somebody has their Works, at most until `until`.
  virtual void drain(std::chrono::steady_clock::time_point until) = 0;

 protected:
  static char* data_of(const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<char*>(tensor.data_ptr()) : nullptr;
  }
  [[nodiscard]] const at::Tensor& one(const Tensors& tensors) const {
    TORCH_CHECK(tensors.size() == 1, getBackendName(), " takes one tensor at a time, not ", tensors.size());
    return tensors[0];
  }
  void check_rows(const at::Tensor& rows, const at::Tensor& row) const {
    TORCH_CHECK(rows.scalar_type() == row.scalar_type() && rows.numel() == getSize() * row.numel(),
                "one tensor must have one row of the other for each rank");
  }
  void check_even(const at::Tensor& output, const std::vector<std::int64_t>& output_sizes,
                  const at::Tensor& input, const std::vector<std::int64_t>& input_sizes) const {
    for (const auto* sizes : {&output_sizes, &input_sizes})
      TORCH_CHECK(std::adjacent_find(sizes->begin(), sizes->end(), std::not_equal_to<>()) == sizes->end(),
                  getBackendName(), " has no all-to-all in uneven parts");
    TORCH_CHECK(output.nbytes() == input.nbytes() && input.numel() % getSize() == 0,
                "the tensors of an all-to-all have one size, which the number of ranks divides");
  }
  void check_list(const Tensors& tensors, const at::Tensor& row) const {
    TORCH_CHECK(static_cast<int>(tensors.size()) == getSize(), "there must be one tensor for each rank");
    for (const at::Tensor& tensor : tensors)
      TORCH_CHECK(tensor.scalar_type() == row.scalar_type() && tensor.numel() == row.numel(),
                  "the tensors must have one dtype and one size");
  }
  /// Returns the tensors, one for each rank and each like `row`, as one.
  [[nodiscard]] at::Tensor joined_rows(const Tensors& tensors, const at::Tensor& row) const {
    check_list(tensors, row);
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({-1}));
    return at::cat(flat);
  }
  /// Launches an operation by `start(rows)` whose output is a list of tensors, one for each rank: in place if they are
  /// contiguous, one after the other.
  template <class Start>
  WorkPtr into_list(const Tensors& outputs, const at::Tensor& row, const Start& start) const {
    check_list(outputs, row);
    bool in_place = true;
    for (std::size_t i = 0; i < outputs.size(); ++i)
      in_place = in_place && outputs[i].is_contiguous() &&
                 data_of(outputs[i]) == data_of(outputs[0]) + i * row.nbytes();
    const std::vector<std::int64_t> sizes{getSize(), row.numel()};
    const auto options = row.options().requires_grad(false);
    if (in_place)
      return start(at::from_blob(
          data_of(outputs[0]), sizes, [outputs](void*) {}, options));
    const at::Tensor all = at::empty(sizes, options);
    const WorkPtr work = start(all);
    static_cast<HostWork&>(*work).at_end([all, outputs](bool failed) {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; !failed && i < outputs.size(); ++i)
        outputs[i].detach().copy_(all[static_cast<std::int64_t>(i)].view(outputs[i].sizes()));
    });
    return work;
  }
  /// Divides the sum once it is complete, if `op` is an average.
  WorkPtr averaged(const c10d::ReduceOp& op, const at::Tensor& sum, WorkPtr work) const {
    if (op == c10d::ReduceOp::AVG)
      static_cast<HostWork&>(*work).at_end([sum, ranks = getSize()](bool failed) {
        const at::NoGradGuard no_grad;
        if (!failed) sum.detach().div_(ranks);
      });
    return work;
  }
};

}  // namespace lockstep::detail
