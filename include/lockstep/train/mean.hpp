#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep {

/// A mean that is not divided yet: the sum over some samples (one element) and how many they were, or what
/// they weigh. Ranks and batches of unequal size add up to the exact mean, which two means would not.
struct Mean {
  /// `sum` takes part in autograd where it is a loss.
  template <class Number>
  requires std::is_arithmetic_v<Number> Mean(at::Tensor sum, Number count)
      : sum(std::move(sum)), count(static_cast<double>(count)) {}

  at::Tensor sum;
  double count;
};

/// The samples of a batch: the length of its `data`, of itself where it is a tensor, or its `size()`.
template <class Batch>
concept Countable = requires(const Batch& batch) {
  batch.data.size(0);
}
|| std::convertible_to<const Batch&, const at::Tensor&> || requires(const Batch& batch) {
  batch.size();
};

template <Countable Batch>
std::int64_t samples_in(const Batch& batch) {
  if constexpr (requires { batch.data.size(0); })
    return batch.data.size(0);
  else if constexpr (std::convertible_to<const Batch&, const at::Tensor&>)
    return static_cast<const at::Tensor&>(batch).size(0);
  else
    return static_cast<std::int64_t>(batch.size());
}

namespace detail {

// The value of a one-element tensor. On a CPU it is read where it lies: no operator runs.
inline double host_value(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.numel() == 1) {
    switch (tensor.scalar_type()) {
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      case at::kFloat:
        return static_cast<double>(*tensor.const_data_ptr<float>());
      case at::kLong:
        return static_cast<double>(*tensor.const_data_ptr<std::int64_t>());
      default:
        break;
    }
  }
  return tensor.item<double>();
}

}  // namespace detail

/// What a sum and a count come to, on the host.
struct Total {
  double sum = 0;
  double count = 0;

  Total& operator+=(const Total& other) {
    sum += other.sum;
    count += other.count;
    return *this;
  }
  /// NaN where nothing was counted.
  [[nodiscard]] double mean() const { return sum / count; }
};

/// Adds means up without waiting for a device at each of them: their values are read when `total()` asks, or
/// when `capacity` of them are pending.
class MeanMeter {
 public:
  explicit MeanMeter(std::size_t capacity = 256) { pending_.reserve(capacity); }

  /// `value` is one element, multiplied by `factor` where it is a mean over `factor` samples already. `step`
  /// is what `first_not_finite()` calls it.
  void add(const at::Tensor& value, double factor, double count, std::int64_t step = 0) {
    if (pending_.size() == pending_.capacity()) read();
    // Without the graph, which holds every activation of the step; unlike detach() this is no operator.
    pending_.push_back({value.requires_grad() ? value.variable_data() : value, factor, count, step});
  }
  void add(const Mean& mean) { add(mean.sum, 1, mean.count); }
  void add(const Total& total) { total_ += total; }

  /// Of this rank.
  [[nodiscard]] const Total& total() {
    read();
    return total_;
  }

  /// The step of the first value that was NaN or infinite, of this rank.
  [[nodiscard]] std::optional<std::int64_t> first_not_finite() {
    read();
    return first_not_finite_;
  }

 private:
  struct Pending {
    at::Tensor value;
    double factor, count;
    std::int64_t step;
  };

  void read() {
    for (const auto& [value, factor, count, step] : pending_) {
      if (count == 0) continue;
      const double number = detail::host_value(value);
      if (!std::isfinite(number) && !first_not_finite_) first_not_finite_ = step;
      total_ += {number * factor, count};
    }
    pending_.clear();
  }

  Total total_;
  std::optional<std::int64_t> first_not_finite_;
  std::vector<Pending> pending_;
};

}  // namespace lockstep
