#pragma once

#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/low_precision_parameters.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/detail/reducer.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// The Reducer of a single process, whose members have the contracts of Reducer. Reduces nothing. Registers
/// hooks only for low-precision parameters, because a bare `loss.backward()` must also end their step.
class LocalReducer {
 public:
  template <class Hook>
  LocalReducer(ParameterTable& table, LocalComm&, Hook&&, const DdpOptions&,
               LowPrecisionParameters* low_precision)
      : table_(table), low_precision_(low_precision) {}
  LocalReducer(const LocalReducer&) = delete;
  LocalReducer& operator=(const LocalReducer&) = delete;

  void hook_low_precision_gradients() {
    if (!hooks_.empty()) return;
    for (const ParameterEntry& parameter : table_.trained)
      hooks_.emplace_back(parameter.tensor, OnGradient{this});
  }

  template <class List>
  void check_model(at::ArrayRef<at::Tensor>, List&&) {}

  template <class Run>
  void backward(const Contribution& contribution, Run&& run_backward) {
    if (contribution.no_data && !contribution.count) return;  // no other rank to take part with
    inside_backward_ = true;
    try {
      run_backward();
    } catch (...) {
      inside_backward_ = false;
      if (no_sync_depth == 0) abandon();
      throw;
    }
    inside_backward_ = false;
    if (contribution.count) count_ += *contribution.count;
    if (no_sync_depth > 0) return;
    if (low_precision_) low_precision_->end_step();
    if (contribution.count) divide_by_count();
  }
  void fail_backward(const std::exception_ptr&, bool /*counted*/) noexcept { abandon(); }
  void forget() { count_ = 0; }
  void forward_begins() {}
  void rollback() {}
  void settle() {}
  [[nodiscard]] bool checks_late() const { return false; }

  [[nodiscard]] BucketPlan plan() const { return {}; }
  [[nodiscard]] std::vector<std::size_t> bucket_order() const { return {}; }
  void set_bucket_order(const std::vector<std::size_t>&) {}
  void record_completions(bool) {}
  [[nodiscard]] DdpReport report() const { return {}; }
  [[nodiscard]] double total_count() const { return total_count_; }
  [[nodiscard]] double count_so_far() const { return count_; }
  /// Requires that parameter i's gradient held an average before the backward.
  [[nodiscard]] bool has_gradient(std::size_t i) const {
    return table_.trained[i].version() != table_.trained[i].reduced;
  }

  int no_sync_depth = 0;

 private:
  struct OnGradient {
    LocalReducer* self;
    void operator()() const { self->on_gradient(); }
  };

  void on_gradient() {
    const std::lock_guard lock(mutex_);  // the autograd engine runs one thread for each device
    if (inside_backward_ || no_sync_depth > 0 || std::exchange(waits_, true)) return;
    at_end_of_backward([weak = std::weak_ptr(self_)](bool ended) {
      const auto self = weak.lock();
      if (!self) return;
      (*self)->waits_ = false;
      if (ended) (*self)->low_precision_->end_step();
    });
  }

  void divide_by_count() {
    total_count_ = std::exchange(count_, 0);
    for (const NamedTensor& parameter : table_.all)
      if (at::Tensor& grad = parameter.tensor.mutable_grad(); grad.defined())
        total_count_ == 0 ? grad.zero_() : grad.mul_(1 / total_count_);
  }

  void abandon() {
    for (const NamedTensor& parameter : table_.all) parameter.tensor.mutable_grad().reset();
    if (low_precision_) low_precision_->end_step();
    count_ = 0;
  }

  ParameterTable& table_;
  LowPrecisionParameters* low_precision_;
  double count_ = 0, total_count_ = 0;
  bool inside_backward_ = false;  // ddp.backward is running, and ends the step itself
  bool waits_ = false;            // for the end of a bare backward
  std::mutex mutex_;
  std::shared_ptr<LocalReducer*> self_ = std::make_shared<LocalReducer*>(this);
  std::vector<AccumulateHook<OnGradient>> hooks_;
};

/// Whether the communicator type has one rank at compile time.
template <class Comm>
inline constexpr bool alone = std::same_as<Comm, LocalComm>;
template <class Comm, class Hook>
using ReducerFor = std::conditional_t<alone<Comm>, LocalReducer, Reducer<Comm, Hook>>;

}  // namespace lockstep::detail
