#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

/// A double-buffered tensor that keeps its value from before the last reduction. A new value is written into
/// `next()`, becomes current by `advance()`, and is reverted by `rollback()`.
class VersionedTensor {
 public:
  [[nodiscard]] const at::Tensor& now() const { return tensors_[now_]; }
  /// Returns memory of these sizes for the next value. Its contents are unspecified.
  at::Tensor& next(at::IntArrayRef sizes, const at::TensorOptions& options) {
    at::Tensor& tensor = tensors_[1 - now_];
    if (!tensor.defined() || tensor.sizes() != sizes || tensor.dtype() != options.dtype() ||
        tensor.device() != options.device())
      tensor = at::empty(sizes, options);
    return tensor;
  }
  void advance() {
    now_ = 1 - now_;
    advanced_ = true;
  }
  void commit() { advanced_ = false; }
  void rollback() {
    if (!advanced_) return;
    now_ = 1 - now_;
    advanced_ = false;
  }
  void load(at::Tensor tensor) {
    tensors_ = {std::move(tensor), at::Tensor()};
    now_ = 0;
    advanced_ = false;
  }
  /// Returns the current value, cast to the dtype and device of `options`; undefined if there is none. Throws
  /// CheckpointError if its sizes differ. `what` and `parameter` name the tensor in the error.
  at::Tensor& checked(std::string_view what, std::size_t parameter, at::IntArrayRef sizes,
                      const at::TensorOptions& options) {
    at::Tensor& tensor = tensors_[now_];
    if (!tensor.defined()) return tensor;
    if (tensor.sizes() != sizes)
      throw CheckpointError(detail::formatted(
          "the saved state of the PowerSGD hook is of another model or rank: its {} for parameter {} has {} "
          "elements, and {} are needed; load what was saved with the same model and options",
          what, parameter, tensor.numel(), c10::multiply_integers(sizes)));
    if (tensor.dtype() != options.dtype() || tensor.device() != options.device()) tensor = tensor.to(options);
    return tensor;
  }

 private:
  std::array<at::Tensor, 2> tensors_;
  std::size_t now_ = 0;
  bool advanced_ = false;
};

/// PowerSGD's state of a compressed parameter, viewed as n x m.
struct LowRankMemory {
  VersionedTensor error;  ///< [n, m]: this rank's compression error, added to its next gradient
  VersionedTensor q;      ///< [m, r]: the right factor, equal on every rank
};

class PowerSgdMemory {
 public:
  LowRankMemory& of(std::size_t parameter) { return memory_[parameter]; }

  void commit() {
    for (auto& [parameter, memory] : memory_) {
      memory.error.commit();
      memory.q.commit();
    }
  }
  void rollback() {
    for (auto& [parameter, memory] : memory_) {
      memory.error.rollback();
      memory.q.rollback();
    }
  }

  void save(HookState& state) const {
    for (const auto& [parameter, memory] : memory_) {
      if (memory.error.now().defined())
        state.emplace_back(detail::formatted("error.{}", parameter), memory.error.now().clone());
      if (memory.q.now().defined())
        state.emplace_back(detail::formatted("q.{}", parameter), memory.q.now().clone());
    }
  }
  void load(std::string_view name, const at::Tensor& tensor) {
    const std::size_t dot = name.find('.');
    const std::string_view kind = name.substr(0, dot);
    std::size_t parameter = 0;
    const char* end = name.data() + name.size();
    const auto parsed = dot == std::string_view::npos
                            ? std::from_chars_result{nullptr, std::errc()}
                            : std::from_chars(name.data() + dot + 1, end, parameter);
    const bool numbered = parsed.ptr == end && parsed.ec == std::errc();
    const bool matrix = tensor.defined() && tensor.dim() == 2 && tensor.numel() > 0;
    if (!numbered || !matrix || (kind != "error" && kind != "q"))
      throw CheckpointError(
          detail::formatted("the state of a PowerSGD hook has no entry '{}'{}: it was saved by another hook",
                            name, matrix ? "" : " of this shape"));
    LowRankMemory& memory = memory_[parameter];
    (kind == "q" ? memory.q : memory.error).load(tensor.clone());
  }
  /// Throws CheckpointError unless each factor has `rank` columns, or as many as its matrix allows.
  void check(std::int64_t rank) {
    for (auto& [parameter, memory] : memory_)
      if (const at::Tensor& error = memory.error.now(), &q = memory.q.now(); q.defined()) {
        const at::Tensor matrix = error.defined() ? error : q.t();  // without an error, of the fewest rows
        const std::int64_t n = matrix.size(0), m = matrix.size(1);
        memory.q.checked("factor", parameter, {m, std::min({n, m, rank})}, q.options());
      }
  }

