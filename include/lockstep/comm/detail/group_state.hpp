#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Keeps the first of many errors. Thread-safe.
class StickyError {
 public:
  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool set() const noexcept { return set_.load(std::memory_order_acquire); }

  /// Keeps the error if it is the first. Returns whether it is.
  bool keep(std::exception_ptr error) noexcept {
    std::lock_guard lock(mutex_);
    if (error_) return false;
    error_ = std::move(error);
    set_.store(true, std::memory_order_release);
    return true;
  }
  [[nodiscard]] std::exception_ptr get() const noexcept {
    std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> set_{false};
  std::exception_ptr error_;
};

/// The part of a communicator's group that no transport changes: its membership, the opening of its calls and
/// its first error. A thread that finds an error stores it, publishes it to the other ranks if they cannot know
/// of it, and only then ends the transport's work, so that no rank sees a consequence before its cause.
///
/// Thread safety: any thread may call any function, but one thread at a time may begin collectives and create
/// child groups.
class GroupState {
 public:
  using Clock = std::chrono::steady_clock;

  /// `end_work`, if given, aborts the transport's work in flight once an error is stored. It must be
  /// thread-safe and must not throw.
  GroupState(const World& world, std::vector<int> ranks, std::string name, std::chrono::milliseconds timeout,
             std::function<void()> end_work = nullptr)
      : membership_(world, std::move(ranks), std::move(name), timeout),
        timeout_(timeout),
        end_work_(std::move(end_work)) {}

  [[nodiscard]] Membership& membership() { return membership_; }
  [[nodiscard]] pid_t owner() const { return owner_; }
  [[nodiscard]] int rank() const { return membership_.rank(); }
  [[nodiscard]] int size() const { return membership_.size(); }
  [[nodiscard]] const World& world() const { return membership_.world(); }
  [[nodiscard]] const std::string& name() const { return membership_.name(); }
  [[nodiscard]] const std::vector<int>& ranks() const { return membership_.ranks(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }

  /// Begins a collective. Throws inside a rank-zero scope and after close(), rethrows the first error, and
  /// fails the group if the collective can never complete.
  Call begin(const char* name, const CallContent& content = {}) {
    Call call = open(name, std::nullopt, 0);
    call.sequence = membership_.enter(call, content);
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
  /// Makes later calls throw CommunicationError, because the group has been shut down.
  void close() { closed_ = true; }
  [[nodiscard]] bool closed() const { return closed_; }

  /// Fails the group if another rank has failed, or has left before this call. Costs one atomic read if
  /// neither has happened.
  void look(const Call& call) {
    if (!membership_.news()) return;
    if (auto error = membership_.look(call)) fail(error, false);
  }

  void check_rank(const char* call, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(
          detail::formatted("{}: there is no rank {} in a group of {}", call, rank, size()), world().rank());
  }
  void check_peer(const char* call, int peer) const {
    check_rank(call, peer);
    if (peer == rank())
      throw CommunicationError(detail::formatted("{}: rank {} cannot send to itself", call, peer),
                               world().rank());
  }

  void check_subgroup(const std::vector<int>& ranks) const {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      check_rank("new_group", ranks[i]);
      if (i > 0 && ranks[i] <= ranks[i - 1])
        throw CommunicationError("new_group: the ranks must ascend, and none may be named twice",
                                 world().rank());
    }
  }
  [[nodiscard]] std::vector<int> world_ranks(const std::vector<int>& ranks) const {
    std::vector<int> global;
    for (const int rank : ranks) global.push_back(this->ranks().at(static_cast<std::size_t>(rank)));
    return global;
  }
  [[nodiscard]] std::string next_child() { return detail::formatted("{}/{}", name(), children_++); }

  /// Returns whether there is an error. Costs one atomic read.
  [[nodiscard]] bool failed() const noexcept { return error_.set(); }
  [[nodiscard]] std::exception_ptr error() const noexcept { return error_.get(); }
  void check_error() {
    if (failed()) rethrow();
  }
  [[noreturn]] void rethrow() {
    // A first error of this rank's own does not count as noticing a later failure of another rank.
    if (membership_.monitor() && membership_.monitor()->failure()) membership_.notice();
    std::rethrow_exception(error_.get());
  }

  /// Stores the error if it is the first and ends the work in flight. `publish` is false for an error that
  /// came from another rank, or that ends only this rank's calls.
  void record(const std::exception_ptr& error, bool publish) noexcept {
    const bool first = error_.keep(error);
    if (first && publish) publish_abort(first_line(error));
    if (first || publish) end_work();
  }
  /// record() on a thread of the program, then throws the first error.
  [[noreturn]] void fail(const std::exception_ptr& error, bool publish) {
    record(error, publish);
    rethrow();
  }

  /// Fails every later call of the group on all ranks, with `reason` unless that is empty, or with the error by which it has
  /// failed here, and ends the work in flight. Takes at most 1 s, and the time of `end_work`.
  void abort(const std::string& reason) noexcept {
    const bool first = error_.keep(aborted(reason.empty() ? FailureMonitor::by_exception : reason));
    if (first || !is_of_another_rank(error_.get())) publish_abort(first ? reason : first_line(error_.get()));
    end_work();
  }

 private:
  Call open(const char* name, std::optional<int> peer, int tag) {
    forbid_in_rank_zero_scope(name);
    check_error();
    if (closed_)
      throw CommunicationError(detail::formatted("{} called after shutdown(): make a new communicator", name),
                               world().rank());
    return {name, 0, peer, tag, Clock::now(), served_call, label_};
  }

  static std::exception_ptr aborted(const std::string& reason) {
    return std::make_exception_ptr(CommunicationError("the communicator was aborted: " + reason));
  }
  // The other ranks know of such an error.
  static bool is_of_another_rank(const std::exception_ptr& error) noexcept {
    try {
      std::rethrow_exception(error);
    } catch (const PeerError&) {
      return true;
    } catch (...) {
      return false;
    }
  }
  void publish_abort(const std::string& reason) noexcept {
    if (!published_.exchange(true)) membership_.publish_abort(reason);
  }
  void end_work() noexcept {
    if (end_work_) end_work_();
  }

  Membership membership_;
  const std::chrono::milliseconds timeout_;
  const std::function<void()> end_work_;
  int children_ = 0;
  std::shared_ptr<const std::string> label_;
  std::atomic<bool> closed_{false}, published_{false};
  StickyError error_;
  const pid_t owner_ = getpid();
};

/// Returns the ranks of a world of `size` ranks: 0, 1, and so on.
inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Ends a communicator's use of its group, if it has one: aborts the group if it has failed, or during the unwinding of an
/// exception that was thrown after the communicator was constructed, else shuts it down. `exceptions` is the value of
/// std::uncaught_exceptions() at the construction.
template <class Group>
void leave_group(std::shared_ptr<Group>& group, int exceptions) noexcept {
  if (!group) return;
  if (getpid() != group->state().owner()) {
    static_cast<void>(new std::shared_ptr<Group>(std::move(group)));  // its threads run in the parent alone
  } else if (group->state().failed() || std::uncaught_exceptions() > exceptions) {
    group->state().abort("");
  } else {
    try {
      group->shutdown();
    } catch (const std::exception& error) {
      if (dynamic_cast<const MismatchError*>(&error) && !failure_hooks.publish)  // else `launch` says so
        group->state().world().log.all().error("{}", error.what());
      group->state().abort(error.what());
    }
  }
  group.reset();
}

}  // namespace lockstep::detail
