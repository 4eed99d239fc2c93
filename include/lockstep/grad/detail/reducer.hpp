#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/serialize.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/autograd.hpp"
#include "lockstep/grad/detail/backward_report.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/detail/reduction.hpp"
#include "lockstep/grad/detail/saved_reducer.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1::detail {

/// A reduction of another model that the running `ddp.backward` has reached and will close.
struct JoinedReduction {
  void* reducer;
  std::size_t made;  // index of construction in this process, which orders reducers equally on every rank
  void (*close)(void* reducer, const std::exception_ptr& failure);
  void (*abandon)(void* reducer);
};
LOCKSTEP_PROCESS_WIDE inline std::atomic<std::size_t> reducers_made{0};

/// What the reducers of a process know of one another: wrappers of one model, of which one is out of date or
/// evaluates, have hooks on the same parameters. One of them reduces a backward. Thread-safe.
class LiveReducer {
 public:
  explicit LiveReducer(std::span<const ParameterEntry> parameters) {
    for (const ParameterEntry& parameter : parameters)
      parameters_.insert(parameter.tensor.unsafeGetTensorImpl());
    const std::lock_guard lock(of_process().mutex);
    for (LiveReducer* other : of_process().live)
      if (other->holds_any_of(*this)) shares_ = other->shares_ = true;
    of_process().live.push_back(this);
  }
  LiveReducer(const LiveReducer&) = delete;
  LiveReducer& operator=(const LiveReducer&) = delete;
  ~LiveReducer() {
    const std::lock_guard lock(of_process().mutex);
    std::erase(of_process().live, this);
  }

  /// Expects a backward, as Python's wrapper does from its forward to the end of the backward.
  void expect() { forward_ = ++of_process().forwards; }
  void expect_none() { forward_ = 0; }

  /// Returns whether the running backward is this reducer's as far as the parameter is concerned: of the live
  /// reducers that hold it, the one whose `ddp.backward` runs, else the one whose forward ran last, else one
  /// under `no_sync`. Throws GradientError if there are several and none of these.
  [[nodiscard]] bool takes(const ParameterEntry& parameter) const {
    if (!shares_ || running) return true;
    const std::lock_guard lock(of_process().mutex);
    const LiveReducer *last = nullptr, *accumulates = nullptr;
    std::size_t holders = 0;
    std::uint64_t latest = 0;
    for (const LiveReducer* holder : of_process().live) {
      if (!holder->parameters_.contains(parameter.tensor.unsafeGetTensorImpl())) continue;
      if (holder->running) return false;
      ++holders;
      if (const std::uint64_t forward = holder->forward_; !last || forward > latest) {
        last = holder;
        latest = forward;
      }
      if (holder->no_sync_depth > 0) accumulates = holder;
    }
    if (holders == 1) return true;
    if (latest > 0) return last == this;
    if (accumulates) return accumulates == this;
    throw GradientError(detail::formatted(
        "a backward reached parameter '{}', which {} live DistributedDataParallel objects hold, and none of "
        "them has run its forward: call backward on the one that is to average the gradients, and destroy "
        "those that are out of date",
        parameter.name, holders));
  }
  [[nodiscard]] bool is_superseded() const {
    if (!shares_) return false;
    const std::lock_guard lock(of_process().mutex);
    const auto& live = of_process().live;
    return std::any_of(std::find(live.begin(), live.end(), this) + 1, live.end(),
                       [&](const auto* newer) { return newer->holds_any_of(*this); });
  }
  [[nodiscard]] static bool several() {
    const std::lock_guard lock(of_process().mutex);
    return of_process().live.size() > 1;
  }

  std::atomic<bool> running{false};  ///< a `ddp.backward` of its model
  std::atomic<int> no_sync_depth{0};

 private:
  struct Process {
    std::mutex mutex;
    std::vector<LiveReducer*> live;  // in the order of construction
    std::atomic<std::uint64_t> forwards{0};
  };
  LOCKSTEP_PROCESS_WIDE static Process& of_process() {
    static auto& process = *new Process();  // a static wrapper may outlive other statics
    return process;
  }
  [[nodiscard]] bool holds_any_of(const LiveReducer& other) const {
    return std::any_of(other.parameters_.begin(), other.parameters_.end(),
                       [&](const auto* parameter) { return parameters_.contains(parameter); });
  }

