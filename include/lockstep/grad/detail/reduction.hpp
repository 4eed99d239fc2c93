#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/capture_scope.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/backward_report.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/gradient_buckets.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/detail/poison_check.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

struct SparseSum {
  at::Tensor sum;         // undefined if no rank has a gradient
  bool flagged = false;   // some rank has failed
  std::size_t bytes = 0;  // sent by this rank
};

/// Sums a [rows, ...] gradient over the ranks. `gradient` is sparse in its first dimension, or undefined if
/// this rank has none. `flag` reports to every rank that this one has failed. Collective and blocking;
/// `finish(work)` waits for a Work.
///
/// Adds the ranks' rows in rank order, as Gloo's sparse all-reduce does: bitwise equal to Python.
template <Communicator Comm, class Finish>
SparseSum sum_rows(Comm& comm, const at::Tensor& gradient, const at::Tensor& parameter, bool flag,
                   const Finish& finish) {
  SparseSum result;
  const at::Tensor mine = !flag && gradient.defined() ? gradient.coalesce() : at::Tensor();
  const std::int64_t rows = mine.defined() ? mine._nnz() : -1;
  const auto numbers = at::TensorOptions(at::kLong).device(parameter.device());
  at::Tensor counts = at::empty({comm.size()}, numbers);
  const auto gather = [&](const at::Tensor& output, const at::Tensor& input) {
    auto work = comm.all_gather(output, input);
    finish(work);
    result.bytes += input.nbytes();
  };
  gather(counts, at::full({1}, flag ? -2 : rows, numbers));
  counts = counts.cpu();
  const auto* count = const_data<std::int64_t>(counts);
  result.flagged = std::any_of(count, count + comm.size(), [](std::int64_t n) { return n == -2; });
  const std::int64_t most = *std::max_element(count, count + comm.size());
  if (result.flagged || most < 0) return result;

  auto sizes = parameter.sizes().vec();
  sizes[0] = most;
  at::Tensor own_indices = at::zeros({most}, numbers), own_values = at::zeros(sizes, parameter.options());
  if (rows > 0) {
    own_indices.narrow(0, 0, rows).copy_(mine._indices()[0]);
    own_values.narrow(0, 0, rows).copy_(mine._values());
  }
  sizes.insert(sizes.begin(), comm.size());
  at::Tensor indices = at::empty({comm.size(), most}, numbers),
             values = at::empty(sizes, parameter.options());
  gather(indices, own_indices);
  gather(values, own_values);
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::int64_t length = std::max<std::int64_t>(count[rank], 0);
    const at::Tensor part = at::sparse_coo_tensor(indices[rank].narrow(0, 0, length).unsqueeze(0),
                                                  values[rank].narrow(0, 0, length), parameter.sizes());
    if (!result.sum.defined())
      result.sum = part;
    else
      result.sum += part;
  }
  result.sum = result.sum.coalesce();
  return result;
}

/// One small integer all-reduce, like Python's, that tells every rank which parameters were used on any rank
/// and whether any rank has failed.
template <Communicator Comm>
class UsageExchange {
 public:
  /// `parameters` is 0 if only failures are exchanged.
  UsageExchange(std::size_t parameters, at::Device device)
      : sent_(at::zeros({static_cast<std::int64_t>(parameters) + 1},
                        at::TensorOptions(at::kInt).device(device))),
        host_(at::zeros({static_cast<std::int64_t>(parameters) + 1}, at::kInt)) {}

  /// Launches the all-reduce. `parameters` tells which have a gradient on this rank. `failed`: this rank
  /// has failed. Collective; does not block on the collective.
  void start(Comm& comm, std::span<const ParameterEntry> parameters, bool failed) {
    auto* number = host_.mutable_data_ptr<std::int32_t>();
    const std::int64_t count = host_.numel() - 1;
    for (std::int64_t i = 0; i < count; ++i) number[i] = parameters[static_cast<std::size_t>(i)].seen;
    number[count] = failed;
    sent_.copy_(host_);
    work_.emplace(comm.all_reduce(sent_, ReduceOp::sum));
  }
  [[nodiscard]] std::optional<typename Comm::Work>& work() { return work_; }
  void read() {
    work_.reset();
    host_.copy_(sent_);
  }
  void abandon() {
    // A work in flight may still write to the old tensor.
    if (std::exchange(work_, std::nullopt)) sent_ = at::zeros_like(sent_);
  }

