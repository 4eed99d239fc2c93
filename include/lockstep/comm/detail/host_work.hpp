#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/detail/host_operation.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"

namespace lockstep::detail {

/// How lockstep's backends reduce.
enum Reduction : std::size_t { adds, multiplies, takes_least, takes_greatest, reductions };

/// Returns how lockstep's backends reduce `type` for `op`, std::nullopt for an operation that they refuse. A sum of bool is
/// a logical or (Gloo adds the bytes), and its product a logical and.
inline std::optional<Reduction> reduction_of(at::ScalarType type, c10d::ReduceOp::RedOpType op) {
  using Op = c10d::ReduceOp;
  const bool logical = type == at::kBool;
  if (op == Op::SUM) return logical ? takes_greatest : adds;
  if (op == Op::PRODUCT) return logical ? takes_least : multiplies;
  if (op == Op::MIN) return takes_least;
  return op == Op::MAX ? std::optional(takes_greatest) : std::nullopt;
}

/// The Work of an operation of a HostBackend.
class HostWork : public c10d::Work {
 public:
  /// Blocks until the operation has completed or failed, at most until `until`. Returns whether it has.
  virtual bool wait_until(std::chrono::steady_clock::time_point until) = 0;
  /// See HostOperation::at_end.
  virtual void at_end(HostOperation::Function function) = 0;

  bool wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) override {
    using Clock = std::chrono::steady_clock;
    if (!wait_until(timeout.count() > 0 ? Clock::now() + timeout : Clock::time_point::max()))
      throw std::runtime_error(formatted("not complete after {} ms", timeout.count()));
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override { static_cast<void>(wait()); }
};

/// The HostWork of an operation that `*engine` runs.
template <class Engine>
class EngineWork final : public HostWork {
 public:
  using Operation = typename std::pointer_traits<Engine>::element_type::Operation;

  EngineWork(Engine engine, Operation operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}

  bool wait_until(std::chrono::steady_clock::time_point until) override {
    return engine_->wait(until, [this] { return operation_->ended(); });
  }
  void at_end(HostOperation::Function function) override {
    engine_->at_end(*operation_, std::move(function));
  }
  bool isCompleted() override {
    if (!operation_->ended()) engine_->move_on();
    return operation_->ended();
  }
  bool isSuccess() const override { return operation_->ended() && !operation_->error; }
  std::exception_ptr exception() const override { return operation_->ended() ? operation_->error : nullptr; }
  void abort() override { engine_->abort(*operation_); }

 private:
  const Engine engine_;
  const Operation operation_;
};

/// A backend of lockstep's own, on the host. It may have no thread: a thread that waits for one operation moves the others
/// on. So the group waits by HostWork::wait_until, and does not ask in a loop whether the operation has completed.
///
/// A derived class launches operations on one tensor; the operations of c10d are made of them here. Tensors are dense
/// and on the CPU. All-to-alls in uneven parts are refused.
class HostBackend : public c10d::Backend, public AbortableBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  using c10d::Backend::Backend;
  WorkPtr barrier(const c10d::BarrierOptions&) override { return run(Kind::barrier, {}, {}); }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run(Kind::broadcast, one(tensors), tensors[0], options.rootRank);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run(Kind::all_reduce, one(tensors), tensors[0], 0, options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run(Kind::reduce, one(tensors), tensors[0], options.rootRank, options.reduceOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return into_list(outputs.at(0), one(inputs),
                     [&](const at::Tensor& output) { return run(Kind::all_gather, inputs[0], output); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    check_rows(output, input);
    return run(Kind::all_gather, input, output);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    for (const auto* sizes : {&output_sizes, &input_sizes})
      TORCH_CHECK(std::adjacent_find(sizes->begin(), sizes->end(), std::not_equal_to<>()) == sizes->end(),
                  getBackendName(), " has no all-to-all in uneven parts");
    TORCH_CHECK(output.nbytes() == input.nbytes() && input.numel() % getSize() == 0,
                "the tensors of an all-to-all have one size, which the number of ranks divides");
    return run(Kind::all_to_all, input, output);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return run(Kind::send, one(tensors), {}, peer, {}, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return run(Kind::receive, {}, one(tensors), peer, {}, tag);
  }
  /// Completes the collectives that were launched, whether or not somebody has their Works, and in shared memory what was
  /// sent. Returns false at `until`.
  virtual bool drain(std::chrono::steady_clock::time_point until) = 0;
  /// The group launches nothing more, and what it has launched cannot complete once `over` returns true. Returns whether
  /// another thread than the program's may wait for it.
  virtual bool leave(std::function<bool()> over) = 0;

 protected:
  using Kind = HostOperation::Kind;

  /// An operation. A broadcast, an all-reduce and a reduce are in place: their input is their output.
  struct Call {
    [[nodiscard]] const char* from() const {
      return input.defined() ? static_cast<const char*>(input.const_data_ptr()) : nullptr;
    }
    [[nodiscard]] char* to() const { return data_of(output); }

    Kind kind;
    at::Tensor input, output;  ///< undefined where this rank has none
    int root, tag;             ///< root: of a message the other rank
    std::optional<c10d::ReduceOp::RedOpType> op;
    std::size_t rows, row;  ///< of the input: one or one for each rank, and the bytes of each
  };
  virtual WorkPtr launch(const Call& call) = 0;

 private:
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
  void check_list(const Tensors& tensors, const at::Tensor& row) const {
    TORCH_CHECK(static_cast<int>(tensors.size()) == getSize(), "there must be one tensor for each rank");
    for (const at::Tensor& tensor : tensors)
      TORCH_CHECK(tensor.scalar_type() == row.scalar_type() && tensor.numel() == row.numel(),
                  "the tensors must have one dtype and one size");
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
  WorkPtr run(Kind kind, const at::Tensor& input, const at::Tensor& output, std::int64_t root = 0,
              std::optional<c10d::ReduceOp::RedOpType> op = {}, int tag = 0) {
    TORCH_CHECK(root >= 0 && root < getSize(), "there is no rank ", root, " in a group of ", getSize());
    for (const at::Tensor* tensor : {&input, &output})
      TORCH_CHECK(!tensor->defined() || (tensor->is_cpu() && tensor->is_contiguous()), getBackendName(),
                  " moves dense and contiguous tensors on the CPU");
    const std::size_t rows = kind == Kind::all_to_all ? static_cast<std::size_t>(getSize()) : 1;
    const std::size_t row = input.defined() ? input.nbytes() / rows : output.defined() ? output.nbytes() : 0;
    return launch({kind, input, output, static_cast<int>(root), tag, op, rows, row});
  }
};

}  // namespace lockstep::detail
