#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// Returns the parameters in the order of their last entry in `fired`, which lists a parameter for each hook
/// call; parameters that did not fire follow.
inline std::vector<std::size_t> completion_order(const std::vector<std::size_t>& fired,
                                                 std::size_t parameters) {
  std::vector<std::size_t> order;
  std::vector<char> placed(parameters);
  for (std::size_t k = fired.size(); k-- > 0;)
    if (!std::exchange(placed[fired[k]], true)) order.push_back(fired[k]);
  std::reverse(order.begin(), order.end());
  for (std::size_t i = 0; i < placed.size(); ++i)
    if (!placed[i]) order.push_back(i);
  // A rank without data has no order. Reverse registration order is the best guess.
  if (fired.empty()) std::reverse(order.begin(), order.end());
  return order;
}

/// Returns whether `order` is a permutation of the indices below `parameters`.
inline bool is_order_of(const std::vector<std::size_t>& order, std::size_t parameters) {
  std::vector<char> named(parameters);
  return order.size() == parameters && std::all_of(order.begin(), order.end(), [&](std::size_t index) {
           return index < parameters && !std::exchange(named[index], true);
         });
}

/// Returns rank 0's order on every rank. Collective and blocking.
template <Reducing Comm>
std::vector<std::size_t> order_of_rank_zero(Comm& comm, const std::vector<std::size_t>& mine,
                                            at::Device device) {
  const auto length = static_cast<std::int64_t>(mine.size());
  at::Tensor order = at::empty({length}, at::TensorOptions(at::kLong).device(device));
  at::Tensor host = at::empty({length}, at::kLong);
  std::copy(mine.begin(), mine.end(), host.mutable_data_ptr<std::int64_t>());
  order.copy_(host);
  comm.broadcast(order, 0).synchronize();
  host.copy_(order);
  const auto* first = host.const_data_ptr<std::int64_t>();
  return {first, first + length};
}

}  // namespace lockstep::detail
