#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/detail/host_operation.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"

namespace lockstep::inline v0_1::detail {

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
  /// Adds the operations of another Work of the backend. The Work completes with its last operation, or fails with the first
  /// that fails.
  virtual void join(const c10d::Work& other) = 0;

  bool wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) override {
    using Clock = std::chrono::steady_clock;
    if (!wait_until(timeout.count() > 0 ? Clock::now() + timeout : Clock::time_point::max()))
      throw std::runtime_error(formatted("not complete after {} ms", timeout.count()));
    if (const auto error = exception()) std::rethrow_exception(error);
    return true;
  }
  void synchronize() override { static_cast<void>(wait()); }
};

/// The HostWork of operations that `*engine` runs.
template <class Engine>
class EngineWork final : public HostWork {
 public:
  using Operation = typename std::pointer_traits<Engine>::element_type::Operation;

  EngineWork(Engine engine, Operation operation)
      : engine_(std::move(engine)), operations_{std::move(operation)} {}

  bool wait_until(std::chrono::steady_clock::time_point until) override {
    return engine_->wait(until, [this] { return ended(); });
  }
  void at_end(HostOperation::Function function) override {
    const auto left = std::make_shared<std::size_t>(operations_.size());  // guarded by the engine's mutex
    for (const auto& operation : operations_)
      engine_->at_end(*operation, [left, function](bool failed) {
        if (*left > 0 && (*left = failed ? 0 : *left - 1) == 0) function(failed);
      });
  }
  void join(const c10d::Work& other) override {
    operations_.append(static_cast<const EngineWork&>(other).operations_);
  }
  bool isCompleted() override {
    if (!ended()) engine_->move_on();
    return ended();
  }
  bool isSuccess() const override { return ended() && !exception(); }
  std::exception_ptr exception() const override {
    for (const auto& operation : operations_)
      if (operation->ended() && operation->error) return operation->error;
    return nullptr;
  }
  void abort() override { engine_->abort(*operations_[0]); }

 private:
  [[nodiscard]] bool ended() const {
    return exception() || std::all_of(operations_.begin(), operations_.end(),
                                      [](const auto& operation) { return operation->ended(); });
  }

  const Engine engine_;
  c10::SmallVector<Operation, 1> operations_;
};

