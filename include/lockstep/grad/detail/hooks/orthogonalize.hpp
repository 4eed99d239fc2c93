#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>

namespace lockstep::detail {

/// Returns the Euclidean norms [b, 1, r] of the columns of `matrices` [b, n, r].
inline at::Tensor column_lengths(const at::Tensor& matrices) {
  static constexpr std::array<std::int64_t, 1> rows{1};
  return at::linalg_vector_norm(matrices, 2, at::IntArrayRef(rows), /*keepdim=*/true);
}

/// Divides `columns` [b, n, 1] by `lengths` + `epsilon`. With an epsilon of 0, columns of zeros stay zero.
inline void normalize(at::Tensor columns, const at::Tensor& lengths, double epsilon) {
  columns.div_(epsilon == 0 ? lengths.masked_fill(lengths.eq(0), 1) : lengths.add(epsilon));
}

/// Orthonormalizes the columns of `matrices` [b, n, r], r <= n, in place: by Gram-Schmidt for up to two
/// columns and for half precision, else by QR. Bitwise equal to Python's PowerSGD, with two exceptions.
/// `epsilon` is added to the column norms.
///
/// First, without an epsilon a column of zeros stays zero instead of becoming NaN. Second, if columns are
/// linearly dependent, Gram-Schmidt leaves only rounding errors of a column, far from orthogonal to the
/// columns before it: that column is orthogonalized again.
inline void orthogonalize(at::Tensor matrices, double epsilon) {
  const std::int64_t columns = matrices.size(2);
  const at::ScalarType type = matrices.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  if (columns > 2 && !half) {
    at::Tensor triangle = at::empty({matrices.size(0), columns, columns}, matrices.options());
    at::linalg_qr_out(matrices, triangle, matrices);
    return;
  }
  const double rounding = half ? 1e-2 : type == at::kDouble ? 1e-13 : 1e-4;  // relative to the initial norm
  const at::Tensor limits = columns > 1 ? column_lengths(matrices).mul_(rounding) : at::Tensor();
  for (std::int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    const at::Tensor length = column_lengths(column);
    normalize(column, length, epsilon);
    if (i > 0) {
      const at::Tensor before = matrices.narrow(2, 0, i);
      at::Tensor again = column.sub(before.matmul(before.transpose(1, 2).matmul(column)));
      normalize(again, column_lengths(again), 0);
      column.copy_(at::where(length.le(limits.narrow(2, i, 1)), again, column));
    }
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_(column.mul(rest).sum(1, /*keepdim=*/true).mul(column));
  }
}

}  // namespace lockstep::detail
