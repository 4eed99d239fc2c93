#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/accumulate_hook.hpp"
#include "lockstep/grad/backward_report.hpp"
#include "lockstep/grad/bucket_plan.hpp"
#include "lockstep/grad/gradient_buckets.hpp"
#include "lockstep/grad/named_tensors.hpp"

namespace lockstep::detail {

/// How many `ddp.backward` calls are running in this process.
inline std::atomic<int> open_backwards{0};

/// A reduction of another model, which the running `ddp.backward` has reached and will end.
struct JoinedReduction {
  void* reducer;
  void (*close)(void* reducer, const std::exception_ptr& failure);
};
inline std::vector<JoinedReduction> joined_reductions;

/// Averages gradients over the ranks while backward runs.
///
/// A reduction is `open()`, then a call of the hook for each gradient, then `close()`. Buckets are launched
/// in index order as soon as their gradients are there, all but the last: that one waits for `close`, so that
/// a rank whose backward throws can still tell all others, in this very iteration, by not-a-numbers in it.
///
/// The hooks point to this object, so it does not move. It belongs to one thread, as a model does.
template <class Comm>
requires Reducing<Comm> && Gathering<Comm>
class Reducer {
 public:
  /// `parameters` are those that require grad, each once; `comm` must outlive the reducer.
  Reducer(std::vector<NamedTensor> parameters, Comm& comm, std::vector<std::size_t> bucket_caps)
      : parameters_(std::move(parameters)),
        comm_(comm),
        caps_(std::move(bucket_caps)),
        sizes_(sizes_of(parameters_)),
        fired_(parameters_.size()),
        seen_(parameters_.size()) {
    use(plan_by_registration(sizes_));
    hooks_.reserve(parameters_.size());
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      hooks_.emplace_back(parameters_[i].tensor, OnGradient{this, i});
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Runs `run_backward` inside a reduction, or plainly inside `no_sync` and inside another backward of this
  /// model. What it reaches of other models is reduced too, after this one: the same order on every rank.
  template <class Run>
  void backward(Run&& run_backward) {
    const Inside inside(*this);
    const bool reduces = no_sync_depth == 0 && !inside.nested;
    if (!reduces && !inside.outermost) return run_backward();
    if (reduces) open();
    std::exception_ptr thrown;
    try {
      run_backward();
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
      for (const JoinedReduction& other : std::exchange(joined_reductions, {}))
        end([&] { other.close(other.reducer, thrown); });
    }
    if (first) std::rethrow_exception(first);
  }

  /// The buckets in use, as parameter indices.
  [[nodiscard]] BucketPlan plan() const {
    BucketPlan plan;
    for (std::size_t b = 0; b < buckets_->size(); ++b) plan.push_back(buckets_->members(b));
    return plan;
  }

  int no_sync_depth = 0;

 private:
  struct OnGradient {
    Reducer* reducer;
    std::size_t parameter;
    void operator()() const { reducer->on_gradient(parameter); }
  };

  /// Marks this reducer's own backward as running.
  struct Inside {
    explicit Inside(Reducer& reducer)
        : reducer(reducer), nested(std::exchange(reducer.inside_, true)), outermost(open_backwards++ == 0) {}
    ~Inside() {
      --open_backwards;
      reducer.inside_ = nested;
    }
    Reducer& reducer;
    bool nested, outermost;
  };

  static std::vector<ParameterSize> sizes_of(const std::vector<NamedTensor>& parameters) {
    std::vector<ParameterSize> sizes;
    for (const auto& [name, tensor] : parameters)
      sizes.push_back({static_cast<std::size_t>(tensor.numel()) * tensor.element_size(),
                       static_cast<int>(tensor.scalar_type()),
                       static_cast<int>(tensor.device().type()) * 256 + tensor.device().index()});
    return sizes;
  }

  void use(const BucketPlan& plan) {
    buckets_.emplace(parameters_, plan, comm_.size());
    works_.clear();
    works_.resize(plan.size());
    pending_.resize(plan.size());
    last_bucket_ = buckets_->bucket_of(buckets_->last_slot());
  }

  void on_gradient(std::size_t i) {
    if (c10::GradMode::is_enabled())
      throw GradientError(
          "backward with create_graph is refused: gradients of gradients would not be averaged over "
          "the ranks; take them with torch::autograd::grad and put the result into the loss");
    seen_[i] = true;
    if (no_sync_depth > 0) return;
    if (!open_ || stale_) {
      if (open_backwards > 0)
        join();
      else
        open_bare();
    }
    const bool first = expected_.empty();
    if (!first && fired_[i] == expected_[i])
      throw GradientError(
          fmt::format("parameter {} '{}' got {} gradients in this backward and {} in the first, after which "
                      "its bucket is reduced; "
                      "keep the number of uses in re-entrant backwards (checkpoints) fixed",
                      i, parameters_[i].name, fired_[i] + 1, expected_[i]));
    if (first) {
      ready_order_.push_back(i);
    } else if (fired_[i] + 1 == expected_[i]) {
      take(i);
      launch_ready(last_bucket_);
    }
    ++fired_[i];
  }

  void take(std::size_t i) {
    buckets_->take(i);
    --pending_[buckets_->bucket_of(i)];
  }

  void launch_ready(std::size_t end) {
    for (; next_ < end && pending_[next_] == 0; ++next_)
      if (buckets_->flat(next_).numel() > 0)
        works_[next_] = comm_.all_reduce(buckets_->flat(next_), ReduceOp::sum);
  }

  void open() {
    if (open_) {
      stale_ = false;
      close(
          std::make_exception_ptr(GradientError("an earlier loss.backward() did not end, so its gradients "
                                                "were never reduced; call ddp.backward(loss), "
                                                "which ends whatever happens")));
    }
    if (rebuild_due_) rebuild();
    std::fill(fired_.begin(), fired_.end(), 0);
    ready_order_.clear();
    for (std::size_t b = 0; b < buckets_->size(); ++b) pending_[b] = buckets_->members(b).size();
    next_ = 0;
    open_ = true;
  }

  /// The `ddp.backward` of another model reaches this one: that call ends this reduction too.
  void join() {
    open();
    joined_reductions.push_back({this, [](void* reducer, const std::exception_ptr& failure) {
                                   static_cast<Reducer*>(reducer)->close(failure);
                                 }});
  }

  /// A hook fires though no `ddp.backward` runs: the reduction ends with this backward of the engine. Where
  /// that throws, the engine drops the callback without calling it, and the next reduction finds this one
  /// stale.
  void open_bare() {
    open();
    struct Token {
      explicit Token(std::weak_ptr<Reducer*> reducer) : reducer(std::move(reducer)) {}
      ~Token() {
        if (const auto alive = reducer.lock(); alive && !ended) (*alive)->stale_ = true;
      }
      std::weak_ptr<Reducer*> reducer;
      bool ended = false;
    };
    auto token = std::make_shared<Token>(self_);
    torch::autograd::Engine::get_default_engine().queue_callback([token] {
      token->ended = true;
      if (const auto alive = token->reducer.lock()) (*alive)->close(nullptr);
    });
  }

  /// Ends the reduction: every bucket is launched whatever happened, so that no peer waits for one. Throws
  /// `failure`, or what another rank told.
  void close(const std::exception_ptr& failure) {
    const c10::NoGradGuard no_grad;
    BackwardReport report;
    if (failure) report.thrown = first_line(failure);
    try {
      launch_rest(report);
      if (failure) buckets_->poison(buckets_->last_slot());
      launch_ready(buckets_->size());
      if (wait(failure) && reported(report)) fail(report, failure);
    } catch (...) {
      open_ = false;
      drop();
      if (failure) std::rethrow_exception(failure);
      throw;
    }
    open_ = false;
    std::fill(seen_.begin(), seen_.end(), false);
    if (expected_.empty()) learn();
    ++iteration_;
  }

  /// Completes every bucket with the gradients that there are and poison where there is none.
  void launch_rest(BackwardReport& report) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!expected_.empty() && fired_[i] >= expected_[i]) continue;
      if (!seen_[i]) {
        report.missing.push_back(i);
        buckets_->poison(i);
        --pending_[buckets_->bucket_of(i)];
        continue;
      }
      try {
        take(i);
      } catch (...) {
        if (!report.thrown) report.thrown = first_line(std::current_exception());
        buckets_->poison(i);
        --pending_[buckets_->bucket_of(i)];
      }
    }
    launch_ready(last_bucket_);
  }

  /// Waits for all buckets; false where none of the ranks can have poisoned one.
  bool wait(const std::exception_ptr& failure) {
    // After a throw here the peers get a moment to arrive and learn of it, and no more: the error must be
    // seen.
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    for (std::size_t b = 0; b < works_.size(); ++b) {
      if (!works_[b]) continue;
      try {
        if (failure)
          works_[b]->wait_host(std::max(
              std::chrono::milliseconds(0),
              std::chrono::ceil<std::chrono::milliseconds>(patience - std::chrono::steady_clock::now())));
        else
          works_[b]->join_stream();
      } catch (const TimeoutError& error) {
        if (failure) {
          comm_.abort(first_line(failure));
          throw;
        }
        throw TimeoutError(fmt::format("{} (bucket {} of {}, with {}, in backward {})", error.what(), b + 1,
                                       works_.size(), parameter_list(buckets_->members(b), parameters_),
                                       iteration_ + 1));
      }
      works_[b].reset();
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      if (buckets_->maybe_poisoned(i)) return true;
    return false;
  }

  /// Whether some rank left a slot poisoned; not-a-number alone is no error, a model may diverge.
  bool reported(const BackwardReport& mine) {
    reports_.clear();
    bool any = false;
    for (const std::string& bytes : comm_.all_gather_bytes(serialize(mine))) {
      any = any || !bytes.empty();
      reports_.push_back(deserialize_report(bytes));
    }
    return any;
  }

  [[noreturn]] void fail(const BackwardReport& mine, const std::exception_ptr& failure) {
    if (failure) std::rethrow_exception(failure);
    const std::string text = failure_text(reports_, parameters_);
    const bool thrown =
        std::any_of(reports_.begin(), reports_.end(), [](const auto& r) { return bool(r.thrown); });
    if (thrown && !mine.thrown) throw PeerError(text);
    throw GradientError(text);
  }

  /// After a failure no rank keeps a gradient, so that a step taken all the same changes no parameter.
  void drop() {
    for (const NamedTensor& parameter : parameters_) parameter.tensor.mutable_grad().reset();
    for (auto& work : works_) work.reset();
    std::fill(seen_.begin(), seen_.end(), false);
  }

  /// After the first reduction: how often each gradient comes, and in which order they were complete.
  void learn() {
    expected_ = fired_;
    for (int& count : expected_) count = std::max(count, 1);
    std::vector<std::size_t> order;
    std::vector<char> placed(parameters_.size());
    for (std::size_t k = ready_order_.size(); k-- > 0;)
      if (!std::exchange(placed[ready_order_[k]], true)) order.push_back(ready_order_[k]);
    std::reverse(order.begin(), order.end());
    for (std::size_t i = 0; i < placed.size(); ++i)
      if (!placed[i]) order.push_back(i);
    ready_order_ = std::move(order);
    rebuild_due_ = true;
  }

  /// Once, before the second reduction: buckets in the order in which rank 0's gradients became ready.
  void rebuild() {
    const auto length = static_cast<std::int64_t>(ready_order_.size());
    at::Tensor order =
        at::empty({length}, at::TensorOptions(at::kLong).device(parameters_[0].tensor.device()));
    at::Tensor host = at::empty({length}, at::kLong);
    std::copy(ready_order_.begin(), ready_order_.end(), host.mutable_data_ptr<std::int64_t>());
    order.copy_(host);
    comm_.broadcast(order, 0).wait_host();
    host.copy_(order);
    const auto* first = host.const_data_ptr<std::int64_t>();
    use(plan_by_ready_order(sizes_, {first, first + length}, caps_));
    rebuild_due_ = false;
  }

  std::vector<NamedTensor> parameters_;
  Comm& comm_;
  std::vector<std::size_t> caps_;
  std::vector<ParameterSize> sizes_;
  std::optional<GradientBuckets> buckets_;
  std::vector<std::optional<typename Comm::Work>> works_;
  std::vector<std::size_t> pending_;  // gradients still to come, by bucket
  std::vector<int> fired_;            // gradients that came in this reduction, by parameter
  std::vector<int> expected_;         // how many come, known after the first reduction
  std::vector<char> seen_;            // has a gradient since the last reduction, also from no_sync
  std::vector<std::size_t> ready_order_;
  std::vector<BackwardReport> reports_;
  std::size_t next_ = 0;         // the bucket to launch next
  std::size_t last_bucket_ = 0;  // the last that is not empty: launched by `close` alone
  std::size_t iteration_ = 0;
  bool open_ = false, inside_ = false, stale_ = false, rebuild_due_ = false;
  std::shared_ptr<Reducer*> self_ = std::make_shared<Reducer*>(this);
  std::vector<AccumulateHook<OnGradient>> hooks_;  // last: gone before what they refer to
};

}  // namespace lockstep::detail
