#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/active_calls.hpp"
#include "lockstep/comm/detail/nccl/buffers.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/device_identity.hpp"
#include "lockstep/comm/detail/nccl/diagnosis.hpp"
#include "lockstep/comm/detail/nccl/error_text.hpp"
#include "lockstep/comm/detail/nccl/group_error.hpp"
#include "lockstep/comm/detail/nccl/handle.hpp"
#include "lockstep/comm/detail/nccl/in_flight_op.hpp"
#include "lockstep/comm/detail/nccl/owned_stream.hpp"
#include "lockstep/comm/detail/nccl/waiting.hpp"
#include "lockstep/comm/detail/nccl/watchdog.hpp"
#include "lockstep/comm/nccl_options.hpp"

namespace lockstep::detail {

/// What a communicator and its Works share: NCCL's handle, the stream, what is in flight, the first error,
/// and two threads that look after all of it while the program computes, or is inside a call that blocks.
///
/// The watchdog ends what is in flight when another rank has failed, or the timeout has passed of the oldest
/// collective in flight or of the oldest call that the program has not returned from. It takes no lock that
/// is held across a call on the device or on NCCL, and calls on neither before it aborts: both may block for
/// as long as a collective does not end. The device watchdog does call on them: it finds what has ended, and
/// ends what is in flight when NCCL or the device reports an error. What the stream holds ends with that, and
/// the error is thrown by the program's next call.
template <NcclDevice D>
class NcclGroup {
 public:
  using Clock = std::chrono::steady_clock;
  using Comm = typename D::Comm;
  using Stream = typename D::Stream;
  using InFlightOpPtr = typename InFlightOps<D>::InFlightOpPtr;

  /// The group of all ranks of `ranks`, which meet in the store.
  NcclGroup(const World& world, std::vector<int> ranks, std::string name, const NcclOptions& options)
      : options_(checked(options)),
        membership_(world, std::move(ranks), std::move(name), options_.timeout),
        device_(open_together<D>(membership_, options_)),
        handle_(device_),
        in_flight_(device_),
        stream_(device_) {
    start([&](const Call& call) {
      const std::string id =
          membership_.from_first("NCCL id", [&] { return guarded(call, [&] { return device_.make_id(); }); });
      return guarded(call, [&] {
        return handle_.make([&](Comm& made) { return device_.init(made, size(), id, rank()); });
      });
    });
  }

  /// The group of some of `parent`'s ranks, this one among them, which `call` asks for; `name` is its own.
  NcclGroup(NcclGroup& parent, const Call& call, std::vector<int> ranks, std::string name)
      : options_(parent.options_),
        membership_(parent.world(), std::move(ranks), std::move(name), options_.timeout),
        device_(parent.device_),
        handle_(device_),
        in_flight_(device_),
        stream_(device_) {
    start([&](const Call&) {
      handle_.adopt(parent.split(call, 0));
      return NcclResult::in_progress;
    });
  }
  /// Takes part in the split of ranks that this one is not among.
  void stay_out_of_split(const Call& call) { split(call, no_colour); }

  ~NcclGroup() {
    device_watchdog_.reset();
    watchdog_.reset();
    handle_.abort();  // nothing where it was destroyed in good order
    // What was aborted is about to end: its memory is not given back before.
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

  [[nodiscard]] int rank() const { return membership_.rank(); }
  [[nodiscard]] int size() const { return membership_.size(); }
  [[nodiscard]] const World& world() const { return membership_.world(); }
  [[nodiscard]] Membership& membership() { return membership_; }
  [[nodiscard]] const D& device() const { return device_; }
  [[nodiscard]] const NcclOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return options_.timeout; }
  [[nodiscard]] const Stream& stream() const { return stream_.get(); }
  [[nodiscard]] bool failed() const { return error_.set(); }
  void check_error() {
    if (failed()) error_.rethrow();
  }
  [[nodiscard]] std::string next_child() { return fmt::format("{}/{}", membership_.name(), children_++); }
  void label(Label label) { label_ = std::move(label); }

  /// Opens a collective: throws in a rank-zero scope, and the first error again if there was one.
  Call begin(const char* name) {
    Call call = open_call(name, -1, 0);
    call.sequence = membership_.enter(name);
    waiting_.look(call);
    return call;
  }
  /// Opens a send or recv, which do not count: only two ranks take part.
  Call message(const char* name, int peer, int tag) {
    const Call call = open_call(name, peer, tag);
    waiting_.look(call);
    return call;
  }

  /// A tensor [length], uninitialised, with the dtype and device of `like`, as NcclOptions::buffers says.
  at::Tensor empty_buffer(std::int64_t length, const at::Tensor& like) {
    if (!buffers_ || failed()) return at::empty({length}, like.options());
    return guarded({"empty_buffer", 0, -1, 0, Clock::now()}, [&] { return buffers_->make(length, like); });
  }

