#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/hooks/low_rank_layout.hpp"
#include "lockstep/grad/detail/hooks/numpy_random.hpp"
#include "lockstep/grad/detail/hooks/orthogonalize.hpp"
#include "lockstep/grad/detail/hooks/phased_reduction.hpp"
#include "lockstep/grad/detail/hooks/power_sgd_memory.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep {

/// Options of PowerSgdHook, with the names and defaults of Python's PowerSGDState.
struct PowerSgdOptions {
  /// Number of columns of the factors. More columns approximate better and cost more communication and
  /// compute.
  std::int64_t matrix_approximation_rank = 1;
  /// Number of uncompressed reductions before compression starts. Any number is valid: state is kept by
  /// parameter, so the buckets of the first iteration do not matter.
  std::int64_t start_iteration = 1000;
  /// An n x m gradient with r = min(n, m, rank) is compressed if (n + m) * r * rate < n * m.
  double min_compression_rate = 2;
  /// Add the compression error of a step to the next step's gradient.
  bool use_error_feedback = true;
  /// Start from the last step's factor instead of a random one.
  bool warm_start = true;
  /// Added to the norm of a column before dividing by it.
  double orthogonalization_epsilon = 0;
  /// Seed of the random factors; the same on every rank.
  std::uint32_t seed = 0;
};

/// Compresses gradients to factors of low-rank matrices, M = P Q^T (Vogels et al., arXiv 1905.13727), with
/// Python's random numbers and order of operations. Tensors not worth compressing are sent whole, in one
/// all-reduce per bucket.
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

  /// Throws UsageError if an option is out of range.
  explicit PowerSgdHook(PowerSgdOptions options = {}) : options_(options), random_(options.seed) {
    const auto refuse = [](std::string_view what) {
      throw UsageError(detail::formatted("PowerSgdHook: {}", what));
    };
    if (options.matrix_approximation_rank < 1) refuse("matrix_approximation_rank must be 1 or more");
    if (options.start_iteration < 0) refuse("start_iteration must not be negative");
    if (!(options.min_compression_rate > 0)) refuse("min_compression_rate must be above 0");
    if (!(options.orthogonalization_epsilon >= 0)) refuse("orthogonalization_epsilon must not be negative");
  }

  template <Reducing Comm>
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
  [[nodiscard]] HookSettings settings() const {
    return {{"matrix_approximation_rank", detail::formatted("{}", options_.matrix_approximation_rank)},
            {"start_iteration", detail::formatted("{}", options_.start_iteration)},
            {"min_compression_rate", detail::formatted("{}", options_.min_compression_rate)},
            {"use_error_feedback", detail::formatted("{}", options_.use_error_feedback)},
            {"warm_start", detail::formatted("{}", options_.warm_start)},
            {"orthogonalization_epsilon", detail::formatted("{}", options_.orthogonalization_epsilon)},
            {"seed", detail::formatted("{}", options_.seed)}};
  }
  /// Returns the bytes of all elements of each bucket; once compression has started, of (n + m) r elements
  /// for each compressed tensor and of all elements of the others.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

  /// Returns "counters" (reductions so far, random numbers drawn, seed), and "error.i" and "q.i" for
  /// parameter i. Errors differ between ranks; the rest is equal.
  [[nodiscard]] HookState state() const {
    HookState state{{"counters", at::tensor({reductions_, static_cast<std::int64_t>(random_.drawn()),
                                             static_cast<std::int64_t>(random_.seed())})}};
    memory_.save(state);
    return state;
  }
  /// Throws CheckpointError if the state is another hook's, and then changes nothing. The state of another
  /// model is detected by the next reduction.
  void load_state(const HookState& state) {
    PowerSgdHook loaded(options_);
    bool counted = false;
    for (const auto& [name, tensor] : state) {
      if (name != "counters") {
        loaded.memory_.load(name, tensor);
        continue;
      }
      const at::Tensor counters = tensor.to(at::kCPU, at::kLong).contiguous();
      const auto* number = counters.const_data_ptr<std::int64_t>();
      constexpr std::int64_t limit = std::numeric_limits<std::uint32_t>::max();
      const bool sound = counters.numel() == 3 && number[0] >= 0 && number[1] >= 0 && number[1] <= limit &&
                         number[2] >= 0 && number[2] <= limit;
      if (!sound)
        throw CheckpointError(
            "the counters of a PowerSGD hook are three numbers of 32 bits at most: its state is damaged");
      loaded.reductions_ = number[0];
      loaded.random_ =
          detail::NumpyRandom(static_cast<std::uint32_t>(number[2]), static_cast<std::uint64_t>(number[1]));
      counted = true;
    }
    if (!counted)
      throw CheckpointError("the state of a PowerSGD hook has no counters: it was saved by another hook");
    loaded.wire_bytes_ = wire_bytes_;
    *this = std::move(loaded);
  }

  /// Returns the part of a state that is equal on every rank, for a run resumed with another number of ranks.
  [[nodiscard]] static HookState shared_state(HookState state) {
    std::erase_if(state, [](const auto& item) { return item.first.starts_with("error."); });
    return state;
  }

  void rollback() {
    if (!before_) return;
    reductions_ = before_->reductions;
    if (random_.drawn() != before_->drawn) random_ = detail::NumpyRandom(random_.seed(), before_->drawn);
    memory_.turn_back();
    before_.reset();
  }
  /// Discards only the layouts of the buckets; state is kept by parameter.
  void reset() { layouts_.clear(); }

 private:
  struct Before {
    std::size_t iteration;
    std::int64_t reductions;
    std::uint64_t drawn;
  };

  void begin(std::size_t iteration) {
    if (before_ && before_->iteration == iteration) return;
    before_ = Before{iteration, reductions_, random_.drawn()};
    memory_.settle();
    ++reductions_;
  }

  detail::LowRankLayout& layout_of(const GradientBucket& bucket) {
    if (bucket.index >= layouts_.size()) layouts_.resize(bucket.index + 1);
    detail::LowRankLayout& layout = layouts_[bucket.index];
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
  std::uint64_t wire_bytes_ = 0;
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
        detail::TwoTensors& error = hook->memory_.of(matrix.parameter).error;
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
        memory.error.turn();
      }
      if (!options.warm_start) continue;
      // A zero column would stay zero forever.
      const at::Tensor zero = detail::column_lengths(matrix.q).eq(0);
      memory.q.next({matrix.m, matrix.r}, gradient.options()).copy_(at::where(zero, used[i], matrix.q)[0]);
      memory.q.turn();
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

}  // namespace lockstep