  std::unordered_set<const c10::TensorImpl*> parameters_;
  std::atomic<bool> shares_{false};        // another one holds a parameter of it, or did
  std::atomic<std::uint64_t> forward_{0};  // number of its last forward; 0 unless it expects a backward
};

struct OpenBackwards {
  int running = 0;
  /// Number of running `backward_sum` calls. No other model can join these: its gradients would be divided by
  /// the world size instead of the count.
  int counting = 0;
  std::vector<JoinedReduction> joined;
};
LOCKSTEP_PROCESS_WIDE inline OpenBackwards& open_backwards_here() {
  thread_local OpenBackwards here;
  return here;
}
/// The most recent outermost call of any thread.
LOCKSTEP_PROCESS_WIDE inline std::atomic<OpenBackwards*> latest_open_backwards{nullptr};

/// Returns the running calls that a gradient on `device` may belong to, or null. The engine computes CPU
/// gradients in the thread that called backward, and others in its own threads.
inline OpenBackwards* open_backwards_for(c10::Device device) {
  OpenBackwards* open = device.is_cpu() ? &open_backwards_here() : latest_open_backwards.load();
  return open && open->running > 0 ? open : nullptr;
}

class InsideBackward {
 public:
  InsideBackward(std::atomic<bool>& running, bool counts)
      : nested(running.exchange(true)),
        calls(open_backwards_here()),
        outermost(calls.running++ == 0),
        running_(running),
        counts_(counts) {
    calls.counting += counts_;
    if (outermost) latest_open_backwards = &calls;
  }
  InsideBackward(const InsideBackward&) = delete;
  InsideBackward& operator=(const InsideBackward&) = delete;
  ~InsideBackward() {
    calls.counting -= counts_;
    --calls.running;
    running_ = nested;
    OpenBackwards* mine = &calls;
    if (outermost) latest_open_backwards.compare_exchange_strong(mine, nullptr);
  }

  const bool nested;  ///< inside another `ddp.backward` of the same model
  OpenBackwards& calls;
  const bool outermost;  ///< not inside a `ddp.backward` of any model

 private:
  std::atomic<bool>& running_;
  bool counts_;
};

/// The name of every kind of backward in errors: one kind on a rank may join another kind on another rank.
inline constexpr const char* backward_name = "DistributedDataParallel::backward";

/// One backward's contribution to a reduction: the roots of the search for unused parameters. With a `count`,
/// the gradients are those of a sum over that many samples, otherwise of a mean.
struct Contribution {
  at::ArrayRef<at::Tensor> losses;
  std::optional<double> count = std::nullopt;
  bool no_data = false;  ///< this rank has no data in this step

  /// Returns `before` plus the count; nullopt without a count. A negative or non-finite count, which backward
  /// refuses, adds 0.
  [[nodiscard]] std::optional<double> count_after(double before) const {
    if (!count) return std::nullopt;
    return before + (std::isfinite(*count) ? std::max(*count, 0.0) : 0.0);
  }
};