  [[nodiscard]] bool used(std::size_t i) const { return const_data<std::int32_t>(host_)[i] != 0; }
  [[nodiscard]] bool failed() const { return const_data<std::int32_t>(host_)[host_.numel() - 1] != 0; }
  [[nodiscard]] std::size_t bytes() const { return sent_.nbytes(); }

 private:
  at::Tensor sent_, host_;
  std::optional<typename Comm::Work> work_;
};

struct ReductionTimes {
  using Clock = std::chrono::steady_clock;
  Clock::time_point forward, backward, gradients, first_launch, end;
};

/// Threads of the communicator may write while they are read.
class CompletionTimes {
  using Clock = ReductionTimes::Clock;

 public:
  explicit CompletionTimes(std::size_t buckets) : ticks_(buckets) {}

  void clear() {
    for (auto& ticks : ticks_) ticks = 0;
  }
  /// Notes the current time, unless the bucket has a time already.
  void note(std::size_t bucket) {
    Clock::rep none = 0;
    ticks_[bucket].compare_exchange_strong(none, Clock::now().time_since_epoch().count());
  }
  [[nodiscard]] std::optional<Clock::time_point> operator[](std::size_t bucket) const {
    const Clock::rep ticks = ticks_[bucket];
    if (ticks == 0) return std::nullopt;
    return Clock::time_point(Clock::duration(ticks));
  }

 private:
  std::vector<std::atomic<Clock::rep>> ticks_;
};

/// Labels collectives with their bucket, for a Labelled communicator.
template <class Comm>
class BucketLabels {
 public:
  template <class Buckets>
  void name([[maybe_unused]] const Buckets& buckets,
            [[maybe_unused]] std::span<const ParameterEntry> parameters) {
    if constexpr (Labelled<Comm>) {
      labels_.clear();
      for (std::size_t b = 0; b < buckets.size(); ++b)
        labels_.push_back(std::make_shared<const std::string>(
            detail::formatted("bucket {} of {}, with {}", b + 1, buckets.size(),
                              parameter_list(buckets.members(b), parameters))));
    }
  }

  class Scope {
   public:
    Scope(Comm& comm, const std::shared_ptr<const std::string>& label) : comm_(comm) {
      if constexpr (Labelled<Comm>) comm_.label(label);
    }
    ~Scope() {
      if constexpr (Labelled<Comm>) comm_.label(nullptr);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Comm& comm_;
  };
  [[nodiscard]] Scope scope(Comm& comm, std::size_t bucket) const {
    return Scope(comm, labels_.empty() ? nullptr : labels_[bucket]);
  }

 private:
  std::vector<std::shared_ptr<const std::string>> labels_;
};

/// One reduction round: the collectives, their launch order and their completion.
///
/// Every rank runs the same collectives in the same order: the counts, unless they travel in the tail of the last
/// bucket; the dense buckets by index; the usage exchange, if it is enabled; and, while the buckets are waited for, the
/// sparse buckets by index. With a hook without `propagates_nan`, the usage exchange comes last.
template <class Comm, class Hook>
class BucketReduction {
  using Clock = ReductionTimes::Clock;
  using Handle =
      decltype(std::declval<Hook&>().start(std::declval<Comm&>(), std::declval<GradientBucket&>()));

 public:
  BucketReduction(std::span<ParameterEntry> parameters, Comm& comm, Hook hook, const DdpOptions& options)
      : parameters_(parameters), comm_(comm), hook_(std::move(hook)), options_(options) {
    make_buckets(plan_by_registration(parameters_, caps_at_first(options)));
    asks_usage_ = options.find_unused_parameters || options.static_graph;
    if (asks_usage_ || !Hook::propagates_nan)
      usage_.emplace(asks_usage_ ? parameters.size() : 0, parameters[0].tensor.device());
  }

