#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/detail/gloo_order.hpp"
#include "lockstep/comm/detail/host_work.hpp"
#include "lockstep/comm/detail/shm_engine.hpp"
#include "lockstep/detail/describe.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns how shared memory reduces a dtype, null for an operation or a dtype that Gloo refuses. See reduction_of.
inline Fold fold_of(at::ScalarType type, c10d::ReduceOp::RedOpType op) {
  const auto reduction = reduction_of(type, op);
  if (!reduction) return nullptr;
  const auto of = [reduction]<class Unsigned, class T>(Unsigned, T) {
    constexpr Fold folds[reductions] = {fold<Unsigned, std::plus<>>, fold<Unsigned, std::multiplies<>>,
                                        fold<T, LeastElement>, fold<T, GreatestElement>};
    return folds[*reduction];
  };
  const Fold bytes = of(std::uint8_t(), std::uint8_t());
  const std::pair<at::ScalarType, Fold> folds[] = {{at::kFloat, of(float(), float())},
                                                   {at::kDouble, of(double(), double())},
                                                   {at::kHalf, of(c10::Half(), c10::Half())},
                                                   {at::kBFloat16, of(c10::BFloat16(), c10::BFloat16())},
                                                   {at::kByte, bytes},
                                                   {at::kBool, bytes},
                                                   {at::kChar, of(std::uint8_t(), std::int8_t())},
                                                   {at::kInt, of(std::uint32_t(), std::int32_t())},
                                                   {at::kLong, of(std::uint64_t(), std::int64_t())}};
  for (const auto& [known, fold_of_type] : folds)
    if (known == type) return fold_of_type;
  return nullptr;
}

/// A HostBackend of the ranks of one host, in memory that they share. See ShmEngine. Sums have the bits of
/// ProcessGroupGloo.
class ShmBackend final : public HostBackend {
 public:
  ShmBackend(std::shared_ptr<ShmMemory> memory, int rank, bool spins)
      : HostBackend(rank, memory->ranks()),
        engine_(std::make_shared<ShmEngine>(std::move(memory), rank, spins)) {}

  const std::string getBackendName() const override { return "shm"; }
  void abort() override { engine_->abort(); }
  bool drain(std::chrono::steady_clock::time_point until) override { return engine_->drain(until); }
  bool leave(std::function<bool()>) override { return true; }

 private:
  WorkPtr launch(const Call& call) override {
    auto operation = std::make_shared<ShmOperation>();
    const at::Tensor& some = call.input.defined() ? call.input : call.output;
    operation->kind = call.kind;
    operation->root = call.root;
    operation->tag = call.tag;
    operation->rows = call.rows;
    operation->row = call.row;
    operation->output = call.to();  // first: it may copy a lazily cloned tensor
    operation->input = call.from();
    operation->tensors = std::pair(call.input, call.output);
    // Of the shapes only the bytes: the store compares the shapes, when it looks for calls that differ.
    std::uint64_t hash = 1;
    const auto mix = [&hash](std::uint64_t value) {
      hash = (hash ^ value) * 0x9E3779B97F4A7C15 + (hash >> 29);
    };
    mix(operation->is_message() ? 0 : 1 + static_cast<std::uint64_t>(call.kind));
    if (some.defined()) {
      mix(call.row);
      mix(static_cast<std::uint64_t>(some.scalar_type()));
    }
    if (call.op) {
      operation->fold = fold_of(some.scalar_type(), *call.op);
      TORCH_CHECK(operation->fold != nullptr, "shm cannot reduce ", dtype_name(some.scalar_type()), " so");
      if (some.is_floating_point() && getSize() > 1)
        operation->chunk = gloo_chunk_bytes(some.nbytes(), some.element_size(),
                                            static_cast<std::size_t>(getSize()), call.kind == Kind::reduce);
      mix(static_cast<std::uint64_t>(*call.op));
    }
    if (!operation->is_message())
      mix(static_cast<std::uint64_t>(call.root) << 8 | static_cast<std::uint64_t>(call.tag));
    operation->signature = hash | 1;
    engine_->launch(operation);
    return c10::make_intrusive<EngineWork<std::shared_ptr<ShmEngine>>>(engine_, std::move(operation));
  }

  const std::shared_ptr<ShmEngine> engine_;
};

}  // namespace lockstep::inline v0_1::detail
