#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <chrono>
#include <concepts>
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
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/ddp_report.hpp"
#include "lockstep/grad/graph_search.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/joined_backwards.hpp"
#include "lockstep/grad/named_tensors.hpp"
#include "lockstep/grad/reduction.hpp"

namespace lockstep::detail {

/// What a backward gives to the reduction. `losses` are walked where unused parameters are searched for; with
/// a `count` the gradients are those of a sum over that many, else of a mean.
struct Contribution {
  const std::vector<at::Tensor>& losses;
  std::optional<double> count = std::nullopt;
  bool nothing = false;  // this rank has no data
};

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
  /// `parameters` are those that require grad, each once, `sparse` those whose gradients will be; `comm` must
  /// outlive the reducer.
  Reducer(std::vector<NamedTensor> parameters, std::vector<char> sparse, Comm& comm, Hook hook,
          const DdpOptions& options)
      : parameters_(std::move(parameters)),
        options_(options),
        reduction_(parameters_, std::move(sparse), comm, std::move(hook), options_),
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

  /// Runs `run_backward` inside a reduction, or plainly inside `no_sync` and inside another backward of this
  /// model. What it reaches of other models is reduced too, after this one: the same order on every rank.
  template <class Run>
  void backward(const Contribution& contribution, Run&& run_backward) {
    const Inside inside(*this);
    const bool reduces = no_sync_depth == 0 && !inside.nested;
    if (contribution.count) count_ += *contribution.count;
    if (!reduces && !inside.outermost) return run_backward();
    if (reduces) {
      counts_ = contribution.count.has_value();
      nothing_ = contribution.nothing;
      open(&contribution.losses);
    }
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
  [[nodiscard]] BucketPlan plan() const { return reduction_.plan(); }
  [[nodiscard]] Hook& hook() { return reduction_.hook(); }
  /// Of the last reduction; the sum of the counts over ranks.
  [[nodiscard]] double total_count() const { return reduction_.total_count(); }
  void forward_begins() { reduction_.times.forward = ReductionTimes::Clock::now(); }

  [[nodiscard]] DdpReport report() const {
    DdpReport report = reduction_.report();
    report.ready_order = ready_order_;
    report.unused = unused_;
    return report;
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

  [[nodiscard]] bool searches() const { return options_.find_unused_parameters && !options_.static_graph; }

  void on_gradient(std::size_t i) {
    if (c10::GradMode::is_enabled())
      throw GradientError(
          "backward with create_graph is refused: gradients of gradients would not be averaged over "
          "the ranks; take them with torch::autograd::grad and put the result into the loss");
    // Through an output that the loss ignores a hook is called without a gradient.
    if (parameters_[i].tensor.mutable_grad().defined() || !searches()) seen_[i] = true;
    if (no_sync_depth > 0) return;
    if (!open_ || stale_) {
      if (open_backwards > 0)
        join();
      else
        open_bare();
    }
    ready_order_.push_back(i);
    if (!expected_.empty()) {
      if (fired_[i] == expected_[i] || taken_[i]) throw GradientError(unexpected_text(i));
      if (fired_[i] + 1 == expected_[i]) {
        take(i);
        reduction_.launch_ready();
      }
    }
    ++fired_[i];
  }

  [[nodiscard]] std::string unexpected_text(std::size_t i) const {
    const std::string name = fmt::format("parameter {} '{}'", i, parameters_[i].name);
    if (expected_[i] == 0)
      return name +
             " took no part in the first backward and does in this one, while static_graph promises that "
             "every backward takes the way of the first; leave it out";
    if (taken_[i] && fired_[i] == 0)
      return name +
             " was taken for unused, since the loss reaches it through a re-entrant backward (a checkpoint) "
             "alone; turn find_unused_parameters off, or use static_graph";
    if (searches())
      return name +
             " got more than one gradient in this backward, which find_unused_parameters cannot foresee in a "
             "re-entrant backward (a checkpoint); turn it off, or use static_graph";
    return fmt::format(
        "{} got {} gradients in this backward and {} in the first, after which its bucket is reduced; keep "
        "the "
        "number of uses in re-entrant backwards (checkpoints) fixed",
        name, fired_[i] + 1, expected_[i]);
  }

  void take(std::size_t i) {
    taken_[i] = true;
    reduction_.take(i);
  }

  /// `losses` is null where they are not known: inside a bare backward.
  void open(const std::vector<at::Tensor>* losses) {
    if (open_) {
      stale_ = false;
      close(
          std::make_exception_ptr(GradientError("an earlier loss.backward() did not end, so its gradients "
                                                "were never reduced; call ddp.backward(loss), "
                                                "which ends whatever happens")));
    }
    if (rebuild_due_) rebuild();
    std::fill(fired_.begin(), fired_.end(), 0);
    std::fill(taken_.begin(), taken_.end(), false);
    ready_order_.clear();
    reduction_.open(counts_);
    open_ = true;
    take_known_unused(losses);
  }

  /// What will get no gradient goes into its bucket now, so that the bucket need not wait for the end.
  void take_known_unused(const std::vector<at::Tensor>* losses) {
    if (nothing_ || expected_.empty()) return;
    if (options_.static_graph) {
      for (std::size_t i = 0; i < parameters_.size(); ++i)
        if (expected_[i] == 0) take(i);
    } else if (searches() && losses) {
      const GraphNodes reached = reachable_nodes(*losses);
      for (std::size_t i = 0; i < parameters_.size(); ++i)
        if (!reached.contains(hooks_[i].node())) take(i);
    }
  }

  /// The `ddp.backward` of another model reaches this one: that call ends this reduction too.
  void join() {
    counts_ = nothing_ = false;
    open(nullptr);
    joined_reductions.push_back({this, [](void* reducer, const std::exception_ptr& failure) {
                                   static_cast<Reducer*>(reducer)->close(failure);
                                 }});
  }

  /// A hook fires though no `ddp.backward` runs: the reduction ends with this backward of the engine. Where
  /// that throws, the engine drops the callback without calling it, and the next reduction finds this one
  /// stale.
  void open_bare() {
    counts_ = nothing_ = false;
    open(nullptr);
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
    RECORD_FUNCTION("lockstep::finish_reduction", std::vector<c10::IValue>());
    BackwardReport report;
    if (failure) report.thrown = first_line(failure);
    try {
      complete(report);
      const double count = std::exchange(count_, 0);
      reduction_.launch_rest(count, seen_, report.thrown.has_value() || !report.missing.empty());
      const bool flagged = reduction_.wait(failure, iteration_);
      if (flagged && reported(report)) fail(report, failure);
      reduction_.give();
    } catch (...) {
      open_ = false;
      drop();
      if (failure) std::rethrow_exception(failure);
      throw;
    }
    open_ = false;
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
        take(i);
      } catch (...) {
        if (!report.thrown) report.thrown = first_line(std::current_exception());
        reduction_.poison(i);
      }
    }
    reduction_.launch_ready();
    // Also what took all gradients and threw afterwards must be seen.
    if (report.thrown) reduction_.poison_last();
  }