 private:
  std::map<std::size_t, LowRankMemory> memory_;
};

/// Returns the Euclidean norms [b, 1, r] of the columns of `matrices` [b, n, r].
inline at::Tensor column_norms(const at::Tensor& matrices) {
  static constexpr std::array<std::int64_t, 1> rows{1};
  return at::linalg_vector_norm(matrices, 2, at::IntArrayRef(rows), /*keepdim=*/true);
}

/// Divides `columns` [b, n, 1] by `norms` + `epsilon`. With an epsilon of 0, columns of zeros stay zero.
inline void normalize(at::Tensor columns, const at::Tensor& norms, double epsilon) {
  columns.div_(epsilon == 0 ? norms.masked_fill(norms.eq(0), 1) : norms.add(epsilon));
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
  const at::Tensor limits = columns > 1 ? column_norms(matrices).mul_(rounding) : at::Tensor();
  for (std::int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    const at::Tensor norm = column_norms(column);
    normalize(column, norm, epsilon);
    if (i > 0) {
      const at::Tensor before = matrices.narrow(2, 0, i);
      at::Tensor again = column.sub(before.matmul(before.transpose(1, 2).matmul(column)));
      normalize(again, column_norms(again), 0);
      column.copy_(at::where(norm.le(limits.narrow(2, i, 1)), again, column));
    }
    if (i + 1 == columns) break;
    at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_(column.mul(rest).sum(1, /*keepdim=*/true).mul(column));
  }
}

/// Generates the numbers of numpy.random.RandomState(seed).randint(bound), from which Python's PowerSGD seeds
/// its random matrices: masked 32-bit outputs of the Mersenne twister, drawn until one is below the bound.
/// The seed and `drawn` are the whole state; copies are independent.
class NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed, std::uint64_t drawn = 0)
      : seed_(seed), drawn_(drawn), twister_(seed) {
    twister_.discard(drawn);
  }

  std::uint32_t randint(std::uint32_t bound) {
    std::uint32_t mask = bound - 1;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    for (;;) {
      ++drawn_;
      const auto value = static_cast<std::uint32_t>(twister_()) & mask;
      if (value < bound) return value;
    }
  }

  [[nodiscard]] std::uint32_t seed() const { return seed_; }
  [[nodiscard]] std::uint64_t drawn() const { return drawn_; }

 private:
  std::uint32_t seed_;
  std::uint64_t drawn_;
  std::mt19937 twister_;
};

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

/// The tensors that are all-reduced for a compressed bucket.
struct LowRankLayout {
  std::vector<std::size_t> parameters;
  std::vector<LowRankMatrix> matrices;                       ///< in the order of `grouped_by_shape`
  std::vector<std::pair<std::int64_t, std::int64_t>> whole;  ///< offset and length, uncompressed gradients
  at::Tensor ps, qs, rest;

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

/// Compresses an n x m matrix if (n + m) * r * min_rate < n * m, with r = min(n, m, rank), as Python does. A complex
/// gradient counts as a real one with twice as many columns.
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

}  // namespace detail