  [[nodiscard]] BucketPlan plan() const {
    BucketPlan plan;
    for (std::size_t b = 0; b < buckets_->size(); ++b) plan.push_back(buckets_->members(b));
    return plan;
  }
  [[nodiscard]] Comm& comm() { return comm_; }
  [[nodiscard]] Hook& hook() { return hook_; }
  [[nodiscard]] double total_count() const { return total_count_; }

  /// Throws UsageError if `count` is too large for a float32 bucket: the sum of such counts over the ranks
  /// could be rounded.
  void check_count(double count) const {
    if (count <= largest_float_count || !counts_in_bucket() ||
        parameters_[*buckets_->last_view()].dtype != at::kFloat)
      return;
    throw UsageError(detail::formatted(
        "rank {}: backward_sum got the count {} in one reduction, but counts that travel with float32 "
        "gradients are exact up to {} per rank: divide the sum and the count by the same number",
        comm_.rank(), count, largest_float_count));
  }

  /// `count`: see Contribution. Counts that do not travel in a bucket are all-reduced here, which blocks.
  void open(std::optional<double> count) {
    if (options_.skip_all_reduce_unused_params && !knows_skipped_ && reductions_ > 0) note_skipped();
    counting_ = Counting::none;
    if (count) counting_ = counts_in_bucket() ? Counting::in_bucket : Counting::apart;
    weight_.reset();
    for (std::size_t b = 0; b < buckets_->size(); ++b) pending_[b] = buckets_->members(b).size();
    next_ = 0;
    bytes_before_ = bytes();
    hook_error_ = nullptr;
    if (completions_) completions_->clear();
    begun_ = true;
    times.backward = times.first_launch = Clock::now();
    if (counting_ == Counting::apart) all_reduce_counts(*count);
  }

  /// Copies parameter i's gradient into its bucket. `seen`: see GradientBuckets::copy_to_bucket's `attach`.
  void copy_to_bucket(std::size_t i, bool seen) {
    buckets_->copy_to_bucket(i, weight_, counting_ == Counting::none, seen);
    --pending_[parameters_[i].bucket];
  }
  void allocate(std::size_t i) { buckets_->allocate(parameters_[i].bucket); }
  void poison(std::size_t i) {
    buckets_->poison(i);
    --pending_[parameters_[i].bucket];
  }
  void poison_last() {
    if (const auto last = buckets_->last_view()) buckets_->poison(*last);
  }

  /// Launches complete buckets in index order, up to but not including the last.
  void launch_ready() {
    while (next_ < last_bucket_ && pending_[next_] == 0) launch(next_++);
  }

  /// Launches the remaining buckets and, for hooks that propagate NaN, the usage exchange.
  void launch_rest(double count, bool failed) {
    times.gradients = Clock::now();
    failed_ = failed;
    while (next_ < buckets_->size()) {
      if (counting_ == Counting::in_bucket && next_ == last_bucket_)
        launch_with_count(next_++, count);
      else
        launch(next_++);
    }
    if (Hook::propagates_nan && asks_usage_) ask_usage();
  }

  /// Returns whether the host can go on while a device checks the buckets of the open reduction: nothing else
  /// in it blocks the host, and the state of the ranks stays equal if one of them fails. Equal on every rank.
  [[nodiscard]] bool can_check_late() const {
    return Hook::propagates_nan && !StatefulHook<Hook> && comm_.size() > 1 && !CaptureScope::active() &&
           counting_ == Counting::none && !asks_usage_ && !any_sparse_ && !poison_check_.read_late().empty();
  }