/// Averages gradients over the ranks while backward runs. Tracks which gradients are ready, and opens and
/// closes each reduction.
///
/// A reduction is `open()`, then one call of the accumulate hook for each gradient, then `close()`. Buckets are
/// launched in index order as soon as their gradients are ready, except the last one, which `close` launches: a rank
/// whose backward throws poisons that bucket with NaN, so all ranks see the failure in the same iteration.
///
/// On a device the host does not wait for the check of the buckets. The next reduction, or `settle()`, reads
/// it: the same call on every rank, since the ranks then exchange their reports. The first reductions, whose
/// outcome the ranks need to build the same buckets, are checked at once, as are those that block the host
/// anyway and those of a loss over several models.
///
/// `Phase` is where a reduction is:
///
///   idle --open()--> open --close()--> idle
///   idle --another model's backward reaches this one--> joined --at its end open(), close(), or abandon--> idle
///   open --a bare loss.backward() throws--> stale --close() before the next reduction--> idle
///
/// and `Buckets` how they are planned: by registration, then once in the order in which the gradients became ready.
///
/// The hooks point to this object, so it does not move. It belongs to one thread, as a model does; only the
/// hooks run on the autograd engine's threads.
template <class Comm, class Hook>
class Reducer {
 public:
  /// `table` and `comm` must outlive the reducer.
  Reducer(ParameterTable& table, Comm& comm, Hook hook, const DdpOptions& options)
      : live_(table.trained),
        parameters_(table.trained),
        options_(options),
        watched_(table, options.ignored),
        reduction_(parameters_, comm, std::move(hook), options_),
        expects_(searches()) {
    for (ParameterEntry& parameter : parameters_) parameter.expected = searches();
    hooks_.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      hooks_.emplace_back(parameters_[i].tensor, OnGradient{this, i});
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Throws UsageError unless the model is as it was at construction; see WatchedParameters::check.
  template <class List>
  void check_model(at::ArrayRef<at::Tensor> losses, List&& list) {
    watched_.check(losses, list, [&] { return live_.is_superseded(); });
    check_hooks();
  }
  /// Throws UsageError if a conversion of the model has left a parameter without its hook.
  void check_hooks() const {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (!hooks_[i].reaches(parameters_[i].tensor))
        throw UsageError(detail::formatted(
            "the data of parameter '{}' was replaced after DistributedDataParallel was made, by torch::load "
            "or by to(), so that its gradient would not be averaged: do so before, or load by "
            "load_state_dict",
            parameters_[i].name));
  }

  /// Runs `run_backward` inside a reduction, or without one under `no_sync` and inside another backward of
  /// this model. The outermost call then reduces the other models that the backward has reached, in the order
  /// of their construction, which is equal on every rank.
  template <class Run>
  void backward(const Contribution& contribution, Run&& run_backward) {
    const InsideBackward inside(live_.running, contribution.count.has_value());
    struct Caller {
      ServedCall& call;
      ServedCall before = std::exchange(call, served_call);
      ~Caller() { call = before; }
    } const caller{caller_};
    const bool reduces = no_sync_depth == 0 && !inside.nested;
    note_gradients();
    const auto run_counted = [&] {
      throw_untold();  // as a failure of this backward, so that the other ranks do not step either
      if (const auto counted = contribution.count_after(count_)) reduction_.check_count(*counted);
      run_backward();
      if (contribution.count) count_ += *contribution.count;
    };
    if (!reduces && !inside.outermost) return run_counted();
    if (reduces) {
      sum_count_ = contribution.count_after(count_);
      no_data_ = contribution.no_data;
      try {
        open();
      } catch (...) {
        abandon();
        throw;
      }
    }
    std::exception_ptr thrown;
    try {
      if (reduces) find_known_unused(&contribution.losses);
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
      // A failed reduction of this model has failed on every rank, and a rank may have failed before it
      // reached the other models: no rank reduces them. From the first such loss on, therefore, no rank
      // learns of a failure late; see leave_unread for the first. A failed backward does not count: the rank
      // that failed may not have reached the other models, and the ranks must agree on what is checked late.
      // Where this rank has no error while another one has, that one has aborted the communicator.
      shares_loss_ = shares_loss_ || (reduces && !first && !joined.empty());
      for (const JoinedReduction& other : joined)
        end([&] { reduces&& first ? other.abandon(other.reducer) : other.close(other.reducer, thrown); });
    }
    throw_untold();
    if (first) std::rethrow_exception(first);
  }

  /// See DistributedDataParallel::fail_backward. Joins the reduction also under `no_sync`.
  void fail_backward(const std::exception_ptr& failure, bool counted) noexcept {
    const int depth = no_sync_depth.exchange(0);
    keeps_untold_ = true;
    Contribution empty{.losses = {}, .no_data = true};
    if (counted) empty.count = 0;
    try {
      backward(empty, [&] { std::rethrow_exception(failure); });
    } catch (...) {  // `failure` itself, which the caller handles
    }
    keeps_untold_ = false;
    no_sync_depth = depth;
  }

  void settle() {
    read_late(nullptr);
    throw_untold();
  }
  [[nodiscard]] bool checks_late() const {
    return buckets_ == Buckets::rebuilt && !shares_loss_ && reduction_.can_check_late();
  }

  [[nodiscard]] BucketPlan plan() const { return reduction_.plan(); }
  [[nodiscard]] Hook& hook() { return reduction_.hook(); }
  c10::IValue state() {
    std::string own;
    agree<CheckpointError>(comm(), [&] { own = own_state(); });
    if (rebuild_due()) rebuild_order_ = rank_zero_order();
    const std::vector<std::string> ranks = gather_on_rank_zero(comm(), std::move(own));
    if (ranks.empty()) return {};
    c10::impl::GenericDict state = common_state();
    state.insert("backwards", static_cast<std::int64_t>(iteration_));
    state.insert("order", saved_numbers(rebuild_order_));
    state.insert("rebuilt", buckets_ == Buckets::rebuilt);
    c10::impl::GenericList parts(c10::AnyType::get());
    for (const std::string& bytes : ranks) parts.push_back(torch::pickle_load({bytes.begin(), bytes.end()}));
    state.insert("ranks", parts);
    return state;
  }
  void load_state(const c10::IValue& value) {
    if (warn_of_arithmetic(value, comm().world().log)) return;
    const SavedReducer saved(value, parameters_.size());
    const auto rank = static_cast<std::size_t>(comm().rank());
    const bool all = saved.ranks.size() == static_cast<std::size_t>(comm().size());
    const auto restore = snapshot();
    try {
      iteration_ = saved.backwards;
      reduction_.set_iteration(iteration_);
      if (saved.rebuilt) {
        set_bucket_order(saved.order);
      } else {
        if (buckets_ == Buckets::rebuilt)
          reduction_.rebuild(plan_by_registration(parameters_, caps_at_first(options_)),
                             /*only_adoptable=*/false);
        rebuild_order_ = saved.order;
        buckets_ = saved.order.empty() ? Buckets::registered : Buckets::ordered;
      }
      if (const auto& expected = saved.ranks[all ? rank : 0].expected;
          all && !expected.empty() && !searches()) {
        for (std::size_t i = 0; i < parameters_.size(); ++i)
          parameters_[i].expected = static_cast<int>(expected[i]);
        expects_ = true;
      }
      load_hook(saved.ranks[all ? rank : 0].hook, all);
    } catch (...) {
      restore(*this);
      throw;
    }
  }
  /// Returns a function that restores what load_state changes, in a reducer of the same parameters.
  [[nodiscard]] auto snapshot() {
    std::vector<int> expected;
    for (const ParameterEntry& parameter : parameters_) expected.push_back(parameter.expected);
    HookState hook_state;
    if constexpr (StatefulHook<Hook>) hook_state = hook().state();
    return [plan = plan(), expected, hook_state,
            counts = std::tuple(iteration_, rebuild_order_, expects_,
                                rebuild_due() ? Buckets::ordered : buckets_)](Reducer& to) {
      for (std::size_t i = 0; i < expected.size(); ++i) to.parameters_[i].expected = expected[i];
      std::tie(to.iteration_, to.rebuild_order_, to.expects_, to.buckets_) = counts;
      to.reduction_.set_iteration(to.iteration_);
      if (to.plan() != plan) to.reduction_.rebuild(plan, /*only_adoptable=*/false);
      if constexpr (StatefulHook<Hook>) to.hook().load_state(hook_state);
    };
  }
  void forget() {
    count_ = 0;
    clear_seen();
  }
  [[nodiscard]] double total_count() const { return reduction_.total_count(); }
  [[nodiscard]] double count_so_far() const { return count_; }
  /// Returns whether a backward since the last reduction has reached parameter i.
  [[nodiscard]] bool has_gradient(std::size_t i) const { return parameters_[i].seen; }
  void rollback() {
    if constexpr (StatefulHook<Hook>) hook().rollback();
  }
  void forward_begins() {
    reduction_.times.forward = ReductionTimes::Clock::now();
    if (!c10::GradMode::is_enabled()) return;
    check_hooks();  // a bare loss.backward() would reach no hook
    live_.expect();
    note_gradients();
  }

  void record_completions(bool enabled) { reduction_.record_completions(enabled); }
  [[nodiscard]] DdpReport report() const {
    DdpReport report = reduction_.report();
    report.ready_order = ready_order_;
    report.unused = unused_;
    for (const std::size_t i : unused_) report.unused_names.emplace_back(parameters_[i].name);
    return report;
  }

 private:
  LiveReducer live_;

 public:
  std::atomic<int>& no_sync_depth = live_.no_sync_depth;

 private:
  enum class Phase { idle, open, stale, joined };
  /// `ordered`: the ready order is known, and the next reduction rebuilds; `noted`: and gradients to move are known, too.
  enum class Buckets { registered, ordered, noted, rebuilt };

  struct OnGradient {
    Reducer* reducer;
    std::size_t parameter;
    void operator()() const { reducer->on_gradient(parameter); }
  };

  [[nodiscard]] bool rebuild_due() const {
    return buckets_ == Buckets::ordered || buckets_ == Buckets::noted;
  }
  [[nodiscard]] bool searches() const { return options_.find_unused_parameters && !options_.static_graph; }

  void on_gradient(std::size_t i) {
    // The autograd engine runs one thread for each device of the model.
    const std::lock_guard lock(mutex_);
    // The engine's threads, and a bare backward, are in no public call.
    const CallScope scope(served_call.name ? served_call
                          : caller_.name   ? caller_
                                           : ServedCall{backward_name});
    if (c10::GradMode::is_enabled())
      throw GradientError(
          "backward with create_graph is refused: gradients of gradients would not be averaged over the "
          "ranks; take them with torch::autograd::grad and put the result into the loss");
    ParameterEntry& parameter = parameters_[i];
    if (!live_.takes(parameter)) return;
    // The engine calls the hook without a gradient for an output that the loss ignores.
    if (parameter.gradient().defined() || !searches()) parameter.seen = true;
    if (parameter.skipped || (options_.static_graph && !reduction_.used_anywhere(i)))
      throw GradientError(unexpected_text(i, parameter, options_));
    if (no_sync_depth > 0) return;
    if (phase_ == Phase::idle || phase_ == Phase::stale) {
      if (OpenBackwards* calls = open_backwards_for(parameter.tensor.device()))
        join(*calls);
      else
        open_bare();
    }
    ready_order_.push_back(i);
    if (!expects_ && !options_.static_graph) reduction_.allocate(i);
    copy_known_unused();
    if (expects_ && phase_ == Phase::open) {
      if (parameter.fired == parameter.expected || parameter.copied)
        throw GradientError(unexpected_text(i, parameter, options_));
      if (parameter.fired + 1 == parameter.expected) {
        copy_to_bucket(i);
        reduction_.launch_ready();
      }
    }
    ++parameter.fired;
  }

  void copy_to_bucket(std::size_t i, bool seen = true) {
    parameters_[i].copied = true;
    reduction_.copy_to_bucket(i, seen);
  }

  void open() {
    close_stale();
    if (std::exchange(phase_, Phase::idle) != Phase::joined) clear_counters();
    if (rebuild_due()) set_bucket_order(rank_zero_order());
    reduction_.open(sum_count_);
    phase_ = Phase::open;
  }
  void open_plain() {
    sum_count_.reset();
    no_data_ = false;
    open();
  }
  void clear_counters() {
    for (ParameterEntry& parameter : parameters_) {
      parameter.fired = 0;
      parameter.copied = false;
    }
    ready_order_.clear();
  }
  void clear_seen() {
    for (ParameterEntry& parameter : parameters_) parameter.seen = false;
  }
  void close_stale() {
    if (phase_ != Phase::open && phase_ != Phase::stale) return;
    close(std::make_exception_ptr(
        GradientError("an earlier loss.backward() did not end, so its gradients were never reduced; call "
                      "ddp.backward(loss), which always ends the reduction")));
  }

  /// Finds the parameters that this backward does not reach. `losses` is null in a bare `loss.backward()`.
  void find_known_unused(const at::ArrayRef<at::Tensor>* losses) {
    unused_due_ = !no_data_ && expects_ && (options_.static_graph || (searches() && losses));
    if (unused_due_ && searches()) search_.run(*losses);
  }
  /// Copies their gradients, so that their buckets need not wait for `close`: once a backward has its first gradient,
  /// as Python does. The bits of `lazy_bucket_allocation` depend on that.
  void copy_known_unused() {
    if (!std::exchange(unused_due_, false)) return;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (searches() ? !search_.reached(hooks_[i].node()) : parameters_[i].expected == 0)
        copy_to_bucket(i, parameters_[i].seen);
  }

  /// Joins the running `ddp.backward` of another model, which closes this reduction too. No bucket is
  /// launched before then: the order in which a backward reaches models may differ between ranks. Throws
  /// GradientError inside a `backward_sum`.
  void join(OpenBackwards& calls) {
    if (calls.counting > 0)
      throw GradientError(
          "backward_sum reached another wrapped model, whose gradients it would not divide by the count; use "
          "backward with a mean, or keep the other model out with its no_sync");
    close_stale();
    clear_counters();
    phase_ = Phase::joined;
    calls.joined.push_back({this, made_,
                            [](void* reducer, const std::exception_ptr& failure) {
                              static_cast<Reducer*>(reducer)->close_joined(failure);
                            },
                            [](void* reducer) { static_cast<Reducer*>(reducer)->abandon_joined(); }});
  }
  void close_joined(const std::exception_ptr& failure) {
    shares_loss_ = true;
    open_plain();
    close(failure);
  }
  void abandon_joined() {
    live_.expect_none();
    phase_ = Phase::idle;
    abandon();
  }

  /// Opens a reduction from a hook in a bare `loss.backward()`; an engine callback closes it. If the backward
  /// throws, the engine drops the callback, and the next reduction closes this stale one first.
  void open_bare() {
    open_plain();
    find_known_unused(nullptr);
    at_end_of_backward([reducer = std::weak_ptr(self_)](bool ended) {
      const CallScope scope(backward_name);
      const auto alive = reducer.lock();
      if (alive && ended) (*alive)->close(nullptr);
      if (alive && !ended && (*alive)->phase_ == Phase::open) (*alive)->phase_ = Phase::stale;
    });
  }

  /// Ends the reduction. Collective. Launches every bucket even after a failure, so that no peer waits for
  /// one. Throws `failure`, or the error that other ranks report.
  void close(const std::exception_ptr& failure) {
    const c10::NoGradGuard no_grad;
    live_.expect_none();
    RECORD_FUNCTION("lockstep::finish_reduction", std::vector<c10::IValue>());
    BackwardReport report;
    if (failure) report.thrown = first_line(failure);
    try {
      complete(report);
      const double count = std::exchange(count_, 0);
      reduction_.launch_rest(count, report.thrown.has_value() || !report.missing.empty());
      LateNanCheck check;
      const bool late = checks_late();
      const bool flagged = reduction_.wait(failure, iteration_, late ? &check : nullptr);
      const std::exception_ptr hook_error = reduction_.hook_error();
      if (hook_error && !report.thrown) report.thrown = first_line(hook_error);
      read_late(failure);
      if (flagged)
        throw_reported_failure(comm(), report, parameters_, failure ? failure : hook_error);
      else if (late)
        leave_unread(std::move(check), std::move(report), failure);
      reduction_.copy_from_bucket();
    } catch (...) {
      phase_ = Phase::idle;
      abandon();
      if (failure) std::rethrow_exception(failure);
      throw;
    }
    phase_ = Phase::idle;
    note_unused();
    clear_seen();
    learn();
    ++iteration_;
  }

  /// Reads the check of the last reduction, and throws its error if it was not read before. If this rank
  /// has not caused that error and throws `failure` in its place, the error is kept as `untold_`.
  void read_late(const std::exception_ptr& failure) {
    if (!unread_ || CaptureScope::active()) return;
    Unread unread = std::move(*unread_);
    unread_.reset();
    const bool flagged = unread.check.read();
    // An aborted reduction leaves arbitrary values.
    if constexpr (requires { comm().check_error(); }) comm().check_error();
    if (!flagged) return;
    const std::exception_ptr error =
        late_failure(comm(), unread.report, parameters_, unread.backward, failure);
    if (!error) return;
    if (failure && unread.report.empty() && !untold_) untold_ = error;
    std::rethrow_exception(error);
  }
  void throw_untold() {
    if (untold_ && !keeps_untold_) std::rethrow_exception(std::exchange(untold_, nullptr));
  }

  void leave_unread(LateNanCheck check, BackwardReport report, const std::exception_ptr& failure) {
    const bool poisoned =
        report.thrown || std::any_of(report.missing.begin(), report.missing.end(),
                                     [&](auto i) { return parameters_[i].tensor.numel() > 0; });
    if (!poisoned) report = {};
    unread_.emplace(Unread{std::move(check), report, iteration_ + 1});
    if (!poisoned) return;
    // The counts of the ranks must stay equal.
    ++iteration_;
    reduction_.count_failed();
    // This backward may be the first whose loss reaches another model too. The other ranks then reduce that
    // model's gradients, in which this rank does not take part.
    const std::string text = failure ? *report.thrown : own_failure_text(comm(), report, parameters_);
    if (LiveReducer::several() && !every_rank_throws(comm())) comm().abort(text);
    if (failure) std::rethrow_exception(failure);
    throw GradientError(text);
  }

  /// Copies the remaining gradients into their buckets, and poisons those that are required and missing.
  void complete(BackwardReport& report) {
    unused_due_ = false;
    const bool may_miss = no_data_ || searches() || (options_.static_graph && !expects_);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].copied) continue;
      if (!parameters_[i].seen && !may_miss && (!expects_ || parameters_[i].expected > 0)) {
        report.missing.push_back(i);
        reduction_.poison(i);
        continue;
      }
      try {
        copy_to_bucket(i, parameters_[i].seen);
      } catch (...) {
        if (!report.thrown) report.thrown = first_line(std::current_exception());
        reduction_.poison(i);
      }
    }
    reduction_.launch_ready();
    // A backward that threw after its last gradient must be seen too.
    if (report.thrown) reduction_.poison_last();
  }

  void abandon() {
    for (const ParameterEntry& parameter : parameters_) parameter.gradient().reset();
    reduction_.abandon();
    clear_seen();
    count_ = 0;
  }

  void note_unused() {
    unused_.clear();
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (!parameters_[i].seen) unused_.push_back(i);
  }

  /// Records how often each gradient fires in the first reduction that has gradients, and the ready order: of the
  /// first reduction or, with static_graph, of the second, as Python does.
  void learn() {
    if (searches()) return;
    if (!expects_) {
      expects_ = std::any_of(parameters_.begin(), parameters_.end(),
                             [](const ParameterEntry& parameter) { return parameter.fired > 0; });
      for (ParameterEntry& parameter : parameters_)
        if (expects_) parameter.expected = std::max(parameter.fired, options_.static_graph ? 0 : 1);
    }
    if (buckets_ == Buckets::rebuilt || iteration_ + 1 < (options_.static_graph ? 2U : 1U)) return;
    rebuild_order_ = completion_order(ready_order_, parameters_.size());
    if (buckets_ == Buckets::registered) buckets_ = Buckets::ordered;
  }

  /// Records the gradients that exist at the first forward after the ready order is known, with
  /// GradientStorage::gradient_as_bucket_view: Python rebuilds its buckets in that forward and moves these
  /// gradients into them. Here the rebuild waits for the next reduction, because a forward on one rank alone
  /// must not start a collective.
  void note_gradients() {
    if (buckets_ != Buckets::ordered || options_.gradients != GradientStorage::gradient_as_bucket_view)
      return;
    buckets_ = Buckets::noted;
    for (ParameterEntry& parameter : parameters_) parameter.adoptable = parameter.gradient();
  }

  /// Returns rank 0's ready order. A hash of the first batch of its pass travels along, or of its first gradients if no
  /// DataLoader drew the batch, so that rank 1 knows whether the two read the same samples.
  std::vector<std::size_t> rank_zero_order() {
    const std::uint64_t known = drawn_batch.first != 0 ? drawn_batch.first : reduction_.first_hash();
    const std::uint64_t own = std::exchange(compared_, true) ? 0 : known;
    std::vector<std::size_t> order = rebuild_order_;
    order.push_back(own);
    order = order_of_rank_zero(comm(), order, parameters_[0].tensor.device());
    if (comm().rank() == 1 && own != 0 && order.back() == own)
      comm().world().log.all().warning(
          "the first {} of ranks 0 and 1 are equal, as if both read the same samples: partition the "
          "data by a sampler that knows the rank, such as DistributedSampler, or give each rank a part of "
          "the stream",
          drawn_batch.first != 0 ? "batches" : "gradients");
    order.pop_back();
    return order;
  }
  /// Rebuilds the buckets in this order, which is equal on every rank.
  void set_bucket_order(std::vector<std::size_t> order) {
    reduction_.rebuild(assign_buckets(parameters_, order, bucket_caps(options_)),
                       /*only_adoptable=*/buckets_ == Buckets::noted);
    for (ParameterEntry& parameter : parameters_) parameter.adoptable.reset();
    rebuild_order_ = std::move(order);
    buckets_ = Buckets::rebuilt;
  }

  // The part of `state` that differs between ranks.
  std::string own_state() {
    c10::impl::GenericDict own = new_state_dict();
    std::vector<std::size_t> expected;
    if (expects_ && !searches())
      for (const ParameterEntry& parameter : parameters_)
        expected.push_back(static_cast<std::size_t>(parameter.expected));
    own.insert("expected", saved_numbers(expected));
    if constexpr (StatefulHook<Hook>) {
      c10::impl::GenericDict entries = new_state_dict();
      for (const auto& [name, tensor] : hook().state()) entries.insert(name, tensor.cpu());
      own.insert("hook", entries);
    }
    const std::vector<char> bytes = torch::pickle_save(own);
    return {bytes.begin(), bytes.end()};
  }
  void load_hook(const std::optional<HookState>& saved, bool own) {
    const auto warn = [&](const char* text) { comm().world().log.warning("{}", text); };
    if constexpr (!StatefulHook<Hook>) {
      if (saved) warn("the checkpoint has the state of a communication hook that this model does not have");
    } else if (!saved) {
      warn("the checkpoint holds no state for the communication hook: the hook starts afresh");
    } else if (own) {
      hook().load_state(*saved);
    } else if constexpr (requires { Hook::shared_state(*saved); }) {
      hook().load_state(Hook::shared_state(*saved));
    } else {
      warn(
          "the checkpoint is of another number of ranks, whose hook state is of each rank: the hook starts "
          "afresh");
    }
  }

  Comm& comm() { return reduction_.comm(); }
  /// A reduction whose check no host has read yet, and this rank's report of it.
  struct Unread {
    LateNanCheck check;
    BackwardReport report;
    std::size_t backward;  // counted from 1
  };

  std::mutex mutex_;
  std::span<ParameterEntry> parameters_;
  DdpOptions options_;
  WatchedParameters watched_;
  BucketReduction<Comm, Hook> reduction_;
  bool expects_;  // the entries' `expected` is known
  std::vector<std::size_t> ready_order_, rebuild_order_, unused_;
  GraphSearch search_;
  double count_ = 0;  // this rank's count since the last reduction
  std::size_t iteration_ = 0;
  Phase phase_ = Phase::idle;
  Buckets buckets_ = Buckets::registered;
  bool compared_ = false;            // the first batches of ranks 0 and 1
  ServedCall caller_;                // the public call that runs backward, empty in a bare backward
  std::optional<double> sum_count_;  // this rank's count in a reduction of sums with counts
  bool no_data_ = false;
  bool unused_due_ = false;   // the gradients of known unused parameters are still to be copied
  bool shares_loss_ = false;  // a loss has depended on this model and others
  std::optional<Unread> unread_;
  std::exception_ptr
      untold_;  // the error of an earlier backward on another rank, which no call has thrown yet
  bool keeps_untold_ = false;  // in fail_backward, which throws nothing
  std::size_t made_ = reducers_made++;
  std::shared_ptr<Reducer*> self_ = std::make_shared<Reducer*>(this);
  // Declared last: the hooks must be destroyed before the members that they use.
  std::vector<AccumulateHook<OnGradient>> hooks_;
};

