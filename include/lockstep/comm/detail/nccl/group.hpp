#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/nccl/buffers.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/device_identity.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/nccl/in_flight_op.hpp"
#include "lockstep/comm/detail/nccl/waiting.hpp"
#include "lockstep/comm/detail/nccl/watchdog.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Owns a stream of a device. Null until make().
template <NcclDevice D>
class OwnedStream {
 public:
  using Stream = typename D::Stream;

  explicit OwnedStream(const D& device) : device_(device) {}
  ~OwnedStream() {
    if (stream_ != Stream{}) device_.destroy_stream(stream_);
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  /// Creates the stream. Throws the device's exceptions. Call it once.
  void make() { stream_ = device_.make_stream(); }
  [[nodiscard]] const Stream& get() const { return stream_; }

 private:
  D device_;
  Stream stream_{};
};

/// The device and NCCL calls that the program's threads have entered and not returned from. Any of them may
/// block: a launch blocks while the device's queue is full.
///
/// Thread-safe. No function blocks.
class ActiveCalls {
 public:
  using Clock = std::chrono::steady_clock;

  /// A call that is active while this object lives.
  class Scope {
   public:
    Scope(ActiveCalls& calls, const Call& call, const Label& label)
        : calls_(calls), call_(call), label_(label) {
      std::lock_guard lock(calls_.mutex_);
      previous_ = std::exchange(calls_.newest_, this);
      if (previous_) previous_->next_ = this;
    }
    ~Scope() {
      std::lock_guard lock(calls_.mutex_);
      (next_ ? next_->previous_ : calls_.newest_) = previous_;
      if (previous_) previous_->next_ = next_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class ActiveCalls;

    ActiveCalls& calls_;
    const Call call_;
    const Label label_;
    const Clock::time_point entered_ = Clock::now();
    Scope *previous_ = nullptr, *next_ = nullptr;  // the neighbours in the list, by age
  };

  struct Entry {
    Call call;
    Label label;
    Clock::time_point entered;  // later than `call.start` if the call was issued earlier
  };
  /// Returns the call that was entered first, std::nullopt if none is active.
  [[nodiscard]] std::optional<Entry> oldest() const {
    std::lock_guard lock(mutex_);
    const Scope* oldest = newest_;
    while (oldest && oldest->previous_) oldest = oldest->previous_;
    if (!oldest) return std::nullopt;
    return Entry{oldest->call_, oldest->label_, oldest->entered_};
  }

 private:
  mutable std::mutex mutex_;
  Scope* newest_ = nullptr;
};

/// The state that a communicator and its Works share: the GroupState, NCCL's handle, the stream, the works in
/// flight, and two watchdog threads that run while the program computes or blocks in a call.
///
/// The watchdog aborts the works in flight when another rank has failed, or when the timeout of the oldest
/// collective in flight, or of the oldest call that the program has not returned from, has expired. It takes
/// no lock that is held across a call on the device or on NCCL, and calls on neither before it aborts: both
/// may block as long as a collective hangs. The device watchdog does call on both. It finds completed works,
/// and aborts the works in flight when NCCL or the device reports an error. An abort ends the work on the
/// stream; the program's next call throws the error.
template <NcclDevice D>
class NcclGroup {
 public:
  using Clock = std::chrono::steady_clock;
  using Comm = typename D::Comm;
  using Stream = typename D::Stream;
  using InFlightOpPtr = typename InFlightOps<D>::InFlightOpPtr;

  /// Constructs the group of all ranks in `ranks`, which join a rendezvous in the store.
  NcclGroup(const World& world, std::vector<int> ranks, std::string name, const NcclOptions& options)
      : options_(checked(options)),
        state_(world, std::move(ranks), std::move(name), options_.timeout, [this] { handle_.abort(); }),
        device_(open_together<D>(state_.membership(), options_)),
        handle_(device_),
        in_flight_(device_),
        stream_(device_) {
    start([&](const Call& call) {
      const std::string id = state_.membership().from_first(
          "NCCL id", [&] { return guarded(call, [&] { return device_.make_id(); }); });
      return guarded(call, [&] {
        return handle_.make([&](Comm& made) { return device_.init(made, state_.size(), id, state_.rank()); });
      });
    });
  }

