#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/ddp_report.hpp"
#include "lockstep/grad/detail/accumulate_hook.hpp"
#include "lockstep/grad/detail/backward_report.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/contribution.hpp"
#include "lockstep/grad/detail/end_of_backward.hpp"
#include "lockstep/grad/detail/graph_search.hpp"
#include "lockstep/grad/detail/joined_backwards.hpp"
#include "lockstep/grad/detail/low_precision_parameters.hpp"
#include "lockstep/grad/detail/ready_order.hpp"
#include "lockstep/grad/detail/reduction.hpp"
#include "lockstep/grad/detail/unexpected_gradient.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Averages gradients over the ranks while backward runs: which gradient came, what to do when, and how it
/// ends. What travels, and how, is the Reduction's.
///
/// A reduction is `open()`, then a call of the hook for each gradient, then `close()`. Buckets are launched
/// in index order as soon as their gradients are there, all but the last: that one waits for `close`, so that
/// a rank whose backward throws can still tell all others, in this very iteration, by not-a-numbers in it.
///
/// The hooks point to this object, so it does not move. It belongs to one thread, as a model does.
template <class Comm, class Hook>
class Reducer {
 public:
  /// `parameters` are those that require grad, each once, `sparse` those whose gradients will be, and
  /// `low_precision` what ends with a reduction, or null; it and `comm` must outlive the reducer.
  Reducer(std::vector<NamedTensor> parameters, const std::vector<char>& sparse, Comm& comm, Hook hook,
          const DdpOptions& options, LowPrecisionParameters* low_precision)
      : parameters_(std::move(parameters)),
        options_(options),
        low_precision_(low_precision),
        reduction_(parameters_, sparse, comm, std::move(hook), options_),
        taken_(parameters_.size()),
        fired_(parameters_.size()),
        seen_(parameters_.size()) {
    if (searches()) expected_.assign(parameters_.size(), 1);
    hooks_.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      hooks_.emplace_back(parameters_[i].tensor, OnGradient{this, i});
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Takes note of gradients of parameters that are short now, which are other leaves.
  void hook_low_precision_gradients() {
    if (!low_precision_hooks_.empty()) return;
    low_precision_hooks_.resize(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& leaf = parameters_[i].tensor;
      // One whose own type is the short one has a hook already.
      if (&*torch::autograd::impl::grad_accumulator(leaf) != hooks_[i].node())
        low_precision_hooks_[i].emplace(leaf, OnGradient{this, i});
    }
  }

  /// Runs `run_backward` inside a reduction, or plainly inside `no_sync` and inside another backward of this
  /// model. What it reaches of other models is reduced too, after this one: the same order on every rank.
  template <class Run>
  void backward(const Contribution& contribution, Run&& run_backward) {
    const InsideBackward inside(inside_, contribution.count.has_value());
    const bool reduces = no_sync_depth == 0 && !inside.nested;
    note_gradients();
    const auto run_counted = [&] {
      if (const auto counted = contribution.count_after(count_)) reduction_.check_count(*counted);
      run_backward();
      if (contribution.count) count_ += *contribution.count;
    };
    if (!reduces && !inside.outermost) return run_counted();
    if (reduces) {
      mean_over_ = contribution.count_after(count_);
      nothing_ = contribution.nothing;
      try {
        open();
      } catch (...) {
        drop();
        throw;
      }
    }
    std::exception_ptr thrown;
    try {
      if (reduces) take_known_unused(&contribution.losses);
      run_counted();
    } catch (...) {
      thrown = std::current_exception();
    }
    std::exception_ptr first = thrown;
    const auto end = [&](auto&& close_one) {
      try {
        close_one();
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    };
    if (reduces) end([&] { close(thrown); });
    if (inside.outermost) {
      auto joined = std::exchange(inside.calls.joined, {});
      std::sort(joined.begin(), joined.end(), [](const auto& a, const auto& b) { return a.made < b.made; });
      // Where this model's reduction has failed it has on every rank, also on one that did not come as far as
      // the other models: none of those is reduced.
      for (const JoinedReduction& other : joined)
        end([&] { reduces&& first ? other.abandon(other.reducer) : other.close(other.reducer, thrown); });
    }
    if (first) std::rethrow_exception(first);
  }

  /// Takes part in the others' reduction only to tell them `failure`, also inside `no_sync`.
  void fail_backward(const std::exception_ptr& failure, bool counted) noexcept {
    const int depth = std::exchange(no_sync_depth, 0);
    Contribution nothing{.losses = {}, .nothing = true};
    if (counted) nothing.count = 0;
    try {
      backward(nothing, [&] { std::rethrow_exception(failure); });
    } catch (...) {  // the failure itself, which is the caller's
    }
    no_sync_depth = depth;
  }

  /// The buckets in use, as parameter indices.
  [[nodiscard]] BucketPlan plan() const { return reduction_.plan(); }
  [[nodiscard]] Hook& hook() { return reduction_.hook(); }
  /// The order in which buckets were filled after the first iterations, empty where that is still to come.
  std::vector<std::size_t> bucket_order() {
    if (rebuild_due_) rebuild();
    return rebuilt_ ? rebuild_order_ : std::vector<std::size_t>();
  }
  void set_bucket_order(std::vector<std::size_t> order) {
    reduction_.rebuild(order, gradients_at_forward_.empty() ? nullptr : &gradients_at_forward_);
    gradients_at_forward_.clear();
    rebuild_order_ = std::move(order);
    rebuild_due_ = false;
    rebuilt_ = true;
  }
  /// Forgets what `no_sync` has accumulated: for a step that is given up.
  void forget() {
    count_ = 0;
    std::fill(seen_.begin(), seen_.end(), false);
  }
  /// Of the last reduction; the sum of the counts over ranks.
  [[nodiscard]] double total_count() const { return reduction_.total_count(); }
  /// Of this rank since the last reduction.
  [[nodiscard]] double count_so_far() const { return count_; }
  /// Whether a backward since the last reduction has reached the parameter.
  [[nodiscard]] bool has_gradient(std::size_t i) const { return seen_[i] != 0; }
  void forward_begins() {
    reduction_.times.forward = ReductionTimes::Clock::now();
    if (c10::GradMode::is_enabled()) note_gradients();
  }

  [[nodiscard]] DdpReport report() const {
    DdpReport report = reduction_.report();
    report.ready_order = ready_order_;
    report.unused = unused_;
    for (const std::size_t i : unused_) report.unused_names.push_back(parameters_[i].name);
    return report;
  }

  int no_sync_depth = 0;

 private:
  struct OnGradient {
    Reducer* reducer;
    std::size_t parameter;
    void operator()() const { reducer->on_gradient(parameter); }
  };

  // Of the parameter in its own type, or in the short one.
  [[nodiscard]] bool reached(std::size_t i) const {
    return search_.reached(hooks_[i].node()) || (!low_precision_hooks_.empty() && low_precision_hooks_[i] &&
                                                 search_.reached(low_precision_hooks_[i]->node()));
  }

  [[nodiscard]] bool searches() const { return options_.find_unused_parameters && !options_.static_graph; }

  void on_gradient(std::size_t i) {
    // The engine has a thread for each device that a model lies on.
    const std::lock_guard lock(mutex_);
    if (c10::GradMode::is_enabled())
      throw GradientError(
          "backward with create_graph is refused: gradients of gradients would not be averaged over "
          "the ranks; take them with torch::autograd::grad and put the result into the loss");
    // Through an output that the loss ignores a hook is called without a gradient.
    if (parameters_[i].tensor.mutable_grad().defined() || !searches()) seen_[i] = true;
    if (no_sync_depth > 0) return;
    if ((!open_ && !joined_) || stale_) {
      if (OpenBackwards* calls = open_backwards_for(parameters_[i].tensor.device()))
        join(*calls);
      else
        open_bare();
    }
    ready_order_.push_back(i);
    if (options_.static_graph && !reduction_.used_anywhere(i)) throw GradientError(unexpected_text(i));
    if (!expected_.empty() && !joined_) {
      if (fired_[i] == expected_[i] || taken_[i]) throw GradientError(unexpected_text(i));
      if (fired_[i] + 1 == expected_[i]) {
        copy_to_bucket(i);
        reduction_.launch_ready();
      }
    }
    ++fired_[i];
  }

  [[nodiscard]] std::string unexpected_text(std::size_t i) const {
    const int expected = expected_.empty() ? 0 : expected_[i];
    return text_of({i, parameters_[i].name, expected, fired_[i], taken_[i] != 0, searches(),
                    options_.static_graph && expected == 0});
  }

  void copy_to_bucket(std::size_t i, bool seen = true) {
    taken_[i] = true;
    reduction_.copy_to_bucket(i, seen);
  }

  void open() {
    close_stale();
    if (!std::exchange(joined_, false)) clear_counters();
    if (rebuild_due_) rebuild();
    reduction_.open(mean_over_);
    open_ = true;
  }
  void open_plain() {
    mean_over_.reset();
    nothing_ = false;
    open();
  }
  void clear_counters() {
    std::fill(fired_.begin(), fired_.end(), 0);
    std::fill(taken_.begin(), taken_.end(), false);
    ready_order_.clear();
  }
  void close_stale() {
    if (!open_) return;
    stale_ = false;
    close(
        std::make_exception_ptr(GradientError("an earlier loss.backward() did not end, so its gradients "
                                              "were never reduced; call ddp.backward(loss), "
                                              "which ends whatever happens")));
  }

  /// What will get no gradient goes into its bucket now, so that the bucket need not wait for the end.
  /// `losses` is null where they are not known: inside a bare backward.
  void take_known_unused(const at::ArrayRef<at::Tensor>* losses) {
    if (nothing_ || expected_.empty()) return;
    if (options_.static_graph) {
      for (std::size_t i = 0; i < parameters_.size(); ++i)
        if (expected_[i] == 0) copy_to_bucket(i, seen_[i] != 0);
    } else if (searches() && losses) {
      search_.run(*losses);
      for (std::size_t i = 0; i < parameters_.size(); ++i)
        if (!reached(i)) copy_to_bucket(i, seen_[i] != 0);
    }
  }

  /// The `ddp.backward` of another model reaches this one: that call ends this reduction too. Nothing is
  /// launched before, since the order in which a backward reaches models may differ between the ranks.
  void join(OpenBackwards& calls) {
    if (calls.counting > 0)
      throw GradientError(
          "backward_sum reached another wrapped model, whose gradients it would not divide by the count; "
          "use "
          "backward with a mean, or keep the other model out with its no_sync");
    close_stale();
    clear_counters();
    joined_ = true;
    calls.joined.push_back({this, made_,
                            [](void* reducer, const std::exception_ptr& failure) {
                              static_cast<Reducer*>(reducer)->close_joined(failure);
                            },
                            [](void* reducer) { static_cast<Reducer*>(reducer)->abandon_joined(); }});
  }
  void close_joined(const std::exception_ptr& failure) {
    open_plain();
    close(failure);
  }
  void abandon_joined() {
    joined_ = false;
    drop();
  }

  /// A hook fires though no `ddp.backward` runs: the reduction ends with this backward of the engine. Where
  /// that throws, the engine drops the callback without calling it, and the next reduction finds this one
  /// stale.
  void open_bare() {
    open_plain();
    take_known_unused(nullptr);
    at_end_of_backward([reducer = std::weak_ptr(self_)](bool ended) {
      const auto alive = reducer.lock();
      if (alive && ended) (*alive)->close(nullptr);
      if (alive && !ended) (*alive)->stale_ = true;
    });
  }

  /// Ends the reduction: every bucket is launched whatever happened, so that no peer waits for one. Throws
  /// `failure`, or what another rank told.
  void close(const std::exception_ptr& failure) {
    const c10::NoGradGuard no_grad;
    RECORD_FUNCTION("lockstep::finish_reduction", std::vector<c10::IValue>());
    BackwardReport report;
    if (failure) report.thrown = first_line(failure);
    try {
      complete(report);
      const double count = std::exchange(count_, 0);
      reduction_.launch_rest(count, seen_, report.thrown.has_value() || !report.missing.empty());
      const bool flagged = reduction_.wait(failure, iteration_, seen_);
      const std::exception_ptr hook_error = reduction_.hook_error();
      if (hook_error && !report.thrown) report.thrown = first_line(hook_error);
      if (flagged)
        throw_what_ranks_report(reduction_.comm(), report, parameters_, failure ? failure : hook_error);
      reduction_.copy_from_bucket();
    } catch (...) {
      open_ = false;
      drop();
      if (failure) std::rethrow_exception(failure);
      throw;
    }
    open_ = false;
    if (low_precision_) low_precision_->end_step();
    note_unused();
    std::fill(seen_.begin(), seen_.end(), false);
    learn();
    ++iteration_;
  }

  /// Fills every bucket with the gradients that there are, and poison where one is missing that must not be.
  void complete(BackwardReport& report) {
    const bool may_miss = nothing_ || searches() || (options_.static_graph && expected_.empty());
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (taken_[i]) continue;
      if (!seen_[i] && !may_miss) {
        report.missing.push_back(i);
        reduction_.poison(i);
        continue;
      }
      try {
        copy_to_bucket(i, seen_[i] != 0);
      } catch (...) {
        if (!report.thrown) report.thrown = first_line(std::current_exception());
        reduction_.poison(i);
      }
    }
    reduction_.launch_ready();
    // Also what took all gradients and threw afterwards must be seen.
    if (report.thrown) reduction_.poison_last();
  }

  /// After a failure no rank keeps a gradient, so that a step taken all the same changes no parameter.
  void drop() {
    for (const NamedTensor& parameter : parameters_) parameter.tensor.mutable_grad().reset();
    reduction_.drop();
    if (low_precision_) low_precision_->end_step();
    std::fill(seen_.begin(), seen_.end(), false);
    count_ = 0;
  }

  void note_unused() {
    unused_.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (!seen_[i]) unused_.push_back(i);
  }

  /// After the first reduction: how often each gradient comes. Also the order in which they were complete,
  /// from the first reduction in which buckets are launched before the end, as Python has it: its second
  /// where the graph is static.
  void learn() {
    if (searches()) return;
    const bool any = std::any_of(fired_.begin(), fired_.end(), [](int count) { return count > 0; });
    if (expected_.empty() && any) {
      expected_ = fired_;
      if (!options_.static_graph)
        for (int& count : expected_) count = std::max(count, 1);
    }
    if (rebuilt_ || iteration_ + 1 < (options_.static_graph ? 2U : 1U)) return;
    rebuild_order_ = completion_order(ready_order_, parameters_.size());
    rebuild_due_ = true;
  }

  /// Keeps the gradients that exist at the first forward after the order of buckets is known. Python rebuilds
  /// its buckets in that forward and moves those gradients into them; a gradient that a backward under
  /// `no_sync` makes afterwards stays outside, and is multiplied by 1 / size instead of divided. The rebuild
  /// itself waits for the next reduction here: a forward on one rank alone must not start a collective.
  void note_gradients() {
    if (!rebuild_due_ || options_.gradients != GradientStorage::gradient_as_bucket_view ||
        !gradients_at_forward_.empty())
      return;
    for (const NamedTensor& parameter : parameters_)
      gradients_at_forward_.push_back(parameter.tensor.mutable_grad());
  }

  /// Once: buckets in the order in which rank 0's gradients became ready.
  void rebuild() {
    set_bucket_order(order_of_rank_zero(reduction_.comm(), rebuild_order_, parameters_[0].tensor.device()));
  }

  std::mutex mutex_;
  std::vector<NamedTensor> parameters_;
  DdpOptions options_;
  LowPrecisionParameters* low_precision_;
  BucketReduction<Comm, Hook> reduction_;
  std::vector<char> taken_;    // lies in its bucket already, by parameter
  std::vector<int> fired_;     // gradients that came in this reduction, by parameter
  std::vector<int> expected_;  // how many come; empty until that is known
  std::vector<char> seen_;     // has a gradient since the last reduction, also from no_sync
  std::vector<std::size_t> ready_order_, rebuild_order_, unused_;
  std::vector<at::Tensor> gradients_at_forward_;  // by parameter; empty before that forward
  GraphSearch search_;
  double count_ = 0;  // samples since the last reduction
  std::size_t iteration_ = 0;
  bool open_ = false, inside_ = false, stale_ = false, rebuild_due_ = false, rebuilt_ = false;
  std::optional<double> mean_over_;  // samples of the running reduction, where it makes a mean of sums
  bool nothing_ = false;
  bool joined_ = false;  // reached by the backward of another model, which will close this reduction
  std::size_t made_ = reducers_made++;
  std::shared_ptr<Reducer*> self_ = std::make_shared<Reducer*>(this);
  // Last: gone before what they refer to.
  std::vector<AccumulateHook<OnGradient>> hooks_;
  std::vector<std::optional<AccumulateHook<OnGradient>>>
      low_precision_hooks_;  // by parameter, where it can be short
};

}  // namespace lockstep::detail
