#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::detail {

/// A compressed gradient of a bucket as an n x m matrix (its first dimension by all others), with views for
/// its factors `p` [1, n, r] and `q` [1, m, r].
struct LowRankMatrix {
  std::size_t parameter;
  std::int64_t offset, n, m, r;
  at::Tensor p, q;

  /// Returns the matrix as a view of the bucket's memory, [1, n, m].
  [[nodiscard]] at::Tensor in(const at::Tensor& flat) const {
    return flat.narrow(0, offset, n * m).view({1, n, m});
  }
};

/// The tensors that are all-reduced for a compressed bucket: all left factors in one tensor, all right
/// factors in another, and the uncompressed gradients in a third.
struct LowRankLayout {
  std::vector<std::size_t> parameters;
  std::vector<LowRankMatrix> matrices;                       ///< in the order of `grouped_by_shape`
  std::vector<std::pair<std::int64_t, std::int64_t>> whole;  ///< offset and length, uncompressed gradients
  at::Tensor ps, qs, rest;

  /// Returns whether the layout was built for this bucket.
  [[nodiscard]] bool fits(const GradientBucket& bucket) const {
    return ps.defined() && parameters == bucket.parameters && ps.dtype() == bucket.flat.dtype() &&
           ps.device() == bucket.flat.device();
  }
};

/// Returns the matrices grouped by shape: shapes in the order of their first matrix, and the matrices of a
/// shape in bucket order. Python's hook draws its random factors and orders the factors in its all-reduces
/// this way, whether or not it batches tensors of equal shape.
inline std::vector<LowRankMatrix> grouped_by_shape(const std::vector<LowRankMatrix>& matrices) {
  std::vector<LowRankMatrix> grouped;
  grouped.reserve(matrices.size());
  for (std::size_t first = 0; first < matrices.size(); ++first) {
    const auto same_shape = [&](const LowRankMatrix& other) {
      return other.n == matrices[first].n && other.m == matrices[first].m;
    };
    if (std::any_of(grouped.begin(), grouped.end(), same_shape)) continue;
    std::copy_if(matrices.begin(), matrices.end(), std::back_inserter(grouped), same_shape);
  }
  return grouped;
}

/// Builds the layout of a bucket by Python's criterion: an n x m matrix is compressed if
/// (n + m) * r * min_rate < n * m, with r = min(n, m, rank). A complex gradient counts as a real one
/// with twice as many columns.
inline LowRankLayout low_rank_layout(const GradientBucket& bucket, std::int64_t rank, double min_rate) {
  LowRankLayout layout{bucket.parameters, {}, {}, {}, {}, {}};
  std::int64_t offset = 0, p = 0, q = 0, rest = 0;
  for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
    const at::Tensor& gradient = bucket.gradients[i];
    const std::int64_t length = gradient.numel() * (gradient.is_complex() ? 2 : 1);
    if (length == 0) continue;
    const std::int64_t n = gradient.dim() > 0 ? gradient.size(0) : 1, m = length / n;
    const std::int64_t r = std::min({n, m, rank});
    if (static_cast<double>((n + m) * r) * min_rate < static_cast<double>(n * m)) {
      layout.matrices.push_back({bucket.parameters[i], offset, n, m, r, {}, {}});
      p += n * r;
      q += m * r;
    } else {
      layout.whole.emplace_back(offset, length);
      rest += length;
    }
    offset += length;
  }
  layout.matrices = grouped_by_shape(layout.matrices);
  const auto options = bucket.flat.options().requires_grad(false);
  layout.ps = at::empty({p}, options);
  layout.qs = at::empty({q}, options);
  layout.rest = at::empty({rest}, options);
  p = q = 0;
  for (LowRankMatrix& matrix : layout.matrices) {
    matrix.p = layout.ps.narrow(0, p, matrix.n * matrix.r).view({1, matrix.n, matrix.r});
    matrix.q = layout.qs.narrow(0, q, matrix.m * matrix.r).view({1, matrix.m, matrix.r});
    p += matrix.n * matrix.r;
    q += matrix.m * matrix.r;
  }
  return layout;
}

}  // namespace lockstep::detail