  /// Splits off a group of some of `parent`'s ranks, this rank among them, for `call`. `name` is its name.
  NcclGroup(NcclGroup& parent, const Call& call, std::vector<int> ranks, std::string name)
      : options_(parent.options_),
        state_(parent.state_.world(), std::move(ranks), std::move(name), options_.timeout,
               [this] { handle_.abort(); }),
        device_(parent.device_),
        handle_(device_),
        in_flight_(device_),
        stream_(device_) {
    start([&](const Call&) {
      handle_.adopt(parent.split(call, 0));
      return NcclResult::in_progress;
    });
  }
  /// Takes part in a split that this rank does not join.
  void stay_out_of_split(const Call& call) { split(call, no_colour); }

  ~NcclGroup() {
    device_watchdog_.reset();
    watchdog_.reset();
    handle_.abort();  // no-op after an orderly destroy
    // Keep the memory of aborted works until they end, which is soon.
    const auto end = Clock::now() + std::chrono::seconds(1);
    try {
      while (!in_flight_.empty() && Clock::now() < end) {
        in_flight_.sweep([] { return true; });
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const std::exception&) {  // the device itself has failed
    }
    in_flight_.abandon();
    if (buffers_) buffers_->close();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  [[nodiscard]] GroupState& state() { return state_; }
  [[nodiscard]] const D& device() const { return device_; }
  [[nodiscard]] const NcclOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return options_.timeout; }
  [[nodiscard]] const Stream& stream() const { return stream_.get(); }
  void label(Label label) { label_ = std::move(label); }

  /// Returns an uninitialized tensor [length] with the dtype and device of `like`. See NcclOptions::buffers.
  at::Tensor empty_buffer(std::int64_t length, const at::Tensor& like) {
    if (!buffers_ || failed()) return at::empty({length}, like.options());
    return guarded({"empty_buffer", 0, {}, 0, Clock::now()}, [&] { return buffers_->make(length, like); });
  }

  /// Issues the work of a call, ordered after all prior work on the current stream. `issue(comm, stream)`
  /// issues the NCCL operations as one group; `before` and `after` issue copies around it. `kept` is kept
  /// alive until the work is complete.
  template <class Before, class Issue, class After>
  InFlightOpPtr launch(const Call& call, std::vector<at::Tensor> kept, Before&& before, Issue&& issue,
                       After&& after) {
    return guarded(call, [&] {
      const Stream from = device_.current_stream();
      const bool captured = device_.capturing(from);
      if (!captured) tidy();  // a capture allows no event queries
      Launch launch{*this, in_flight_.take(), stream()};
      const InFlightOpPtr& op = launch.op;
      op->call = call;
      op->label = label_;
      op->from = from;
      op->captured = captured;
      if (captured) in_graph_ = true;
      op->kept = std::move(kept);
      device_.record(op->ready, op->from);
      device_.wait(stream(), op->ready);
      launch.under_way = true;
      // In a capture, the stream has now joined it, and the memory of copies belongs to the graph.
      before(op->kept);
      const NcclResult result = handle_.call([&](Comm comm) {
        if (const auto begun = device_.group_start(); begun != NcclResult::success) return begun;
        const NcclResult issued = issue(comm, stream());
        const NcclResult ended = device_.group_end();
        return issued == NcclResult::success || issued == NcclResult::in_progress ? ended : issued;
      });
      waiting_.await_ready(call, label_, result);
      after();
      launch.finish();
      return op;
    });
  }

  /// Runs `work`, part of a call, under the timeout. An exception of the device, such as out of memory, fails
  /// the group.
  template <class Work>
  auto guarded(const Call& call, Work&& work) -> decltype(work()) {
    return guarded(call, label_, std::forward<Work>(work));
  }
  template <class Work>
  auto guarded(const Call& call, const Label& label, Work&& work) -> decltype(work()) {
    return failing_as(call, label, [&] {
      const ActiveCalls::Scope active(active_, call, label);
      watchdog_->wake();
      return work();
    });
  }

  /// Runs `work`, a part of `call` that uses the store and ends by `until`. An error other than the timeout
  /// of a caller who waits for less than the group's ends the group.
  template <class Work>
  void at_store(const Call& call, Clock::time_point until, Work&& work) {
    try {
      work();
    } catch (const TimeoutError&) {
      if (until < call.start + timeout()) throw;
      state_.fail(std::current_exception(), true);
    } catch (const PeerError&) {
      state_.fail(std::current_exception(), false);
    } catch (const CommunicationError&) {
      state_.fail(std::current_exception(), true);
    }
  }

  /// Adds a group that this one was split into, whose captured collectives are replayed with this group's.
  void add_child(const std::shared_ptr<NcclGroup>& child) {
    std::erase_if(children_, [](const auto& known) { return known.expired(); });
    children_.push_back(child);
  }

  /// Runs `replay()`, which launches a graph on the current stream. The graph holds collectives of this
  /// group, and may hold collectives of groups that were split from it. The replay is ordered after all
  /// prior collectives. It counts as one collective of each of these groups, under their watchdogs. Throws
  /// the first error of any of them instead of launching.
  template <class Replay>
  void watch_replay(Replay&& replay) {
    std::vector<std::shared_ptr<NcclGroup>> inner;
    add_captured_children(inner);
    std::vector<Call> calls;
    for (const auto& group : inner) calls.push_back(group->state_.begin(replayed));
    const Call call = state_.begin(replayed);
    // This group is the innermost: it reports an error of the launch itself.
    const std::function<void(std::size_t)> launch_from = [&](std::size_t i) {
      if (i == inner.size()) return launch_watched(call, replay);
      inner[i]->launch_watched(calls[i], [&] { launch_from(i + 1); });
    };
    launch_from(0);
    for (const auto& group : inner) group->state_.check_error();  // which may have ended the launch
    state_.check_error();
  }

  /// Orders all later work on the current stream after the op. Does not block.
  void wait(InFlightOp<D>& op) {
    if (!in_flight_.completed(op)) {
      state_.check_error();
      state_.look(op.call);
    }
    guarded(op.call, op.label, [&] {
      const Stream current = device_.current_stream();
      device_.wait(current, op.done);
      in_flight_.release();
      // On another stream, memory that belongs to the op's stream would be freed too early.
      if (current == op.from) in_flight_.release_tensors(op);
    });
  }

  /// Blocks until `complete()` returns true. See Waiting.
  template <class Complete>
  void await(const Call& call, const Label& label, Clock::time_point until, Complete&& complete) {
    waiting_.await(call, label, until, std::forward<Complete>(complete));
  }
  /// Blocks until the op is complete.
  void await(InFlightOp<D>& op, Clock::time_point until) {
    if (op.captured)
      throw CommunicationError(
          detail::formatted(
              "{} is captured into a graph and has not happened: wait for its stream, then for the graph",
              text_of(op.call, op.label)),
          state_.world().rank());
    await(op.call, op.label, until, [&] {
      if (!guarded(op.call, op.label, [&] { return device_.done(op.done); })) return false;
      if (!in_flight_.completed(op)) {
        state_.check_error();
        in_flight_.complete(op);
      }
      return true;
    });
    in_flight_.release_tensors(op);
    in_flight_.release();
  }
  void give_back(const InFlightOpPtr& op) noexcept { in_flight_.give_back(op); }

  /// Returns the error of an op that can never complete, null otherwise.
  [[nodiscard]] std::exception_ptr error_of(const InFlightOp<D>& op) const {
    if (!failed() || in_flight_.completed(op)) return nullptr;
    return state_.error();
  }

  /// Leaves the group gracefully: completes the works in flight and says farewell to the other ranks.
  void shutdown() {
    if (state_.closed() || failed()) return;
    const Call call = state_.message("shutdown", {}, 0);
    state_.membership().depart();
    drain(call);
    waiting_.await_ready(call, label_, guarded(call, [&] {
                           if (buffers_) buffers_->close();
                           return handle_.call([&](Comm comm) { return device_.finalize(comm); });
                         }));
    guarded(call, [&] { handle_.destroy(); });
    state_.close();
    state_.membership().farewell(call);
  }

 private:
  [[nodiscard]] bool failed() const { return state_.failed(); }

  // An op during its launch. If the launch fails before any work is issued, the op is put back. Otherwise it
  // counts as started whatever happens, since its tensors are in use.
  struct Launch {
    NcclGroup& group;
    InFlightOpPtr op;
    Stream stream;  // the stream that the op runs on
    bool under_way = false, recorded = false;

    ~Launch() {
      if (!under_way) group.in_flight_.put_back(op);
      if (!under_way || recorded) return;
      try {
        finish();
      } catch (...) {
        group.in_flight_.abandon(*op);
      }
      group.in_flight_.give_back(op);
    }
    void finish() {
      group.device_.record(op->done, stream);
      recorded = true;
      group.in_flight_.start(op);
      if (!op->captured) group.device_watchdog_->wake();
    }
  };

  // A rank that cannot create its communicator publishes the error: the other ranks would wait for it.
  template <class Make>
  void start(Make&& make) {
    try {
      const Call call{"the start of the communicator", 0, {}, 0, Clock::now()};
      const auto enter = [this] { device_.enter_thread(); };
      watchdog_.emplace(options_.poll, enter, [this] { return watch(); });
      device_watchdog_.emplace(options_.poll, enter, [this] { return watch_device(); });
      failing_as(call, label_, [&] {
        guarded(call, [&] {
          stream_.make();
          buffers_ = Buffers<D>::wanted(options_, device_, handle_, stream());
        });
        waiting_.await_ready(call, label_, make(call));
      });
      state_.membership().connected();
    } catch (...) {
      if (!failed()) state_.membership().publish(std::current_exception());
      handle_.abort();
      throw;
    }
  }
  void add_captured_children(std::vector<std::shared_ptr<NcclGroup>>& found) const {
    for (const auto& known : children_)
      if (const auto child = known.lock()) {
        // A group that was shut down has left its graphs.
        if (child->in_graph_ && !child->state_.closed()) found.push_back(child);
        child->add_captured_children(found);
      }
  }

  template <class Replay>
  void launch_watched(const Call& call, Replay&& replay) {
    guarded(call, nullptr, [&] {
      const Stream current = device_.current_stream();
      tidy();
      Launch launch{*this, in_flight_.take(), current};
      launch.op->call = call;
      launch.op->from = current;
      device_.record(launch.op->ready, stream());
      device_.wait(current, launch.op->ready);
      launch.under_way = true;
      waiting_.await_ready(call, nullptr, handle_.launch(replay));
      launch.finish();
      in_flight_.give_back(launch.op);
    });
  }

  // Returns the communicator of the ranks with the same colour; null for no_colour.
  Comm split(const Call& call, int colour) {
    drain(call);  // NCCL may hang if any work is outstanding
    const auto [result, place] = guarded(call, [&] {
      return handle_.split(
          [&](Comm comm, Comm& made) { return device_.split(made, comm, colour, state_.rank()); });
    });
    waiting_.await_ready(call, label_, result);
    const Comm made = handle_.taken_from(place);
    if (failed()) {
      if (made != Comm{}) device_.abort(made);
      state_.rethrow();
    }
    return made;
  }

  // Waits until nothing is in flight. The watchdog, which names the late ranks, expires 10 s earlier.
  void drain(const Call& call) {
    await(call, label_, call.start + timeout() + std::chrono::seconds(10), [&] {
      if (auto error = sweep()) state_.fail(error, true);
      in_flight_.release();
      return in_flight_.empty();
    });
  }
  // Runs `work`, part of a call. An exception of the device fails the group.
  template <class Work>
  auto failing_as(const Call& call, const Label& label, Work&& work) -> decltype(work()) {
    try {
      return work();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      state_.fail(diagnosis_.of_exception(text_of(call, label), error), true);
    }
  }
  // Finds completed works. Returns the device's error if it has failed.
  std::exception_ptr sweep() {
    try {
      in_flight_.sweep([this] { return failed(); });
    } catch (const std::exception& error) {
      const auto oldest = in_flight_.oldest();
      return diagnosis_.of_exception(
          oldest ? text_of(oldest->first, oldest->second) : "the communicator's watchdog", error);
    }
    return nullptr;
  }
  // sweep() and cleanup before new work is issued, outside a capture.
  void tidy() {
    if (auto error = sweep()) state_.fail(error, true);
    in_flight_.release();
    in_flight_.end_capture();
    if (buffers_) buffers_->sweep();
  }

  // One look of the watchdog, on its thread. Returns whether anything is left to watch.
  bool watch() {
    record_found([this] { return overdue(); });
    return active_.oldest() || !in_flight_.empty();
  }
  // One look of the device watchdog, on its thread. Returns whether anything is left to watch.
  bool watch_device() {
    record_found([this] { return device_error(); });
    return !in_flight_.empty();
  }
  template <class Find>
  void record_found(Find&& find) {
    std::exception_ptr error;
    try {
      error = find();
    } catch (const Error&) {
      error = std::current_exception();
    } catch (const std::exception& other) {
      error = diagnosis_.of_exception("the communicator's watchdog", other);
    }
    if (error && !failed()) state_.record(error, true);
  }
  // Returns the error for which the works in flight, or the program's active call, must be aborted, or null.
  std::exception_ptr overdue() {
    if (failed()) return nullptr;
    const auto now = Clock::now(), asked = device_asked_.load();
    if (const auto oldest = in_flight_.oldest()) {
      const auto& [call, label] = *oldest;
      if (auto error = state_.membership().look(call)) return error;
      // It may have completed since the device watchdog last asked, unless the device does not answer.
      const auto end = call.start + timeout();
      if (now >= end && (asked >= end || now >= end + std::chrono::seconds(1)))
        return diagnosis_.of_lateness(call, label);
      if (!watch_ || watch_->call().start != call.start) watch_.emplace(state_.membership(), call);
      if (auto error = watch_->look()) return error;
    }
    if (const auto oldest = active_.oldest()) {
      if (auto error = state_.membership().look(oldest->call)) return error;
      if (now >= oldest->entered + timeout()) return diagnosis_.of_lateness(oldest->call, oldest->label);
    }
    return nullptr;
  }
  // Returns the error of the device or of NCCL for which the works in flight must be aborted, or null.
  std::exception_ptr device_error() {
    const auto now = Clock::now();
    if (auto error = sweep()) return error;
    device_asked_ = now;
    const auto oldest = in_flight_.oldest();
    if (failed() || !oldest) return nullptr;
    const auto& [call, label] = *oldest;
    return diagnosis_.of_state(call, label);
  }

  // The name of a replay among the collectives.
  static constexpr const char* replayed = "captured step";

  NcclOptions options_;
  GroupState state_;
  D device_;
  NcclHandle<D> handle_;
  InFlightOps<D> in_flight_;
  OwnedStream<D> stream_;
  std::shared_ptr<Buffers<D>> buffers_;             // null if the options ask for none
  std::vector<std::weak_ptr<NcclGroup>> children_;  // the groups that were split from this one
  std::atomic<bool> in_graph_{false};               // whether a graph has captured a collective
  Label label_;
  Diagnosis<D> diagnosis_{state_.membership(), handle_};
  Waiting<D> waiting_{state_, handle_, diagnosis_};
  ActiveCalls active_;
  std::atomic<Clock::time_point> device_asked_{
      Clock::time_point{}};                     // when the device watchdog began its last completed sweep
  std::optional<Membership::CallWatch> watch_;  // of the oldest op, used by the watchdog
  std::optional<Watchdog> watchdog_, device_watchdog_;
};

}  // namespace lockstep::detail
