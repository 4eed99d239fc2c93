#pragma once

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <torch/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::inline v0_1::detail {

inline c10::impl::GenericDict new_state_dict() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

inline at::Tensor saved_numbers(const std::vector<std::size_t>& numbers) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor;
}

/// What decides the last bits of a result beside the program and its ranks.
inline std::string arithmetic() {
  return formatted("{} intra-op threads per rank, CPU capability {}, LibTorch {}", at::get_num_threads(),
                   at::get_cpu_capability(), TORCH_VERSION);
}

/// Returns the part of a state that a process alone has, too.
inline c10::impl::GenericDict common_state() {
  c10::impl::GenericDict state = new_state_dict();
  state.insert("arithmetic", arithmetic());
  return state;
}
/// Warns, once, of a state of a run with another arithmetic. Returns whether it is None or that of a process alone.
LOCKSTEP_PROCESS_WIDE inline bool warn_of_arithmetic(const c10::IValue& state, const Log& log) {
  if (!state.isGenericDict()) return state.isNone();
  const auto dict = state.toGenericDict();
  const auto saved = dict.find("arithmetic");
  if (saved == dict.end() || !saved->value().isString()) return false;
  static std::string& told = *new std::string();
  const std::string before = printable(saved->value().toStringRef()), now = arithmetic();
  if (before != now && std::exchange(told, before) != before)
    log.warning("what is resumed ran with {}, and this run has {}: it ends at other bits", before, now);
  return dict.size() == 1;
}

/// A checked value of DistributedDataParallel::state, which may come from an untrusted file.
struct SavedReducer {
  struct Rank {
    std::vector<std::size_t> expected;  // calls of each parameter's hook in a backward; empty if not known
    std::optional<HookState> hook;
  };

  /// Throws CheckpointError unless the value fits a model of `parameters` parameters that require grad.
  SavedReducer(const c10::IValue& value, std::size_t parameters) {
    const c10::IValue number = entry(value, "backwards"), is_rebuilt = entry(value, "rebuilt"),
                      list = entry(value, "ranks");
    require(number.isInt() && number.toInt() >= 0 && is_rebuilt.isBool() && list.isList());
    backwards = static_cast<std::size_t>(number.toInt());
    order = numbers(entry(value, "order"));
    rebuilt = is_rebuilt.toBool();
    if (!order.empty() && !is_order_of(order, parameters))
      throw CheckpointError(detail::formatted(
          "the bucket order has {} parameters and the model trains {}: load the order of the same model",
          order.size(), parameters));
    require(!rebuilt || !order.empty());
    for (const c10::IValue& part : list.toListRef()) {
      Rank& rank = ranks.emplace_back();
      rank.expected = numbers(entry(part, "expected"));
      require(rank.expected.empty() || rank.expected.size() == parameters);
      const auto dict = part.toGenericDict();
      if (!dict.contains("hook")) continue;
      const c10::IValue hook = dict.at("hook");
      require(hook.isGenericDict());
      rank.hook.emplace();
      for (const auto& item : hook.toGenericDict()) {
        require(item.key().isString() && item.value().isTensor());
        rank.hook->emplace_back(item.key().toStringRef(), item.value().toTensor());
      }
    }
    require(!ranks.empty());
  }

  std::size_t backwards = 0;
  std::vector<std::size_t> order;  // the ready order; empty if not known yet
  bool rebuilt = false;            // the buckets have that order
  std::vector<Rank> ranks;

 private:
  static void require(bool good) {
    if (!good)
      throw CheckpointError(
          "the state of DistributedDataParallel is damaged, or another value: load one of ddp.state()");
  }
  static c10::IValue entry(const c10::IValue& dict, const char* key) {
    require(dict.isGenericDict() && dict.toGenericDict().contains(key));
    return dict.toGenericDict().at(key);
  }
  static std::vector<std::size_t> numbers(const c10::IValue& value) {
    require(value.isTensor() && value.toTensor().scalar_type() == at::kLong && value.toTensor().dim() == 1);
    const at::Tensor tensor = value.toTensor().cpu().contiguous();
    const auto* first = const_data<std::int64_t>(tensor);
    require(std::all_of(first, first + tensor.numel(), [](std::int64_t number) {
      return number >= 0 && number <= std::numeric_limits<int>::max();
    }));
    return {first, first + tensor.numel()};
  }
};

}  // namespace lockstep::inline v0_1::detail
