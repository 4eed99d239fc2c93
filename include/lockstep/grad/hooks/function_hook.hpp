#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/comm/detail/dtype_name.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/hooks/counting_comm.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/hooks/no_op_hook.hpp"

namespace lockstep {

/// What a hook function has returned, on its way into the bucket.
class ReturnedAverage {
 public:
  ReturnedAverage(std::string_view name, const GradientBucket& bucket, at::Tensor average)
      : name_(name), bucket_(&bucket), average_(std::move(average)) {}

  /// Throws GradientError for another shape, dtype or device than the bucket's. Not earlier: by now every
  /// rank has begun all collectives of this reduction, so none is left waiting for one.
  void wait() const {
    const at::Tensor& flat = bucket_->flat;
    if (!average_.defined() || average_.sizes() != flat.sizes() ||
        average_.scalar_type() != flat.scalar_type() || average_.device() != flat.device())
      throw GradientError(fmt::format(
          "the communication hook '{}' returned {} for bucket {} of {}, which is {}; return the average in "
          "the bucket's shape and dtype, or write it into bucket.flat and return nothing",
          name_, average_.defined() ? described(average_) : "an undefined tensor", bucket_->index + 1,
          bucket_->count, described(flat)));
    if (!average_.is_same(flat)) flat.copy_(average_);
  }
  void synchronize(std::chrono::milliseconds) const { wait(); }

 private:
  /// "[4, 3] float32 on cpu"
  static std::string described(const at::Tensor& tensor) {
    std::string sizes;
    for (const std::int64_t size : tensor.sizes())
      sizes += fmt::format("{}{}", sizes.empty() ? "" : ", ", size);
    return fmt::format("[{}] {} on {}", sizes, detail::dtype_name(tensor.scalar_type()),
                       tensor.device().str());
  }

  std::string_view name_;
  const GradientBucket* bucket_;
  at::Tensor average_;
};

/// A hook made of a function, see `hook_of`.
template <class Function>
class FunctionHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;

  explicit FunctionHook(Function function, std::string name = "function")
      : function_(std::move(function)), name_(std::move(name)) {}

  template <Communicator Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    if constexpr (std::invocable<Function&, detail::CountingComm<Comm>&, const GradientBucket&>) {
      detail::CountingComm<Comm> counting(comm, wire_bytes_);
      return begin(counting, bucket);
    } else {
      static_assert(std::invocable<Function&, Comm&, const GradientBucket&>,
                    "lockstep: a hook function takes (auto& comm, const GradientBucket& bucket)");
      return begin(comm, bucket);
    }
  }

  [[nodiscard]] std::string_view name() const { return name_; }
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

  /// The function object itself.
  [[nodiscard]] Function& function() { return function_; }

  [[nodiscard]] HookState state() const requires StatefulHook<Function> { return function_.state(); }
  void load_state(const HookState& state) requires StatefulHook<Function> { function_.load_state(state); }
  void rollback() requires StatefulHook<Function> { function_.rollback(); }
  void reset() requires StatefulHook<Function> { function_.reset(); }
  [[nodiscard]] static HookState shared_state(HookState state) requires requires {
    Function::shared_state(std::move(state));
  }
  { return Function::shared_state(std::move(state)); }

 private:
  template <class Comm>
  auto begin(Comm& comm, const GradientBucket& bucket) {
    using Result = std::invoke_result_t<Function&, Comm&, const GradientBucket&>;
    if constexpr (std::is_void_v<Result>) {
      function_(comm, bucket);
      return FinishedReduction{};
    } else if constexpr (Reduction<Result>) {
      return function_(comm, bucket);
    } else {
      static_assert(
          std::convertible_to<Result, at::Tensor>,
          "lockstep: a hook function returns the average as a tensor, a Work to wait for, or nothing");
      return ReturnedAverage(name_, bucket, function_(comm, bucket));
    }
  }

  Function function_;
  std::string name_;
  std::uint64_t wire_bytes_ = 0;
};

/// A communication hook of your own: `function(auto& comm, const GradientBucket& bucket)` returns the average
/// over the ranks as a tensor like `bucket.flat`, or writes it there and returns nothing, or returns a Work
/// (or another Reduction) after which it lies there. Gradients come undivided, as in Python. It is called for
/// each bucket as soon as that is full; what it throws itself, it must throw on every rank.
///
///     auto hook = hook_of([](auto& comm, const GradientBucket& bucket) {
///       bucket.flat.div_(comm.size());
///       return comm.all_reduce(bucket.flat);
///     });
///
/// The communicator it sees is a CountingComm, for this call alone. A function that takes one by its own type
/// (GlooComm&) gets that one, and its bytes are not counted. A function object that models StatefulHook stays
/// one. A hook whose collectives come in phases is better a type of its own that models CommunicationHook.
template <class Function>
[[nodiscard]] FunctionHook<Function> hook_of(Function function, std::string name = "function") {
  return FunctionHook<Function>(std::move(function), std::move(name));
}

}  // namespace lockstep