  /// Waits for all collectives of the reduction. Stream-ordered, but blocks the host after a local failure
  /// and to read flags. Returns false if no rank can have poisoned a bucket or flagged a failure. With
  /// `late`, launches the check of the buckets on a device into `late` and leaves the reading to the caller,
  /// unless the host has found a failure before. An error of the hook aborts the communicator and is thrown,
  /// unless the usage exchange reports it; then `hook_error` returns it.
  bool wait(const std::exception_ptr& failure, std::size_t iteration, LateNanCheck* late) {
    // After a local failure the peers get two seconds to join and learn of it. The error must not be delayed longer.
    const auto deadline = Clock::now() + throw_together;
    const auto finish = [&](auto& work) {
      if (failure)
        work.synchronize(std::max(std::chrono::milliseconds(0),
                                  std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now())));
      else
        work.wait();
    };
    bool flagged = false;
    for (std::size_t b = 0; b < works_.size(); ++b) {
      try {
        if (works_[b]) finish(*works_[b]);
        if (buckets_->sparse(b)) flagged = sum_sparse(b, finish) || flagged;
        if (completions_) completions_->note(b);
      } catch (const TimeoutError& error) {
        abort_failed_step(failure);
        if constexpr (Labelled<Comm>) throw;  // the error already names its bucket, which may be another one
        throw TimeoutError(detail::formatted(
            "{} (bucket {} of {}, with {}, in backward {})", error.what(), b + 1, works_.size(),
            parameter_list(buckets_->members(b), parameters_), iteration + 1));
      } catch (const CommunicationError&) {
        throw;  // the communicator is unusable
      } catch (...) {
        // The hook's own error. The other buckets are in flight and must complete before their memory is used.
        if (!hook_error_) hook_error_ = std::current_exception();
      }
      works_[b].reset();
    }
    // Without NaN propagation the buckets carry no failure, so the flag travels separately. A capture cannot
    // contain this exchange, and ends with the error.
    if (!Hook::propagates_nan && !CaptureScope::active()) {
      failed_ = failed_ || hook_error_;
      ask_usage();
    } else if (hook_error_) {
      // The other ranks may have valid averages, and would step with them.
      telling_own_error(
          comm_.size(), [&] { std::rethrow_exception(hook_error_); },
          [&] {
            if (!CaptureScope::active())
              abort_for_others(comm_, detail::formatted("the communication hook '{}' threw: ", hook_.name()));
          });
    }
    try {
      if (usage_ && usage_->work()) {
        finish(*usage_->work());
        usage_->read();
        flagged = flagged || usage_->failed();
      }
    } catch (const TimeoutError&) {
      abort_failed_step(failure);
      throw;
    }
    times.end = Clock::now();
    if (options_.lazy_bucket_allocation) check_views();
    // A single rank needs no NaN check. A captured step has run before, and had every gradient on every rank.
    if (comm_.size() == 1)
      flagged = flagged || failed_;
    else if (Hook::propagates_nan && !CaptureScope::active())
      flagged = flagged || poison_check_.any_now() || poisoned_late(late);
    // Where errors are reported after results, an abort may have left the results incomplete.
    if constexpr (requires { comm_.check_error(); }) comm_.check_error();
    return flagged;
  }

