#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

/// The buckets in reduction order, each a list of parameter indices in memory order.
using BucketPlan = std::vector<std::vector<std::size_t>>;

/// Returns DdpOptions::bucket_cap_mb in bytes.
std::vector<std::size_t> bucket_caps(const DdpOptions& options);

/// Returns the bucket size limits of the first reduction in bytes; empty (no limit) unless Python applies its
/// limits from the first reduction on: when it searches for unused parameters or got a list of limits.
std::vector<std::size_t> caps_at_first(const DdpOptions& options);

/// Assigns the parameters in `order` to buckets, one sequence of buckets for each (dtype, device). A bucket
/// closes after the parameter that reaches its limit: `caps[k]` for the k-th bucket of its sequence, and
/// the last cap for all later ones. A sparse parameter gets a bucket of its own. Buckets are sorted by the
/// order in which they close; buckets that remain open follow, in the order in which their sequences began.
///
/// Contents, order within a bucket and limits match c10d::compute_bucket_assignment_by_size: with three or
/// more ranks, moving an element inside an all-reduce changes its bits.
BucketPlan assign_buckets(std::span<const ParameterEntry> parameters, const std::vector<std::size_t>& order,
                          const std::vector<std::size_t>& caps);

/// Returns the plan of the first iteration, with the parameters in registration order. Without `caps` there
/// is one bucket for each (dtype, device): the ready order is unknown, and a bucket launched in a wrong order
/// could pair with another collective of the model. With `caps` the buckets have these size limits, as in
/// Python if it searches for unused parameters, and so never rebuilds, or got a list of limits.
BucketPlan plan_by_registration(std::span<const ParameterEntry> parameters,
                                const std::vector<std::size_t>& caps = {});

/// Returns the parameters in the order of their last entry in `fired`, which lists a parameter for each hook
/// call; parameters that did not fire follow.
std::vector<std::size_t> completion_order(const std::vector<std::size_t>& fired, std::size_t parameters);

/// Returns whether `order` is a permutation of the indices below `parameters`.
bool is_order_of(const std::vector<std::size_t>& order, std::size_t parameters);

/// Returns rank 0's order on every rank. Collective and blocking.
template <Communicator Comm>
std::vector<std::size_t> order_of_rank_zero(Comm& comm, const std::vector<std::size_t>& mine,
                                            at::Device device) {
  const auto length = static_cast<std::int64_t>(mine.size());
  at::Tensor order = at::empty({length}, at::TensorOptions(at::kLong).device(device));
  at::Tensor host = at::empty({length}, at::kLong);
  std::copy(mine.begin(), mine.end(), host.mutable_data_ptr<std::int64_t>());
  order.copy_(host);
  comm.broadcast(order, 0).synchronize();
  host.copy_(order);
  const auto* first = const_data<std::int64_t>(host);
  return {first, first + length};
}

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/bucket_plan-inl.hpp"
#endif
