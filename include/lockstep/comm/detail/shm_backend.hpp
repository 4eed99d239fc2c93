#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/gloo_order.hpp"
#include "lockstep/comm/detail/host_work.hpp"
#include "lockstep/comm/detail/shm_engine.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Returns how shared memory reduces a dtype, null for an operation or a dtype that Gloo refuses. See computed_op.
inline Fold fold_of(at::ScalarType type, c10d::ReduceOp::RedOpType op) {
  const auto computed = computed_op(type, op);
  if (!computed) return nullptr;
  const auto of = [computed]<class Unsigned, class T>(Unsigned, T) -> Fold {
    switch (*computed) {
      case c10d::ReduceOp::SUM:
        return fold<Unsigned, AddElements>;
      case c10d::ReduceOp::PRODUCT:
        return fold<Unsigned, MultiplyElements>;
      case c10d::ReduceOp::MIN:
        return fold<T, LeastElement>;
      case c10d::ReduceOp::MAX:
        return fold<T, GreatestElement>;
      default:
        return nullptr;
    }
  };
  switch (type) {
    case at::kFloat:
      return of(float(), float());
    case at::kDouble:
      return of(double(), double());
    case at::kHalf:
      return of(c10::Half(), c10::Half());
    case at::kBFloat16:
      return of(c10::BFloat16(), c10::BFloat16());
    case at::kChar:
      return of(std::uint8_t(), std::int8_t());
    case at::kByte:
    case at::kBool:
      return of(std::uint8_t(), std::uint8_t());
    case at::kInt:
      return of(std::uint32_t(), std::int32_t());
    case at::kLong:
      return of(std::uint64_t(), std::int64_t());
    default:
      return nullptr;
  }
}

/// The Work of ShmBackend.
class ShmWork final : public HostWork {
 public:
  ShmWork(std::shared_ptr<ShmEngine> engine, ShmEngine::Operation operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}

  bool wait_until(std::chrono::steady_clock::time_point until) override {
    return engine_->wait_until(*operation_, until);
  }
  void at_end(std::function<void(bool failed)> function) override {
    engine_->at_end(*operation_, std::move(function));
  }

  bool isCompleted() override {
    if (!operation_->ended()) engine_->move_on();
    return operation_->ended();
  }
  bool isSuccess() const override { return operation_->state.load() == ShmOperation::State::complete; }
  std::exception_ptr exception() const override {
    switch (operation_->state.load()) {
      case ShmOperation::State::pending:
      case ShmOperation::State::complete:
        return nullptr;
      case ShmOperation::State::thrown:
        return operation_->thrown;
      case ShmOperation::State::aborted:
        return std::make_exception_ptr(std::runtime_error("the operation was aborted"));
      case ShmOperation::State::rank_ended:
        return std::make_exception_ptr(std::runtime_error("a process of the group has ended"));
      case ShmOperation::State::mismatch:
        return std::make_exception_ptr(OtherOperation("the ranks have launched different operations"));
      case ShmOperation::State::other_message:
        return std::make_exception_ptr(
            OtherOperation("the message has another size or dtype than the tensor that is to receive it"));
    }
    return nullptr;
  }
  void abort() override { engine_->abort(); }

 private:
  const std::shared_ptr<ShmEngine> engine_;
  const ShmEngine::Operation operation_;
};

/// A c10d::Backend of the ranks of one host, in memory that they share. See ShmEngine. Sums have the bits of
/// ProcessGroupGloo. Tensors are dense and on the CPU. All-to-alls in uneven parts are refused.
class ShmBackend final : public HostBackend {
 public:
  ShmBackend(std::shared_ptr<ShmMemory> memory, int rank, bool spins)
      : HostBackend(rank, memory->ranks()),
        engine_(std::make_shared<ShmEngine>(std::move(memory), rank, spins)) {}

  const std::string getBackendName() const override { return "shm"; }
  void abort() override { engine_->abort(); }
  void drain(std::chrono::steady_clock::time_point until) override { engine_->drain(until); }