  void copy_from_bucket() {
    if (counting_ != Counting::none) divide_by_counts();
    if (asks_usage_) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].used = usage_->used(i);
      // The first reduction in which any parameter was used determines all later ones.
      if (options_.static_graph)
        asks_usage_ = std::none_of(parameters_.begin(), parameters_.end(),
                                   [](const ParameterEntry& parameter) { return parameter.used; });
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      ParameterEntry& parameter = parameters_[i];
      if (!parameter.used) continue;
      if (parameter.sparse)
        parameter.gradient() = std::exchange(parameter.sum, {});
      else
        buckets_->copy_from_bucket(i);
    }
    release();
    ++reductions_;
    begun_ = false;
    bytes_last_ = bytes() - bytes_before_;
  }

  /// Returns a hash of this rank's gradients in the first bucket of the first reduction; 0 if they were zero.
  [[nodiscard]] std::uint64_t first_hash() const { return first_hash_; }

  /// Counts a reduction that has failed on this rank and not yet on the others.
  void count_failed() { ++reductions_; }
  /// A run is resumed after so many reductions.
  void set_iteration(std::size_t before) {
    resumed_ = static_cast<std::int64_t>(before) - static_cast<std::int64_t>(reductions_);
  }

  /// Abandons the reduction after a failure, and rolls a stateful hook back.
  void abandon() {
    // Collectives that are still in flight keep writing to the old buckets: replace the buckets.
    const bool under_way =
        std::any_of(works_.begin(), works_.end(), [](const auto& work) { return work.has_value(); });
    if (under_way) make_buckets(plan());
    release(/*abandoned=*/true);
    if (usage_) usage_->abandon();
    if constexpr (StatefulHook<Hook>)
      if (begun_) hook_.rollback();
    begun_ = false;
  }

  [[nodiscard]] const std::exception_ptr& hook_error() const { return hook_error_; }
  /// Returns whether any rank used parameter i; true while usage is exchanged in every reduction.
  [[nodiscard]] bool used_anywhere(std::size_t i) const { return asks_usage_ || parameters_[i].used; }

  /// Rebuilds the buckets and resets a stateful hook. `only_adoptable`: see GradientBuckets.
  void rebuild(const BucketPlan& plan, bool only_adoptable) {
    make_buckets(plan, only_adoptable);
    if constexpr (StatefulHook<Hook>) hook_.reset();
  }

  void record_completions(bool enabled) {
    completions_ = enabled ? std::make_shared<CompletionTimes>(buckets_->size()) : nullptr;
  }

  [[nodiscard]] DdpReport report() const {
    const auto seconds = [](Clock::time_point from, Clock::time_point to) {
      return std::max(0.0, std::chrono::duration<double>(to - from).count());
    };
    DdpReport report;
    report.reductions = static_cast<std::int64_t>(reductions_);
    report.hook = std::string(hook_.name());
    for (std::size_t b = 0; b < buckets_->size(); ++b) {
      BucketReport bucket;
      bucket.parameters = buckets_->members(b);
      bucket.sparse = buckets_->sparse(b);
      for (const std::size_t i : bucket.parameters)
        if (!bucket.sparse && !buckets_->empty(b))
          bucket.bytes += static_cast<std::int64_t>(parameters_[i].bytes);
      bucket.launched = seconds(times.backward, launched_[b]);
      if (completions_)
        if (const auto completed = (*completions_)[b]) bucket.completed = seconds(times.backward, *completed);
      report.buckets.push_back(std::move(bucket));
    }
    if (reductions_ == 0) return report;
    report.began = times.backward;
    if (times.forward != Clock::time_point{}) report.forward = seconds(times.forward, times.backward);
    report.backward = seconds(times.backward, times.gradients);
    report.communication = seconds(times.first_launch, times.end);
    report.overlap = seconds(times.first_launch, std::min(times.gradients, times.end));
    report.bytes = bytes_last_;
    report.bytes_so_far = bytes();
    return report;
  }

  ReductionTimes times;

 private:
  /// How the counts of a `backward_sum` travel; see counts_in_bucket.
  enum class Counting { none, in_bucket, apart };

  void make_buckets(const BucketPlan& plan, bool only_adoptable = false) {
    buckets_.emplace(parameters_, plan, options_, Hook::predivides ? comm_.size() : 1, only_adoptable);
    works_.clear();
    works_.resize(plan.size());
    pending_.resize(plan.size());
    launched_.assign(plan.size(), {});
    if (completions_) record_completions(true);
    const auto last = buckets_->last_view();
    last_bucket_ = last ? parameters_[*last].bucket : 0;
    check_views();
    any_sparse_ = std::any_of(parameters_.begin(), parameters_.end(),
                              [](const ParameterEntry& parameter) { return parameter.sparse; });
    labels_.name(*buckets_, parameters_);
  }

  void release(bool abandoned = false) {
    if (options_.lazy_bucket_allocation) poison_check_ = {};  // its elements hold the memory
    buckets_->end(abandoned);
  }
  /// Leaves out the buckets that no rank has used in the first reduction with used parameters.
  void note_skipped() {
    knows_skipped_ = std::any_of(parameters_.begin(), parameters_.end(), std::mem_fn(&ParameterEntry::used));
    if (!knows_skipped_) return;
    bool any = false;
    for (ParameterEntry& parameter : parameters_)
      any = (parameter.skipped = !parameter.used && !parameter.sparse) || any;
    if (any) make_buckets(plan());
  }
  void check_views() {
    poison_check_ = {};
    for (const ParameterEntry& parameter : parameters_)
      if (parameter.view.defined()) poison_check_.add(parameter.view);
  }

  // Returns whether a bucket view on a device may be poisoned; false with `late`, which then runs the check.
  bool poisoned_late(LateNanCheck* late) {
    if (poison_check_.read_late().empty()) return false;
    LateNanCheck now;
    LateNanCheck& check = late ? *late : now;
    // The other ranks would exchange their reports without this rank.
    return telling_own_error(
        comm_.size(),
        [&] {
          check.launch(poison_check_.read_late());
          return !late && check.read();
        },
        [&] { abort_for_others(comm_, "the check of the gradient buckets threw: "); });
  }

  void launch(std::size_t b) {
    if (buckets_->sparse(b) || buckets_->empty(b)) return;
    RECORD_FUNCTION("lockstep::reduce_bucket", std::vector<c10::IValue>());
    GradientBucket& bucket = (*buckets_)[b];
    bucket.iteration = static_cast<std::int64_t>(reductions_) + resumed_;
    const auto naming = labels_.scope(comm_, b);
    // The peers wait for collectives that only the hook could have launched: abort.
    telling_own_error(
        comm_.size(),
        [&] {
          buckets_->finish(b, weight_, counting_ == Counting::none);
          note_launch(b);
          watch(b, works_[b].emplace(hook_.start(comm_, bucket)));
        },
        [&] {
          abort_for_others(comm_, detail::formatted("the communication hook '{}' threw for bucket {} of {}: ",
                                                    hook_.name(), b + 1, buckets_->size()));
        });
  }
  // Records the completion where the work tells of it. Elsewhere the return of its wait counts as completion.
  template <class Work>
  void watch([[maybe_unused]] std::size_t b, [[maybe_unused]] Work& work) {
    if constexpr (requires { work.at_completion(std::function<void()>()); })
      if (completions_) work.at_completion([times = completions_, b] { times->note(b); });
  }
  void note_launch(std::size_t b) {
    const bool first =
        std::none_of(works_.begin(), works_.end(), [](const auto& work) { return bool(work); });
    launched_[b] = Clock::now();
    if (!first) return;
    times.first_launch = launched_[b];
    if (reductions_ > 0) return;
    const at::Tensor host = (*buckets_)[b].flat.cpu();
    const std::string_view bytes(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
    first_hash_ = host.any().item<bool>() ? fnv1a(bytes.substr(0, 1 << 20)) : 0;
  }

  /// Returns whether the counts travel in the tail of the last bucket, as two numbers: count / 2^16 and the remainder.
  /// In float32 the sums of these over 256 ranks are exact, as all integers up to 2^24 are. With more ranks, narrower
  /// dtypes and other hooks, the counts are all-reduced first and separately, in float64.
  [[nodiscard]] bool counts_in_bucket() const {
    if (!std::same_as<Hook, AllReduceHook> || !buckets_->last_view()) return false;
    const at::ScalarType type = parameters_[*buckets_->last_view()].dtype;
    return (type == at::kFloat && comm_.size() <= 256) || type == at::kDouble;
  }
  static constexpr double count_unit = 65536;
  static constexpr double largest_float_count = count_unit * 65536;

  void launch_with_count(std::size_t b, double count) {
    if constexpr (std::same_as<Hook, AllReduceHook>) {
      buckets_->finish(b, weight_, counting_ == Counting::none);
      note_launch(b);
      RECORD_FUNCTION("lockstep::reduce_bucket", std::vector<c10::IValue>());
      const at::Tensor& flat = buckets_->with_tail(b);
      const double high = std::floor(count / count_unit);
      at::Tensor tail = flat.narrow(0, flat.numel() - GradientBuckets::tail, GradientBuckets::tail);
      tail[0].fill_(high);
      tail[1].fill_(count - high * count_unit);
      counted_tail_ = std::move(tail);
      const auto naming = labels_.scope(comm_, b);
      watch(b, works_[b].emplace(comm_.all_reduce(flat, ReduceOp::sum)));
      extra_bytes_ += sent_bytes_of(flat.nbytes());
    }
  }

  /// Before the first gradient is copied, so that buckets hold means: sums could overflow a narrow dtype.
  void all_reduce_counts(double count) {
    at::Tensor sum =
        at::full({1}, count, at::TensorOptions(at::kDouble).device(parameters_[0].tensor.device()));
    comm_.all_reduce(sum, ReduceOp::sum).synchronize();
    extra_bytes_ += sent_bytes_of(sum.nbytes());
    total_count_ = sum.template item<double>();
    weight_ = at::native::wrapped_scalar_tensor(mean_factor());
  }
  /// Returns the factor that turns this rank's gradient sum into its contribution to the reduced mean.
  [[nodiscard]] double mean_factor() const {
    return total_count_ == 0 ? 0 : (Hook::predivides ? 1.0 : comm_.size()) / total_count_;
  }

  void divide_by_counts() {
    if (counting_ == Counting::in_bucket) {
      const at::Tensor numbers = std::exchange(counted_tail_, {}).to(at::kDouble).cpu();
      total_count_ = numbers[0].item<double>() * count_unit + numbers[1].item<double>();
    }
    // A total count of 0 makes every gradient zero, whatever the sums are.
    const bool nothing = total_count_ == 0;
    if (counting_ == Counting::in_bucket || nothing)
      for (std::size_t b = 0; b < buckets_->size(); ++b)
        if (!buckets_->sparse(b) && !buckets_->empty(b)) buckets_->multiply(b, mean_factor());
    for (ParameterEntry& parameter : parameters_)
      if (parameter.sum.defined()) parameter.sum.mul_(mean_factor());
    if constexpr (StatefulHook<Hook>)
      if (nothing) hook_.rollback();
  }

  void ask_usage() {
    usage_->start(comm_, parameters_, failed_);
    extra_bytes_ += sent_bytes_of(usage_->bytes());
  }

  template <class Finish>
  bool sum_sparse(std::size_t b, const Finish& finish) {
    ParameterEntry& parameter = parameters_[buckets_->members(b)[0]];
    SparseSum sum = sum_rows(comm_, std::exchange(parameter.rows, {}), parameter.tensor, failed_, finish);
    parameter.sum = std::move(sum.sum);
    extra_bytes_ += sent_bytes_of(sum.bytes);
    return sum.flagged;
  }

  /// Aborts the communicator and rethrows the current TimeoutError if this rank has failed; otherwise a
  /// no-op. The reducer throws `failure` in its place. Call it in the handler of the TimeoutError.
  void abort_failed_step(const std::exception_ptr& failure) {
    if (!failure) return;
    comm_.abort(first_line(failure));
    throw;  // the timeout; the reducer replaces it by `failure`
  }

  [[nodiscard]] std::int64_t bytes() const { return hook_.wire_bytes() + extra_bytes_; }
  [[nodiscard]] std::int64_t sent_bytes_of(std::size_t bytes) const {
    return comm_.size() > 1 ? static_cast<std::int64_t>(bytes) : 0;
  }

  std::span<ParameterEntry> parameters_;
  Comm& comm_;
  Hook hook_;
  const DdpOptions& options_;
  std::optional<GradientBuckets> buckets_;
  PoisonCheck poison_check_;  // of the buckets' views
  std::vector<std::optional<Handle>> works_;
  BucketLabels<Comm> labels_;
  std::vector<std::size_t> pending_;  // by bucket: gradients not yet copied
  std::vector<Clock::time_point> launched_;
  std::shared_ptr<CompletionTimes> completions_;  // null unless recorded
  std::optional<UsageExchange<Comm>> usage_;
  at::Tensor weight_;  // scalar factor of each sum, if the counts were all-reduced first
  at::Tensor counted_tail_;
  std::uint64_t first_hash_ = 0;
  double total_count_ = 0;
  std::size_t next_ = 0;         // the bucket to launch next
  std::size_t last_bucket_ = 0;  // the last non-empty dense bucket; only `launch_rest` launches it
  std::int64_t resumed_ = 0;     // reductions before those of this object
  std::size_t reductions_ = 0;
  std::int64_t extra_bytes_ = 0, bytes_before_ = 0, bytes_last_ = 0;
  std::exception_ptr hook_error_;
  Counting counting_ = Counting::none;
  bool any_sparse_ = false;
  bool begun_ = false, failed_ = false, asks_usage_ = false;
  bool knows_skipped_ = false;
};

}  // namespace lockstep::inline v0_1::detail