  /// Whether some rank left a slot poisoned; not-a-number alone is no error, a model may diverge.
  bool reported(const BackwardReport& mine) {
    reports_.clear();
    bool any = false;
    for (const std::string& bytes : reduction_.comm().all_gather_bytes(serialize(mine))) {
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
    reduction_.drop();
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
    std::vector<std::size_t> order;
    std::vector<char> placed(parameters_.size());
    for (std::size_t k = ready_order_.size(); k-- > 0;)
      if (!std::exchange(placed[ready_order_[k]], true)) order.push_back(ready_order_[k]);
    std::reverse(order.begin(), order.end());
    for (std::size_t i = 0; i < placed.size(); ++i)
      if (!placed[i]) order.push_back(i);
    rebuild_order_ = std::move(order);
    rebuild_due_ = true;
  }

  /// Once: buckets in the order in which rank 0's gradients became ready.
  void rebuild() {
    const auto length = static_cast<std::int64_t>(rebuild_order_.size());
    at::Tensor order =
        at::empty({length}, at::TensorOptions(at::kLong).device(parameters_[0].tensor.device()));
    at::Tensor host = at::empty({length}, at::kLong);
    std::copy(rebuild_order_.begin(), rebuild_order_.end(), host.mutable_data_ptr<std::int64_t>());
    order.copy_(host);
    reduction_.comm().broadcast(order, 0).wait_host();
    host.copy_(order);
    const auto* first = host.const_data_ptr<std::int64_t>();
    reduction_.rebuild({first, first + length});
    rebuild_due_ = false;
    rebuilt_ = true;
  }

  std::vector<NamedTensor> parameters_;
  DdpOptions options_;
  BucketReduction<Comm, Hook> reduction_;
  std::vector<char> taken_;    // lies in its bucket already, by parameter
  std::vector<int> fired_;     // gradients that came in this reduction, by parameter
  std::vector<int> expected_;  // how many come; empty until that is known
  std::vector<char> seen_;     // has a gradient since the last reduction, also from no_sync
  std::vector<std::size_t> ready_order_, rebuild_order_, unused_;
  std::vector<BackwardReport> reports_;
  double count_ = 0;  // samples since the last reduction
  std::size_t iteration_ = 0;
  bool open_ = false, inside_ = false, stale_ = false, rebuild_due_ = false, rebuilt_ = false;
  bool counts_ = false, nothing_ = false;
  std::shared_ptr<Reducer*> self_ = std::make_shared<Reducer*>(this);
  std::vector<AccumulateHook<OnGradient>> hooks_;  // last: gone before what they refer to
};

}  // namespace lockstep::detail