  WorkPtr barrier(const c10d::BarrierOptions&) override { return launch(Kind::barrier, {}, {}); }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(Kind::broadcast, one(tensors), one(tensors), 1, static_cast<int>(options.rootRank));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(Kind::all_reduce, one(tensors), one(tensors), 1, 0, options.reduceOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(Kind::reduce, one(tensors), one(tensors), 1, static_cast<int>(options.rootRank),
                  options.reduceOp);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    check_rows(output, input);
    return launch(Kind::all_gather, input, output);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& input = one(inputs);
    if (root != getRank()) return launch(Kind::gather, input, {}, 1, root);
    return into_list(outputs.at(0), input,
                     [&](const at::Tensor& output) { return launch(Kind::gather, input, output, 1, root); });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor input = root == getRank() ? joined_rows(inputs.at(0), one(outputs)) : at::Tensor();
    return launch(Kind::scatter, input, one(outputs), getSize(), root);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_rows(input, output);
    return launch(Kind::reduce_scatter, input, output, getSize(), 0, options.reduceOp);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_sizes,
                        std::vector<std::int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    check_even(output, output_sizes, input, input_sizes);
    return launch(Kind::all_to_all, input, output, getSize());
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return launch(Kind::send, one(tensors), {}, 1, peer, {}, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return launch(Kind::receive, {}, one(tensors), 1, peer, {}, tag);
  }

 private:
  using Kind = ShmOperation::Kind;
  struct TensorOperation final : ShmOperation {
    at::Tensor kept_input, kept_output;
  };

  WorkPtr launch(Kind kind, const at::Tensor& input, const at::Tensor& output, int rows = 1, int root = 0,
                 const std::optional<c10d::ReduceOp>& op = {}, int tag = 0) {
    auto operation = std::make_shared<TensorOperation>();
    const at::Tensor& some = input.defined() ? input : output;
    for (const at::Tensor* tensor : {&input, &output})
      TORCH_CHECK(!tensor->defined() || (tensor->is_cpu() && tensor->is_contiguous()),
                  "shm moves dense and contiguous tensors on the CPU");
    TORCH_CHECK(root >= 0 && root < getSize(), "there is no rank ", root, " in a group of ", getSize());
    operation->kind = kind;
    operation->root = root;
    operation->tag = tag;
    operation->rows = static_cast<std::size_t>(rows);
    std::uint64_t hash = 1;
    const auto mix = [&hash](std::uint64_t value) {
      hash = (hash ^ value) * 0x9E3779B97F4A7C15 + (hash >> 29);
    };
    mix(operation->is_message() ? 0 : 1 + static_cast<std::uint64_t>(kind));
    if (some.defined()) {
      operation->kept_input = input;
      operation->kept_output = output;
      if (input.defined()) operation->input = static_cast<const char*>(input.const_data_ptr());
      if (output.defined()) operation->output = static_cast<char*>(output.data_ptr());
      operation->row = input.defined() ? input.nbytes() / operation->rows : output.nbytes();
      mix(operation->row);
      mix(static_cast<std::uint64_t>(some.scalar_type()));
    }
    if (op) {
      operation->fold = fold_of(some.scalar_type(), *op);
      TORCH_CHECK(operation->fold != nullptr, "shm cannot reduce ", dtype_name(some.scalar_type()), " so");
      if (some.is_floating_point() && getSize() > 1)
        operation->chunk = gloo_chunk_bytes(some.nbytes(), some.element_size(),
                                            static_cast<std::size_t>(getSize()), kind == Kind::reduce);
      mix(static_cast<std::uint64_t>(static_cast<c10d::ReduceOp::RedOpType>(*op)));
    }
    if (!operation->is_message()) mix(static_cast<std::uint64_t>(root));
    operation->signature = hash | 1;
    engine_->launch(operation);
    WorkPtr work = c10::make_intrusive<ShmWork>(engine_, std::move(operation));
    const bool has_sum = op && (kind != Kind::reduce || root == getRank());
    return has_sum ? averaged(*op, output, std::move(work)) : work;
  }

  const std::shared_ptr<ShmEngine> engine_;
};

}  // namespace lockstep::detail
