#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// The result of reducing a sparse gradient: its sum over the ranks, or a failure flag.
struct SparseSum {
  at::Tensor sum;         // undefined if no rank has a gradient
  bool flagged = false;   // some rank has failed
  std::size_t bytes = 0;  // sent by this rank
};

/// Sums a [rows, ...] gradient over the ranks. `gradient` is sparse in its first dimension, or undefined if
/// this rank has none. `flag` reports to every rank that this one has failed. Collective and blocking;
/// `finish(work)` waits for a Work.
///
/// Adds the ranks' rows in rank order, as Gloo's sparse all-reduce does: bitwise equal to Python.
template <Gathering Comm, class Finish>
SparseSum sum_rows(Comm& comm, const at::Tensor& gradient, const at::Tensor& parameter, bool flag,
                   const Finish& finish) {
  SparseSum result;
  const at::Tensor mine = !flag && gradient.defined() ? gradient.coalesce() : at::Tensor();
  const std::int64_t rows = mine.defined() ? mine._nnz() : -1;
  const auto numbers = at::TensorOptions(at::kLong).device(parameter.device());
  at::Tensor counts = at::empty({comm.size()}, numbers);
  const auto gather = [&](const at::Tensor& output, const at::Tensor& input) {
    auto work = comm.all_gather(output, input);
    finish(work);
    result.bytes += input.nbytes();
  };
  gather(counts, at::full({1}, flag ? -2 : rows, numbers));
  counts = counts.cpu();
  const auto* count = counts.const_data_ptr<std::int64_t>();
  result.flagged = std::any_of(count, count + comm.size(), [](std::int64_t n) { return n == -2; });
  const std::int64_t most = *std::max_element(count, count + comm.size());
  if (result.flagged || most < 0) return result;

  auto sizes = parameter.sizes().vec();
  sizes[0] = most;
  at::Tensor own_indices = at::zeros({most}, numbers), own_values = at::zeros(sizes, parameter.options());
  if (rows > 0) {
    own_indices.narrow(0, 0, rows).copy_(mine._indices()[0]);
    own_values.narrow(0, 0, rows).copy_(mine._values());
  }
  sizes.insert(sizes.begin(), comm.size());
  at::Tensor indices = at::empty({comm.size(), most}, numbers),
             values = at::empty(sizes, parameter.options());
  gather(indices, own_indices);
  gather(values, own_values);
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::int64_t length = std::max<std::int64_t>(count[rank], 0);
    const at::Tensor share = at::sparse_coo_tensor(indices[rank].narrow(0, 0, length).unsqueeze(0),
                                                   values[rank].narrow(0, 0, length), parameter.sizes());
    if (!result.sum.defined())
      result.sum = share;
    else
      result.sum += share;
  }
  result.sum = result.sum.coalesce();
  return result;
}

}  // namespace lockstep::detail