/// A backend of lockstep's own, on the host. It may have no thread: a thread that waits for one operation moves the others
/// on. So the group waits by HostWork::wait_until, and does not ask in a loop whether the operation has completed.
///
/// A derived class launches operations on one tensor; the operations of c10d are made of them here. Tensors are dense
/// and on the CPU. A gather, a scatter, and an all-to-all with split sizes or of lists consist of messages: unlike with Gloo,
/// either all ranks give split sizes or none does. There are no coalesced operations and no averages, as in Gloo before 2.13.
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
    const Tensors& list = outputs.at(0);
    const at::Tensor& row = one(inputs);
    check_list(list, row);
    bool in_place = true;  // contiguous, one after the other
    for (std::size_t i = 0; i < list.size(); ++i)
      in_place =
          in_place && list[i].is_contiguous() && data_of(list[i]) == data_of(list[0]) + i * row.nbytes();
    if (in_place)
      return run(Kind::all_gather, row,
                 at::from_blob(
                     data_of(list[0]), {getSize(), row.numel()}, [list](void*) {},
                     row.options().requires_grad(false)));
    const at::Tensor rows = new_rows(row);
    return copied(run(Kind::all_gather, row, rows), list, rows.unbind(0));
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    check_rows(output, input);
    return run(Kind::all_gather, input, output);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    check_root_list(outputs, options.rootRank);
    if (!outputs.empty()) check_list(outputs[0], one(inputs));
    Tensors from(static_cast<std::size_t>(getSize()));
    from[static_cast<std::size_t>(options.rootRank)] = one(inputs);
    return exchange(gathers, outputs.empty() ? Tensors() : outputs[0], from, options.rootRank);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    check_root_list(inputs, options.rootRank);
    if (!inputs.empty()) check_list(inputs[0], one(outputs));
    Tensors to(static_cast<std::size_t>(getSize()));
    to[static_cast<std::size_t>(options.rootRank)] = one(outputs);
    return exchange(scatters, to, inputs.empty() ? Tensors() : inputs[0], options.rootRank);
  }
  // As Gloo's: an all-reduce of each tensor of a list, or of all rows at once.
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    check_list(inputs.at(0), one(outputs));
    WorkPtr work;
    for (std::size_t i = 0; i < inputs[0].size(); ++i) {
      const at::Tensor sum = inputs[0][i].detach().clone(at::MemoryFormat::Contiguous);
      const at::Tensor& to = static_cast<int>(i) == getRank() ? outputs[0] : sum;
      join(work, copied(run(Kind::all_reduce, sum, sum, 0, options.reduceOp, reduce_scatters), {to}, {sum}));
    }
    return work;
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_rows(input, output);
    const at::Tensor rows = input.detach().clone(at::MemoryFormat::Contiguous).view({getSize(), -1});
    return copied(run(Kind::all_reduce, rows, rows, 0, options.reduceOp, reduce_scatters), {output},
                  {rows[getRank()]});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    TORCH_CHECK(outputs.size() == inputs.size() && static_cast<int>(inputs.size()) == getSize(),
                "there must be one tensor for each rank");
    return exchange(exchanges, outputs, inputs);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    if (!output_sizes.empty() || !input_sizes.empty()) {
      Tensors outputs = parts(output, output_sizes), inputs = parts(input, input_sizes);
      return alltoall(outputs, inputs, options);
    }
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
  void check_root_list(const std::vector<Tensors>& lists, std::int64_t root) const {
    TORCH_CHECK(root >= 0 && root < getSize() && lists.size() == (getRank() == root ? 1 : 0),
                "the root, a rank of the group, must have one list of tensors, and the other ranks none");
  }
  [[nodiscard]] at::Tensor new_rows(const at::Tensor& row) const {
    return at::empty({getSize(), row.numel()}, row.options().requires_grad(false));
  }
  [[nodiscard]] Tensors parts(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes) const {
    c10d::checkSplitSizes(sizes, tensor, getSize());
    return sizes.empty() ? tensor.detach().tensor_split(getSize()) : tensor.detach().split_with_sizes(sizes);
  }
  /// Composed operations. In shared memory a rank that has launched another operation is an error.
  enum Composed { exchanges, gathers, scatters, reduce_scatters };
  /// Sends `from[i]` to rank i and receives `to[i]` from it, where they are defined; an empty list has none. A barrier completes
  /// once all ranks have launched it.
  WorkPtr exchange(Composed operation, const Tensors& to, const Tensors& from, std::int64_t root = 0) {
    WorkPtr work = run(Kind::barrier, {}, {}, root, {}, operation);
    for (std::size_t i = 0; i < std::max(to.size(), from.size()); ++i) {
      if (i < from.size() && from[i].defined())
        join(work, run(Kind::send, from[i].contiguous(), {}, static_cast<int>(i)));
      if (i >= to.size() || !to[i].defined()) continue;
      const at::Tensor row = to[i].contiguous();
      join(work, copied(run(Kind::receive, {}, row, static_cast<int>(i)), {to[i]}, {row}));
    }
    return work;
  }
  /// Copies `from` to `to` when the work ends, until which they stay alive.
  static WorkPtr copied(WorkPtr work, const Tensors& to, const Tensors& from) {
    static_cast<HostWork&>(*work).at_end([to, from](bool failed) {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; !failed && i < to.size(); ++i)
        if (!to[i].is_same(from[i])) to[i].detach().copy_(from[i].view(to[i].sizes()));
    });
    return work;
  }
  static void join(WorkPtr& work, const WorkPtr& part) {
    work ? static_cast<HostWork&>(*work).join(*part) : void(work = part);
  }
  WorkPtr run(Kind kind, const at::Tensor& input, const at::Tensor& output, std::int64_t root = 0,
              std::optional<c10d::ReduceOp::RedOpType> op = {}, std::optional<int> tag = {}) {
    TORCH_CHECK(root >= 0 && root < getSize(), "there is no rank ", root, " in a group of ", getSize());
    TORCH_CHECK(!tag || (*tag >= 0 && *tag < std::numeric_limits<int>::max()), "there is no tag ", *tag);
    for (const at::Tensor* tensor : {&input, &output})
      TORCH_CHECK(!tensor->defined() || (tensor->is_cpu() && tensor->is_contiguous()), getBackendName(),
                  " moves dense and contiguous tensors on the CPU");
    const std::size_t rows = kind == Kind::all_to_all ? static_cast<std::size_t>(getSize()) : 1;
    const std::size_t row = input.defined() ? input.nbytes() / rows : output.defined() ? output.nbytes() : 0;
    // The messages of an exchange have the tag 0, the program's those from 1.
    const int own_tag = tag ? static_cast<int>(*tag + 1U) : 0;
    return launch({kind, input, output, static_cast<int>(root), own_tag, op, rows, row});
  }
};

}  // namespace lockstep::inline v0_1::detail
