#pragma once

#include <concepts>
#include <cstddef>
#include <exception>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/detail/reducer.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// The Reducer of a single process, whose members have the contracts of Reducer. Reduces nothing and
/// registers no hooks.
class LocalReducer {
 public:
  template <class Hook>
  LocalReducer(ParameterTable& table, LocalComm&, Hook&&, const DdpOptions&) : table_(table) {}
  LocalReducer(const LocalReducer&) = delete;
  LocalReducer& operator=(const LocalReducer&) = delete;

  template <class List>
  void check_model(at::ArrayRef<at::Tensor>, List&&) {}

  template <class Run>
  void backward(const Contribution& contribution, Run&& run_backward) {
    if (contribution.no_data && !contribution.count) return;  // no other rank to take part with
    try {
      run_backward();
    } catch (...) {
      if (no_sync_depth == 0) abandon();
      throw;
    }
    if (!contribution.count) return;
    count_ += *contribution.count;
    if (no_sync_depth == 0) divide_by_count();
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
  void divide_by_count() {
    total_count_ = std::exchange(count_, 0);
    for (const NamedTensor& parameter : table_.all)
      if (at::Tensor& grad = parameter.tensor.mutable_grad(); grad.defined())
        total_count_ == 0 ? grad.zero_() : grad.mul_(1 / total_count_);
  }

  void abandon() {
    for (const NamedTensor& parameter : table_.all) parameter.tensor.mutable_grad().reset();
    count_ = 0;
  }

  ParameterTable& table_;
  double count_ = 0, total_count_ = 0;
};

/// Whether the communicator type has one rank at compile time.
template <class Comm>
inline constexpr bool alone = std::same_as<Comm, LocalComm>;
template <class Comm, class Hook>
using ReducerFor = std::conditional_t<alone<Comm>, LocalReducer, Reducer<Comm, Hook>>;

}  // namespace lockstep::detail