  /// Issues a call's work behind all that the current stream holds. `issue(comm, stream)` issues NCCL's part,
  /// as one group; `before` and `after` issue copies around it. `kept` stays until it is complete.
  template <class Before, class Issue, class After>
  InFlightOpPtr launch(const Call& call, std::vector<at::Tensor> kept, Before&& before, Issue&& issue,
                       After&& after) {
    return guarded(call, [&] {
      const Stream from = device_.current_stream();
      const bool captured = device_.capturing(from);
      if (!captured) tidy();  // a capture allows no questions
      Launch launch{*this, in_flight_.take(), stream()};
      const InFlightOpPtr& op = launch.op;
      op->call = call;
      op->label = label_;
      op->from = from;
      op->captured = captured;
      op->kept = std::move(kept);
      device_.record(op->ready, op->from);
      device_.wait(stream(), op->ready);
      launch.under_way = true;
      // In a capture the stream belongs to it from here on, and so does the memory of copies.
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

  /// Runs `work`, part of a call, under the timeout. What the device throws, such as that its memory has run
  /// out, ends the group.
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

  /// Runs `work`, a part of `call` that uses the store. An error other than the caller's own timeout ends the
  /// group.
  template <class Work>
  void at_store(const Call& call, Work&& work) {
    try {
      work();
    } catch (const TimeoutError&) {
      if (Clock::now() < call.start + timeout()) throw;
      error_.fail(std::current_exception(), true);
    } catch (const PeerError&) {
      error_.fail(std::current_exception(), false);
    } catch (const CommunicationError&) {
      error_.fail(std::current_exception(), true);
    }
  }

  /// Runs `replay()`, which gives the current stream a graph with collectives of this group: it comes behind
  /// what was issued before, and counts as one collective, which the watchdog looks after.
  template <class Replay>
  void watch_replay(Replay&& replay) {
    const Call call = begin("captured step");
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
    check_error();  // it may be what ended the launch
  }

  /// Makes what the current stream is given next come after the op. Does not block.
  void join(InFlightOp<D>& op) {
    if (!in_flight_.completed(op)) {
      if (failed()) error_.rethrow();
      waiting_.look(op.call);
    }
    guarded(op.call, op.label, [&] {
      const Stream current = device_.current_stream();
      device_.wait(current, op.done);
      in_flight_.release();
      // On another stream, memory that belongs to the first one would be free too early.
      if (current == op.from) in_flight_.let_go_of_tensors(op);
    });
  }

  /// See Waiting.
  template <class Complete>
  void await(const Call& call, const Label& label, Clock::time_point until, Complete&& complete) {
    waiting_.await(call, label, until, std::forward<Complete>(complete));
  }
  /// Blocks until the op is complete.
  void await(InFlightOp<D>& op, Clock::time_point until) {
    if (op.captured)
      throw CommunicationError(
          fmt::format(
              "{} is captured into a graph and has not happened: join its stream, and wait for the graph",
              text_of(op.call, op.label)),
          world().rank());
    await(op.call, op.label, until, [&] {
      if (!guarded(op.call, op.label, [&] { return device_.done(op.done); })) return false;
      if (!in_flight_.completed(op)) {
        if (failed()) error_.rethrow();
        in_flight_.complete(op);
      }
      return true;
    });
    in_flight_.let_go_of_tensors(op);
    in_flight_.release();
  }
  void give_back(const InFlightOpPtr& op) noexcept { in_flight_.give_back(op); }

  /// The error of a op that can never be complete.
  [[nodiscard]] std::exception_ptr error_of(const InFlightOp<D>& op) const {
    if (!failed() || in_flight_.completed(op)) return nullptr;
    return error_.get();
  }

  /// See GroupError.
  void abort(const std::string& reason) noexcept { error_.abort(reason); }
  void abort_by_exception() noexcept { error_.abort_by_exception(); }

  /// Ends the group in good order: completes what is in flight, and says farewell to the other ranks.
  void shutdown() {
    if (handle_.gone() || failed()) return;
    const Call call = message("shutdown", -1, 0);
    membership_.depart();
    drain(call);
    waiting_.await_ready(call, label_, guarded(call, [&] {
                           if (buffers_) buffers_->close();
                           return handle_.call([&](Comm comm) { return device_.finalize(comm); });
                         }));
    guarded(call, [&] { handle_.destroy(); });
    membership_.farewell(call);
  }

 private:
  // A op while it is issued: it is put back where that has not begun, and otherwise counts as started,
  // for its tensors are in use then, whatever happens.
  struct Launch {
    NcclGroup& group;
    InFlightOpPtr op;
    Stream stream;  // what it is in
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

  Call open_call(const char* name, int peer, int tag) {
    forbid_in_rank_zero_scope(name);
    if (failed()) error_.rethrow();
    if (handle_.gone())
      throw CommunicationError(fmt::format("{} called after shutdown(): make a new communicator", name),
                               world().rank());
    return {name, 0, peer, tag, Clock::now()};
  }

  // A rank that cannot make its communicator says so: the others would wait for it.
  template <class Make>
  void start(Make&& make) {
    try {
      const Call call{"the start of the communicator", 0, -1, 0, Clock::now()};
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
    } catch (...) {
      if (!failed()) membership_.publish(std::current_exception());
      handle_.abort();
      throw;
    }
  }
  // The communicator of those who give the same colour; null for no_colour.
  Comm split(const Call& call, int colour) {
    drain(call);  // NCCL may wait for ever where anything is outstanding then
    const auto [result, place] = guarded(call, [&] {
      return handle_.split([&](Comm comm, Comm& made) { return device_.split(made, comm, colour, rank()); });
    });
    waiting_.await_ready(call, label_, result);
    const Comm made = handle_.taken_from(place);
    if (failed()) {
      if (made != Comm{}) device_.abort(made);
      error_.rethrow();
    }
    return made;
  }

  // Waits until nothing is in flight. The watchdog, which says what is late, comes first.
  void drain(const Call& call) {
    await(call, label_, call.start + timeout() + std::chrono::seconds(10), [&] {
      if (auto error = sweep()) error_.fail(error, true);
      in_flight_.release();
      return in_flight_.empty();
    });
  }
  // Runs `work`, part of a call: what the device throws ends the group.
  template <class Work>
  auto failing_as(const Call& call, const Label& label, Work&& work) -> decltype(work()) {
    try {
      return work();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      error_.fail(diagnosis_.of_exception(text_of(call, label), error), true);
    }
  }
  // Finds what has ended; what the device says instead, if it has failed.
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
  // The same before something is issued, where no graph is being captured.
  void tidy() {
    if (auto error = sweep()) error_.fail(error, true);
    in_flight_.release();
    in_flight_.end_capture();
    if (buffers_) buffers_->sweep();
  }

  // One look of the watchdog, on its thread; whether there is anything left to look after.
  bool watch() {
    trip_on([this] { return overdue(); });
    return active_.oldest() || !in_flight_.empty();
  }
  // The same of the device watchdog.
  bool watch_device() {
    trip_on([this] { return device_error(); });
    return !in_flight_.empty();
  }
  template <class Find>
  void trip_on(Find&& find) {
    std::exception_ptr error;
    try {
      error = find();
    } catch (const Error&) {
      error = std::current_exception();
    } catch (const std::exception& other) {
      error = diagnosis_.of_exception("the communicator's watchdog", other);
    }
    if (error && !failed()) error_.record_and_abort(error);
  }
  // Why what is in flight, or the call that the program is inside of, must be ended, if it must.
  std::exception_ptr overdue() {
    if (failed()) return nullptr;
    const auto now = Clock::now(), asked = device_asked_.load();
    if (const auto oldest = in_flight_.oldest()) {
      const auto& [call, label] = *oldest;
      if (auto error = membership_.look(call)) return error;
      // It may have ended although nobody has asked the device since, unless that does not answer.
      const auto end = call.start + timeout();
      if (now >= end && (asked >= end || now >= end + std::chrono::seconds(1)))
        return diagnosis_.of_lateness(call, label);
      if (!watch_ || watch_->call().start != call.start) watch_.emplace(membership_, call);
      if (auto error = watch_->look()) return error;
    }
    if (const auto oldest = active_.oldest()) {
      if (auto error = membership_.look(oldest->call)) return error;
      if (now >= oldest->entered + timeout()) return diagnosis_.of_lateness(oldest->call, oldest->label);
    }
    return nullptr;
  }
  // What the device or NCCL says, for which what is in flight must be ended.
  std::exception_ptr device_error() {
    const auto now = Clock::now();
    if (auto error = sweep()) return error;
    device_asked_ = now;
    const auto oldest = in_flight_.oldest();
    if (failed() || !oldest) return nullptr;
    const auto& [call, label] = *oldest;
    return diagnosis_.of_state(call, label);
  }

  NcclOptions options_;
  Membership membership_;
  D device_;
  NcclHandle<D> handle_;
  InFlightOps<D> in_flight_;
  OwnedStream<D> stream_;
  std::shared_ptr<Buffers<D>> buffers_;  // where the options want any
  Label label_;
  int children_ = 0;
  GroupError<D> error_{membership_, handle_};
  Diagnosis<D> diagnosis_{membership_, handle_};
  Waiting<D> waiting_{membership_, handle_, diagnosis_, error_, options_.timeout};
  ActiveCalls active_;
  std::atomic<Clock::time_point> device_asked_{
      Clock::time_point{}};                     // when it last began to answer what has ended
  std::optional<Membership::CallWatch> watch_;  // of the oldest op, for the watchdog
  std::optional<Watchdog> watchdog_, device_watchdog_;
};

}  // namespace lockstep::detail