/// Options of PowerSgdHook, with the names and defaults of Python's PowerSGDState.
struct PowerSgdOptions {
  /// Number of columns of the factors.
  std::int64_t matrix_approximation_rank = 1;
  /// Number of uncompressed reductions before compression starts.
  std::int64_t start_iteration = 1000;
  /// An n x m gradient with r = min(n, m, rank) is compressed if (n + m) * r * rate < n * m.
  double min_compression_rate = 2;
  bool use_error_feedback = true;        ///< add the compression error of a step to the next gradient
  bool warm_start = true;                ///< start from the last step's factor instead of a random one
  double orthogonalization_epsilon = 0;  ///< added to the norm of a column before dividing by it
  std::uint32_t seed = 0;
};

/// Compresses gradients to factors of low-rank matrices, M = P Q^T (Vogels et al., arXiv 1905.13727), with Python's
/// random numbers and order of operations. Tensors not worth compressing are sent whole, in one all-reduce per bucket.
///
/// Differences from Python: a tensor that is not compressed has no error memory; a gradient that is zero on
/// all ranks stays zero (in Python, without an epsilon, it becomes NaN) and keeps its factor for the next
/// step; the surplus columns of the factors do not disturb a gradient of lower rank; state is kept by
/// parameter and survives a change of buckets.
///
/// Counterpart: powerSGD_hook.
class PowerSgdHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = false;

  explicit PowerSgdHook(PowerSgdOptions options = {}) : options_(options), random_(options.seed) {
    const auto refuse = [](std::string_view what) {
      throw UsageError(detail::formatted("PowerSgdHook: {}", what));
    };
    if (options.matrix_approximation_rank < 1) refuse("matrix_approximation_rank must be 1 or more");
    if (options.start_iteration < 0) refuse("start_iteration must not be negative");
    if (!(options.min_compression_rate > 0)) refuse("min_compression_rate must be above 0");
    if (!(options.orthogonalization_epsilon >= 0)) refuse("orthogonalization_epsilon must not be negative");
  }

  template <Communicator Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    begin(bucket.iteration);
    Factors<Comm> reduction(*this, comm, bucket);
    if (reductions_ > options_.start_iteration)
      reduction.start_compressed(layout_of(bucket));
    else
      reduction.start_plain();
    return reduction;
  }

  [[nodiscard]] std::string_view name() const { return "power_sgd"; }
  [[nodiscard]] NamedValues settings() const {
    return {{"matrix_approximation_rank", detail::formatted("{}", options_.matrix_approximation_rank)},
            {"start_iteration", detail::formatted("{}", options_.start_iteration)},
            {"min_compression_rate", detail::formatted("{}", options_.min_compression_rate)},
            {"use_error_feedback", detail::formatted("{}", options_.use_error_feedback)},
            {"warm_start", detail::formatted("{}", options_.warm_start)},
            {"orthogonalization_epsilon", detail::formatted("{}", options_.orthogonalization_epsilon)},
            {"seed", detail::formatted("{}", options_.seed)}};
  }
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

  /// Returns "counters" (reductions so far, random numbers drawn, seed), and "error.i" and "q.i" for
  /// parameter i. Errors differ between ranks; the rest is equal.
  [[nodiscard]] HookState state() const {
    HookState state{{"counters", at::tensor({reductions_, static_cast<std::int64_t>(random_.drawn()),
                                             static_cast<std::int64_t>(random_.seed())})}};
    memory_.save(state);
    return state;
  }
  /// Throws CheckpointError if the state is another hook's or of another rank, and then changes nothing. The
  /// state of another model is detected by the next reduction.
  void load_state(const HookState& state) {
    PowerSgdHook loaded(options_);
    bool counted = false;
    for (const auto& [name, tensor] : state) {
      if (name != "counters") {
        loaded.memory_.load(name, tensor);
        continue;
      }
      const bool numbers = tensor.defined() && tensor.scalar_type() == at::kLong && tensor.numel() == 3;
      const at::Tensor counters = numbers ? tensor.to(at::kCPU).contiguous() : at::zeros({3}, at::kLong);
      const auto* number = detail::const_data<std::int64_t>(counters);
      const bool sound = numbers && std::all_of(number, number + 3, [](std::int64_t each) {
                           return each >= 0 && each <= std::numeric_limits<std::uint32_t>::max();
                         });
      // A reduction draws for each compressed bucket, in 1.07 attempts on average: discarding 2^32 takes long.
      const auto buckets = state.size() > 1 ? static_cast<std::int64_t>(state.size()) : 1 << 16;
      if (!sound || number[1] > std::min<std::int64_t>(64 + 2 * number[0] * buckets, 1 << 30))
        throw CheckpointError(
            "the counters of a PowerSGD hook are three numbers of 32 bits at most: its state is damaged");
      loaded.reductions_ = number[0];
      loaded.random_ =
          detail::NumpyRandom(static_cast<std::uint32_t>(number[2]), static_cast<std::uint64_t>(number[1]));
      counted = true;
    }
    if (!counted)
      throw CheckpointError("the state of a PowerSGD hook has no counters: it was saved by another hook");
    loaded.memory_.check(options_.matrix_approximation_rank);
    loaded.wire_bytes_ = wire_bytes_;
    *this = std::move(loaded);
  }

  [[nodiscard]] static HookState shared_state(HookState state) {
    std::erase_if(state, [](const auto& item) { return item.first.starts_with("error."); });
    return state;
  }

  void rollback() {
    if (!before_) return;
    reductions_ = before_->reductions;
    if (random_.drawn() != before_->drawn) random_ = detail::NumpyRandom(random_.seed(), before_->drawn);
    memory_.rollback();
    before_.reset();
  }
  /// Discards only the layouts of the buckets; state is kept by parameter.
  void reset() { layouts_.clear(); }

 private:
  struct Before {
    std::int64_t iteration;
    std::int64_t reductions;
    std::uint64_t drawn;
  };

  void begin(std::int64_t iteration) {
    if (before_ && before_->iteration == iteration) return;
    before_ = Before{iteration, reductions_, random_.drawn()};
    memory_.commit();
    ++reductions_;
  }

  detail::LowRankLayout& layout_of(const GradientBucket& bucket) {
    const auto index = static_cast<std::size_t>(bucket.index);
    if (index >= layouts_.size()) layouts_.resize(index + 1);
    detail::LowRankLayout& layout = layouts_[index];
    if (!layout.fits(bucket))
      layout =
          detail::low_rank_layout(bucket, options_.matrix_approximation_rank, options_.min_compression_rate);
    return layout;
  }

  /// Fills the right factors, orthonormalized: the last reduction's, or random ones if there are none.
  void prepare_factors(detail::LowRankLayout& layout) {
    std::optional<at::Generator> generator;
    for (detail::LowRankMatrix& matrix : layout.matrices) {
      const at::Tensor& last =
          memory_.of(matrix.parameter)
              .q.checked("factor", matrix.parameter, {matrix.m, matrix.r}, layout.qs.options());
      if (options_.warm_start && last.defined()) {
        matrix.q.copy_(last.unsqueeze(0));
      } else {
        if (!generator) generator = at::detail::createCPUGenerator(random_.randint(1'000'000'000));
        matrix.q.copy_(at::randn(matrix.q.sizes(), *generator, layout.qs.options().device(at::kCPU)));
      }
      detail::orthogonalize(matrix.q, options_.orthogonalization_epsilon);
    }
  }

  template <class Comm>
  struct Factors;

  PowerSgdOptions options_;
  detail::NumpyRandom random_;
  std::int64_t reductions_ = 0;  // started, including this one
  std::optional<Before> before_;
  detail::PowerSgdMemory memory_;
  std::deque<detail::LowRankLayout> layouts_;  // by bucket; Reductions point to them
  std::int64_t wire_bytes_ = 0;
};

/// The reduction of one bucket. The start sends the uncompressed tensors and the left factors, the wait the
/// right factors.
template <class Comm>
struct PowerSgdHook::Factors : detail::PhasedReduction<Factors<Comm>> {
  Factors(PowerSgdHook& hook, Comm& comm, const GradientBucket& bucket)
      : hook(&hook), comm(&comm), flat(bucket.flat) {}

  void start_plain() {
    flat.div_(comm->size());
    whole = send(flat);
  }

  void start_compressed(detail::LowRankLayout& of_bucket) {
    layout = &of_bucket;
    if (hook->options_.use_error_feedback)
      for (const detail::LowRankMatrix& matrix : layout->matrices) {
        at::Tensor gradient = matrix.in(flat)[0];
        detail::VersionedTensor& error = hook->memory_.of(matrix.parameter).error;
        const at::Tensor& lost =
            error.checked("error", matrix.parameter, {matrix.n, matrix.m}, gradient.options());
        if (lost.defined()) gradient.add_(lost);
        error.next(gradient.sizes(), gradient.options()).copy_(gradient);
      }
    std::int64_t at = 0;
    for (const auto& [offset, length] : layout->whole) {
      layout->rest.narrow(0, at, length).copy_(flat.narrow(0, offset, length));
      at += length;
    }
    if (at > 0) whole = send(layout->rest);
    if (layout->matrices.empty()) return;
    hook->prepare_factors(*layout);
    for (detail::LowRankMatrix& matrix : layout->matrices) at::bmm_out(matrix.p, matrix.in(flat), matrix.q);
    left = send(layout->ps);
  }

  template <class Wait>
  void finish(Wait&& wait) {
    if (whole) wait(*whole);
    if (!layout) return;
    std::int64_t at = 0;
    layout->rest.div_(comm->size());
    for (const auto& [offset, length] : layout->whole) {
      flat.narrow(0, offset, length).copy_(layout->rest.narrow(0, at, length));
      at += length;
    }
    if (!left) return;
    wait(*left);
    const PowerSgdOptions& options = hook->options_;
    std::vector<at::Tensor> used;  // the right factors before this reduction
    for (detail::LowRankMatrix& matrix : layout->matrices) {
      detail::orthogonalize(matrix.p, options.orthogonalization_epsilon);
      if (options.warm_start) used.push_back(matrix.q.clone());
      at::bmm_out(matrix.q, matrix.in(flat).transpose(1, 2), matrix.p);
    }
    auto right = send(layout->qs);
    wait(right);
    layout->qs.div_(comm->size());
    for (std::size_t i = 0; i < layout->matrices.size(); ++i) {
      detail::LowRankMatrix& matrix = layout->matrices[i];
      at::Tensor gradient = matrix.in(flat);
      at::bmm_out(gradient, matrix.p, matrix.q.transpose(1, 2));
      detail::LowRankMemory& memory = hook->memory_.of(matrix.parameter);
      if (options.use_error_feedback) {
        memory.error.next({matrix.n, matrix.m}, gradient.options()).sub_(gradient[0]);
        memory.error.advance();
      }
      if (!options.warm_start) continue;
      // A zero column would stay zero forever.
      const at::Tensor zero = detail::column_norms(matrix.q).eq(0);
      memory.q.next({matrix.m, matrix.r}, gradient.options()).copy_(at::where(zero, used[i], matrix.q)[0]);
      memory.q.advance();
    }
  }

  typename Comm::Work send(const at::Tensor& tensor) {
    hook->wire_bytes_ += detail::sent_bytes(*comm, tensor);
    return comm->all_reduce(tensor, ReduceOp::sum);
  }

  PowerSgdHook* hook;
  Comm* comm;
  at::Tensor flat;
  detail::LowRankLayout* layout = nullptr;
  std::optional<typename Comm::Work> whole, left;
};

}  // namespace lockstep::inline v0_1