/// The Reducer of a single process, whose members have the contracts of Reducer. Reduces nothing and
/// registers no hooks.
class LocalReducer {
 public:
  template <class Hook>
  LocalReducer(ParameterTable& table, LocalComm& comm, Hook&&, const DdpOptions&)
      : table_(table), log_(comm.world().log) {}
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
  [[nodiscard]] c10::IValue state() const { return common_state(); }
  void load_state(const c10::IValue& state) { warn_of_arithmetic(state, log_); }
  [[nodiscard]] static auto snapshot() {
    return [](LocalReducer&) {};
  }
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
    table_.each([&](const NamedTensor& parameter, const ParameterEntry* trained) {
      const bool is_mean = trained && trained->version() == trained->reduced;
      if (at::Tensor& grad = parameter.tensor.mutable_grad(); grad.defined() && !is_mean)
        total_count_ == 0 ? grad.zero_() : grad.mul_(1 / total_count_);
    });
  }

  void abandon() {
    for (const NamedTensor& parameter : table_.all) parameter.tensor.mutable_grad().reset();
    count_ = 0;
  }

  ParameterTable& table_;
  Log log_;
  double count_ = 0, total_count_ = 0;
};

/// Whether the communicator type has one rank at compile time.
template <class Comm>
inline constexpr bool alone = std::same_as<Comm, LocalComm>;
template <class Comm, class Hook>
using ReducerFor = std::conditional_t<alone<Comm>, LocalReducer, Reducer<Comm, Hook>>;

}  // namespace lockstep::inline v0_1::detail
