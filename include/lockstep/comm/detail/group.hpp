#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/fail_process.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// The part of a communicator that no transport changes: its members, who has come to make it and who has left, the
/// opening of its calls, and its first error. CallWatch is how its threads wait.
///
/// A thread that finds an error stores it, publishes it to the other ranks if they cannot know of it, and only then
/// ends the transport's work, so that no rank sees a consequence before its cause.
///
/// Thread safety: any thread may call any function, but one thread at a time may begin collectives and create child
/// groups.
class Group {
 public:
  using Clock = std::chrono::steady_clock;

  /// Blocks until every rank of the world has joined.
  Group(const World& world, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout)
      : world_(world),
        timeout_(timeout),
        status_(std::make_shared<GroupStatus>(std::move(name), std::move(ranks))) {
    const auto own = std::find(status_->ranks.begin(), status_->ranks.end(), world.rank());
    rank_ = static_cast<int>(own - status_->ranks.begin());
    if (world.size() == 1) return;
    WorldState& state = state_of(world);
    state.await_all();
    plane_ = ControlPlane::of(world.rank(), state.connection(), ending_rank.load() ? &fail_process : nullptr);
    plane_->add(status_);
  }
  virtual ~Group() {
    if (plane_) plane_->remove(status_.get());
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(status_->ranks.size()); }
  [[nodiscard]] const World& world() const { return world_; }
  [[nodiscard]] const std::string& name() const { return status_->name; }
  [[nodiscard]] const std::vector<int>& ranks() const { return status_->ranks; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  /// Returns heartbeat_timeout(), as of the construction.
  [[nodiscard]] std::chrono::milliseconds heartbeat() const { return heartbeat_; }
  /// Returns how long a call waits before its first warning.
  [[nodiscard]] std::chrono::milliseconds first_warning() const {
    return std::clamp<Milliseconds>(timeout_ / 2, least_warning, most_warning);
  }
  [[nodiscard]] GroupStatus& status() const { return *status_; }
  /// Null in a world of one rank.
  [[nodiscard]] const std::shared_ptr<ControlPlane>& plane() const { return plane_; }

  /// Returns `ask(run)`, a request to the store. Throws TimeoutError at the timeout of `call`, PeerError if another
  /// rank has failed, and CommunicationError if the store is gone.
  template <class Ask>
  auto ask(const Call& call, Ask&& ask) -> decltype(ask(std::declval<RunClient>())) {
    auto answer = ask_until(call, call.start + timeout_, std::forward<Ask>(ask));
    if (!answer) throw timeout_error(call, silence(call, timeout_));
    return *std::move(answer);
  }
  /// Returns the Call of a rendezvous: it has no name and no sequence number.
  static Call making() { return {"", 0, {}, 0, Clock::now(), served_call}; }

  /// Blocks until every rank has come to make the group. Throws TimeoutError, which names the missing ranks, and
  /// PeerError if a rank has failed, or has ended without coming. The lowest rank that waits logs warnings as a
  /// CallWatch does.
  void join() {
    if (!plane_) return;
    const Call call = making();
    const auto needed = size() == world_.size() ? std::vector<int>() : ranks();
    const auto end = call.start + timeout_;
    auto next_warning = call.start + first_warning();
    for (bool waits = true;; waits = !waits) {  // for the others, and then asks who is missing
      const auto now = Clock::now();
      const auto met =
          ask_until(call, waits ? std::min(end, next_warning) : now + answer_timeout, [&](RunClient run) {
            return waits ? run.meet(name(), needed, /*lasts=*/true) : run.summary(name()).meeting;
          });
      if (met && met->met()) return;
      // A rank that has ended has published its reason before. The store may have been lost since then.
      if (met && met->ended >= 0) {
        const auto known = plane_->await_failure(met->exit_code != 0 ? news_timeout : Milliseconds(0));
        if (!known || known->store_lost) {
          if (known) notice();
          const auto ended = ended_early(met->ended, world_.rank(), place_of(call), met->exit_code);
          std::rethrow_exception(peer_error(ended, call));
        }
      }
      throw_if_failed(call);
      if (waits) continue;
      const auto waited = now - call.start;
      const std::string text = met ? not_come(met->missing_text(), met->missing == 1, place_of(call), waited)
                                   : silence(call, waited);
      if (now >= end) throw timeout_error(call, text, met ? met->first_missing : std::vector<int>());
      if (met ? met->lowest == world_.rank() : world_.local_rank() == 0)
        world_.log.all().warning("{} (the timeout is {})", text, duration_text(timeout_));
      next_warning = call.start + 2 * waited;
    }
  }

  /// Returns whether no call can complete: another rank has failed, or has aborted this group.
  [[nodiscard]] bool ended() const { return plane_ && plane_->ended(name()); }

  /// Begins a collective. Throws inside a rank-zero scope and after depart(), rethrows the first error, and
  /// fails the group if the collective can never complete.
  Call begin(const char* name, const CallContent& content = {},
             std::shared_ptr<const std::string> label = nullptr) {
    Call call = open(name, std::nullopt, 0);
    if (label) call.label = std::move(label);
    call.sequence = status_->enter(call.name, call.served, content, call.label);
    look(call);
    return call;
  }
  /// Begins a send or recv, which has no sequence number.
  Call message(const char* name, std::optional<int> peer, int tag) {
    const Call call = open(name, peer, tag);
    look(call);
    return call;
  }
  /// Labels later calls; null removes the label. Called by the thread that begins calls.
  void label(std::shared_ptr<const std::string> text) { label_ = std::move(text); }
  [[nodiscard]] bool closed() const { return closed_; }

  void check_rank(const char* call, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(formatted("{}: there is no rank {} in a group of {}", call, rank, size()),
                               world().rank());
  }

  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  void check_error() {
    if (failed()) rethrow();
  }
  /// Throws the first error.
  [[noreturn]] void rethrow() {
    // A first error of this rank's own does not count as noticing a later failure of another rank.
    if (plane_ && plane_->failure()) notice();
    std::rethrow_exception(error_);
  }

  /// Stores the error if it is the first and ends the work in flight. `publish` is false for an error that
  /// came from another rank, or that ends only this rank's calls.
  void record(const std::exception_ptr& error, bool publish) noexcept {
    const bool first = keep_error(error);
    if (first && publish) publish_abort(first_line(error));
    if (first || publish) end_operations();
  }
  /// record() on a thread of the program, then throws the first error.
  [[noreturn]] void fail(const std::exception_ptr& error, bool publish) {
    record(error, publish);
    rethrow();
  }

  /// Fails every later call of the group on all ranks, with `reason` or with the error by which it has failed here,
  /// and ends the work in flight, on a thread. An empty reason is that of an exception. Does not block.
  void abort(const std::string& reason) noexcept {
    const bool first = keep_error(std::make_exception_ptr(
        CommunicationError("the communicator was aborted: " + (reason.empty() ? by_exception : reason))));
    // The other ranks know of a consequence.
    if (first || failure_of(error_).kind != FailureKind::consequence)
      publish_abort(first ? reason : first_line(error_));
    end_operations();
  }

  /// Returns why `call` can never complete, as far as this rank knows: a PeerError that names a rank that has
  /// failed, or has left before the call. Returns null if it still may.
  [[nodiscard]] std::exception_ptr obstacle(const Call& call) {
    if (!plane_) return nullptr;
    seen_.store(plane_->version(), std::memory_order_relaxed);
    if (const auto aborted = plane_->aborted(name())) return peer_error(*aborted, call);
    if (auto failure = plane_->failure()) {
      if (failure->store_lost)
        failure->message =
            store_ended(failure->message, state_of(world_).current_environment(), place_of(call));
      return peer_error(*failure, call);
    }
    if (const auto left = plane_->left_before(name(), place_of(call))) return peer_error(*left, call);
    return nullptr;
  }
  /// Returns the PeerError of `call` that names the rank of the failure `first`.
  [[nodiscard]] std::exception_ptr peer_error(const Failure& first, const Call& call) const {
    return error_of(first, world_.rank(), place_of(call));
  }
  /// Returns the error with `text` of a call that has timed out. `late`: the ranks that it has waited for.
  [[nodiscard]] TimeoutError timeout_error(const Call& call, const std::string& text,
                                           const std::vector<int>& late = {}) const {
    return TimeoutError(Failure{.kind = FailureKind::timed_out,
                                .rank = world_.rank(),
                                .cause = late.size() == 1 ? late[0] : -1,
                                .call = place_of(call),
                                .message = text});
  }
  /// Returns where this rank waits: in a collective, or in the rendezvous of this communicator.
  [[nodiscard]] FailedCall place_of(const Call& call) const {
    FailedCall place = call.failed();
    if (*call.name == '\0') {
      place.operation = rendezvous;
      place.label = formatted("communicator '{}'", name());
      place.served = call.served.name ? call.served.name : "";
    }
    return place;
  }
  /// Returns the text about a call after `waited` where the store does not answer. See store_silent.
  [[nodiscard]] std::string silence(const Call& call, Elapsed waited, const std::string& silent = {}) const {
    return store_silent(place_of(call), waited, state_of(world_).current_environment(), silent);
  }
  /// Records that the program knows of another rank's failure. See ControlPlane::notice.
  void notice() {
    if (plane_) plane_->notice();
  }

  /// Announces to the other ranks that this rank leaves gracefully, and waits until they are told if `call` is given. Later
  /// calls throw CommunicationError.
  void depart(const Call* call = nullptr) {
    closed_ = true;
    status_->leave();
    const auto until = call ? std::optional(call->start + timeout_) : std::nullopt;
    if (plane_ && !plane_->publish_departure(*status_, until) && call)
      throw timeout_error(*call, silence(*call, timeout_));
  }

 protected:
  /// Returns the first error, null if there is none.
  [[nodiscard]] std::exception_ptr error() const noexcept { return failed() ? error_ : nullptr; }
  /// Ends the transport's work in flight, once an error is stored and published. Thread-safe.
  virtual void end_operations() noexcept {}

 private:
  Call open(const char* name, std::optional<int> peer, int tag) {
    forbid_in_rank_zero_scope(name);
    check_error();
    if (closed_)
      throw CommunicationError(formatted("{} called after shutdown(): make a new communicator", name),
                               world().rank());
    return {name, 0, peer, tag, Clock::now(), served_call, label_};
  }

  // Stores the error if it is the first. Returns whether it is.
  bool keep_error(std::exception_ptr error) noexcept {
    const std::lock_guard lock(error_mutex_);
    if (error_) return false;
    error_ = std::move(error);
    failed_.store(true, std::memory_order_release);
    status_->failed = true;
    return true;
  }
  // Tells the other ranks that this rank has aborted the group. They throw PeerError in its calls, and go on with other
  // groups: the exception may be caught.
  void publish_abort(const std::string& reason) noexcept {
    if (plane_ && !published_.exchange(true))
      plane_->publish(
          {.kind = Event::aborted,
           .rank = world_.rank(),
           .group = name(),
           .failure = {.rank = world_.rank(), .message = reason, .time = monotonic_nanoseconds()}});
  }

  // Fails the group if another rank has failed, or has left before this call. Costs one atomic read if neither has
  // happened.
  void look(const Call& call) {
    if (!plane_ || plane_->version() == seen_.load(std::memory_order_relaxed)) return;
    if (auto error = obstacle(call)) fail(error, false);
  }

  // Returns `ask(run)`, std::nullopt at `until`. Throws PeerError if another rank has failed, CommunicationError if the
  // store is gone.
  template <class Ask>
  auto ask_until(const Call& call, Clock::time_point until, Ask&& ask)
      -> std::optional<decltype(ask(std::declval<RunClient>()))> {
    std::string reason;
    try {
      return ask(plane_->client(until));
    } catch (const StoreError& error) {
      reason = error.what();
    }
    const bool over = Clock::now() >= until;
    // The store may be gone because of a failure that a rank is publishing.
    if (!over) plane_->await_failure(answer_timeout);
    throw_if_failed(call);
    if (over) return std::nullopt;
    throw CommunicationError(
        formatted("{} fails: {}", store_text(state_of(world_).current_environment()), reason), world_.rank());
  }

  void throw_if_failed(const Call& call) {
    if (auto error = obstacle(call)) {
      notice();
      std::rethrow_exception(error);
    }
  }

  World world_;
  const std::chrono::milliseconds timeout_, heartbeat_ = heartbeat_timeout();
  std::shared_ptr<GroupStatus> status_;
  int rank_ = 0;
  std::shared_ptr<ControlPlane> plane_;  // null in a world of one rank
  std::atomic<std::uint64_t> seen_{0};
  std::shared_ptr<const std::string> label_;
  std::atomic<bool> closed_{false}, published_{false}, failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;  // the first: once failed_ is true it never changes, and is read without mutex
};

}  // namespace lockstep::inline v0_1::detail
