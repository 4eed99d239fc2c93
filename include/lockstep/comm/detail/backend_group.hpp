#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/comm/detail/capture_scope.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/sigpipe_guard.hpp"
#include "lockstep/comm/detail/tensor_checks.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/at_most.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Exposes the protected members of c10d's Work. Waiting on its condition variable directly avoids the
/// exception, with its stack trace, by which Work::wait reports a timeout.
struct WorkInternals : c10d::Work {
  static constexpr auto mutex = &WorkInternals::mutex_;
  static constexpr auto changed = &WorkInternals::cv_;
  static constexpr auto completed = &WorkInternals::completed_;
  static constexpr auto exception = &WorkInternals::exception_;
};

/// Returns what an error of a backend means.
inline ForeignError backend_error(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    return classify(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return classify(error.what());
  } catch (...) {
    return {ForeignError::other, "of an unknown error"};
  }
}

/// The state that a ProcessGroupComm and its Works share: the GroupState and the backend.
///
/// On a device a thread of the group watches the operations in flight: the program itself may wait for the
/// device, which does not return while another rank is missing. The thread waits for the oldest operation as
/// await() does, and so stores the error of a failed rank or of the timeout, and ends the operations.
///
/// The destructor of a backend may wait for all works in flight, up to its timeout. So the group gives up its backend
/// only after every rank has left. In every other case the backend leaks: the process is about to end, and its sockets
/// with it.
class BackendGroup {
 public:
  using Clock = std::chrono::steady_clock;
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  BackendGroup(const World& world, std::vector<int> ranks, std::string name, ProcessGroupOptions options,
               Backend backend = {})
      : options_(std::move(options)),
        state_(world, std::move(ranks), std::move(name), options_.timeout,
               on_host() ? nullptr : std::function<void()>([this] { abort_backend(); })),
        backend_(std::move(backend)) {
    if (!on_host()) c10::impl::VirtualGuardImpl(options_.device.type()).setDevice(options_.device);
    membership().join();
    if (!backend_)
      backend_ = connect(
          [world, rank = state_.rank(), size = state_.size(), own = options_, prefix = state_.name()] {
            return own.make_backend(own_store(world, prefix, own.timeout), rank, size);
          });
    const std::string backend_name = backend_->getBackendName();
    is_gloo_ = backend_name == "gloo";
    is_nccl_ = backend_name == "nccl" || backend_name == "nccl2";
    has_futures_ = on_host();
    check_ = {is_gloo_ ? "Gloo" : detail::formatted("the backend '{}'", backend_name),
              options_.device.type()};
    membership().connected();
    if (!on_host()) watch_ = std::thread([this] { watch_operations(); });
  }

  ~BackendGroup() {
    if (watch_.joinable()) {
      {
        const std::lock_guard lock(watch_mutex_);
        watch_ends_ = true;
      }
      watch_changed_.notify_all();
      watch_.join();
    }
    if (aborting_) static_cast<void>(aborting_->ends_within(std::chrono::seconds(1)));
    if (!backend_) return;
    // Reachable, so that leak checkers do not report it.
    struct Left {
      Backend backend;
      Messages messages;
    };
    static auto* left_behind = new std::vector<Left>();
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    left_behind->push_back({std::move(backend_), std::move(kept_)});
  }
  BackendGroup(const BackendGroup&) = delete;
  BackendGroup& operator=(const BackendGroup&) = delete;

  [[nodiscard]] GroupState& state() { return state_; }
  [[nodiscard]] const ProcessGroupOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return options_.timeout; }
  [[nodiscard]] c10d::Backend& backend() { return *backend_; }
  [[nodiscard]] const TensorCheck& tensor_check() const { return check_; }

  [[nodiscard]] bool on_host() const { return options_.device.is_cpu(); }
  [[nodiscard]] bool averages() const { return !on_host() && !is_gloo_; }
  [[nodiscard]] bool ignores_tags() const { return is_nccl_; }
  [[nodiscard]] bool can_split() const {
    return options_.make_backend != nullptr || (backend_ && splits(*backend_));
  }

  template <class Start>
  BackendWork launch(const char* name, Start&& start) {
    try {
      return std::forward<Start>(start)(*backend_);
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      throw CommunicationError(detail::formatted("{}: {} refused it: {}", name, check_.backend,
                                                 backend_error(std::current_exception()).text),
                               state_.world().rank());
    }
  }

  /// Runs `finish` on the backend's thread after `work` succeeded and before it counts as complete, so that a
  /// Work that is never waited for is finished too. Call it once per work: two callbacks could run
  /// concurrently. Returns false, and does nothing, on a device and if the backend's works have no futures.
  template <class Finish>
  bool finish_in_callback(const BackendWork& work, const Finish& finish) {
    if (!has_futures_) return false;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const c10::Error&) {
    }
    if (!future) return has_futures_ = false;
    future->addCallback([finish](c10::ivalue::Future& done) mutable {
      if (!done.hasError()) finish();
    });
    return true;
  }

  /// Returns the backend of the sub-group `ranks`; null on the other ranks, and if the options create it.
  Backend split_backend(const std::vector<int>& ranks, const std::string& name) {
    if (options_.make_backend) return {};
    return connect([backend = backend_, world = state_.world(), ranks, name, store_timeout = timeout()] {
      return split(*backend, own_store(world, name, store_timeout), ranks, name);
    });
  }

  /// Throws the first error: on a device also of an operation that the backend has ended, and whose cause the watching
  /// thread has not found yet. The program may have read its result.
  void check_error() {
    state_.check_error();
    std::optional<InFlight> last;
    std::exception_ptr cause;
    {
      const std::lock_guard lock(watch_mutex_);
      for (const InFlight& one : in_flight_)
        if (auto failed = failure_of_work(*one.work)) cause = cause ? cause : failed;
      if (cause) last = in_flight_.back();
    }
    if (cause) throw_transport_error(last->call, cause);
  }

  void order_stream(const Call& call, c10d::Work& work) {
    state_.check_error();
    try {
      work.wait();
    } catch (...) {
      throw_transport_error(call, std::current_exception());
    }
    state_.check_error();
  }

  /// Watches an operation on a device until it is complete. A no-op while this thread captures a graph, since
  /// a captured operation completes only when the graph is replayed.
  void watch(const Call& call, BackendWork work) {
    const c10::impl::VirtualGuardImpl guard(options_.device.type());
    if (CaptureScope::active() || is_capturing(guard, guard.getStream(options_.device))) return;
    {
      const std::lock_guard lock(watch_mutex_);
      in_flight_.push_back({call, std::move(work)});
      if (in_flight_.size() > 1) return;  // the thread is awake
    }
    watch_changed_.notify_all();
  }

  /// Blocks until `work` completes. Throws if it failed, if another rank failed, or at `until`.
  void await(const Call& call, c10d::Work& work, Clock::time_point until) {
    if (!is_gloo_) return await_polled(call, work, until);
    Membership::CallWatch watch(membership(), call);
    std::unique_lock lock(work.*WorkInternals::mutex);
    const auto complete = [&] { return work.*WorkInternals::completed; };
    while (!complete()) {
      const auto now = Clock::now();
      if (now >= until) {
        lock.unlock();
        throw_timeout(call);
      }
      if ((work.*WorkInternals::changed).wait_until(lock, std::min(until, now + look_interval), complete))
        break;
      lock.unlock();
      state_.check_error();
      check(watch.look());
      lock.lock();
    }
    if (auto cause = work.*WorkInternals::exception) {
      lock.unlock();
      throw_transport_error(call, cause);
    }
  }

  /// await() for a send or recv. Gloo ends such a wait only by abort, or by a timeout that breaks its connection.
  void await_message(const Call& call, const c10::intrusive_ptr<c10d::Work>& work, Clock::time_point until) {
    if (!is_gloo_) return await_polled(call, *work, until);
    const auto left = [](Clock::time_point end) {
      const auto time = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
      return std::max(time, std::chrono::milliseconds(1));
    };
    Membership::CallWatch watch(membership(), call);
    for (;;) {
      bool arrived = false;
      {
        std::optional<FailureMonitor::Interruption> interruption;
        if (membership().monitor())
          interruption.emplace(*membership().monitor(), work, std::min(watch.next(), until));
        // After the registration: a failure that arrived before it aborts nothing.
        check(watch.look());
        try {
          arrived = work->wait(left(call.start + timeout()));
        } catch (...) {
          if (Clock::now() >= call.start + timeout()) throw_timeout(call);
          throw_transport_error(call, std::current_exception());
        }
      }
      if (arrived) return;
      if (Clock::now() >= until) throw_timeout(call);
    }
  }

  /// Keeps a message alive whose Work was destroyed: Gloo would not send it otherwise.
  void keep(c10::intrusive_ptr<c10d::Work> message) noexcept {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(message));
  }

  /// Completes all works in flight and leaves the group. Throws TimeoutError at the timeout.
  void shutdown() {
    if (state_.closed() || state_.failed()) return;
    const Call call = state_.message("shutdown", {}, 0);
    state_.close();  // what throws below is not called again
    membership().depart(call);
    finish_works(call);
    membership().farewell(call);
  }

 private:
  using Messages = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // The pauses between two questions whether a polled work is complete: of the program, which waits for it,
  // and of the thread that watches it.
  static constexpr std::chrono::microseconds first_pause{20}, last_pause{5000}, watch_pause{20000};

  /// An operation on a device that may not be complete.
  struct InFlight {
    Call call;
    BackendWork work;
  };

  [[nodiscard]] Membership& membership() { return state_.membership(); }

  // Returns the keys of a process group on a separate connection: the program may block on the shared one.
  static StorePtr own_store(const World& world, const std::string& name,
                            std::chrono::milliseconds store_timeout) {
    if (world.size() == 1) return c10::make_intrusive<c10d::HashStore>();
    return c10::make_intrusive<c10d::PrefixStore>(name, world.connect_again(store_timeout));
  }

  // await() for a work that must be asked whether it is complete.
  void await_polled(const Call& call, c10d::Work& work, Clock::time_point until,
                    std::chrono::microseconds pause = first_pause) {
    Membership::CallWatch watch(membership(), call);
    for (; !is_complete(call, work); pause = std::max(pause, std::min(2 * pause, last_pause))) {
      if (watches() && (watch_ends_ || state_.failed())) return;
      state_.check_error();
      if (Clock::now() >= until) throw_timeout(call);
      check(watch.look());
      std::this_thread::sleep_for(pause);
    }
    if (!on_host() && !watches()) state_.check_error();  // an aborted operation completes, too
    if (auto cause = failure_of_work(work)) throw_transport_error(call, cause);
  }
  // Returns why the backend has ended a work. NCCL's watchdog aborts all operations of a communicator for the error of
  // one: the others complete without an exception.
  std::exception_ptr failure_of_work(c10d::Work& work) {
    if (auto cause = work.exception()) return cause;
    const std::lock_guard lock(mutex_);
    if (!is_nccl_ || !backend_ || !has_failed(*backend_)) return nullptr;
    return std::make_exception_ptr(std::runtime_error("NCCL has aborted its communicator"));
  }

  // The thread that watches the operations on a device. The errors that it finds are stored; the next call of
  // the program throws them.
  void watch_operations() {
    c10::impl::VirtualGuardImpl(options_.device.type()).setDevice(options_.device);
    std::unique_lock lock(watch_mutex_);
    for (;;) {
      watch_changed_.wait(lock, [&] { return watch_ends_ || !in_flight_.empty(); });
      if (watch_ends_) return;
      const InFlight oldest = in_flight_.front();
      lock.unlock();
      if (!state_.failed()) try {
          await_polled(oldest.call, *oldest.work, oldest.call.start + timeout(), watch_pause);
        } catch (const std::exception&) {
        }
      lock.lock();
      in_flight_.pop_front();
    }
  }
  [[nodiscard]] bool watches() const { return std::this_thread::get_id() == watch_.get_id(); }
  bool is_complete(const Call& call, c10d::Work& work) {
    try {
      return work.isCompleted();
    } catch (...) {
      throw_transport_error(call, std::current_exception());
    }
  }

  // Runs `make` on a thread that can be left behind: a backend has no bound on the time to connect, since a
  // peer or the store may never answer.
  Backend connect(std::function<Backend()> make) {
    const Call call{"the start of the communicator", 0, {}, 0, Clock::now(), served_call};
    const auto made = std::make_shared<Backend>();
    const LeavableThread connecting([made, make = std::move(make)] { *made = make(); });
    Membership::CallWatch watch(membership(), call);
    while (!connecting.ends_within(look_interval)) {
      check(watch.look());
      if (Clock::now() >= call.start + timeout()) throw_timeout(call);
    }
    try {
      connecting.rethrow();
      return std::move(*made);
    } catch (const Error&) {
      throw;
    } catch (...) {
      throw_transport_error(call, std::current_exception());
    }
  }

  // Ends the operations in flight on a device, on a thread of its own: c10d::Backend::abort may block.
  void abort_backend() noexcept try {
    const std::lock_guard lock(mutex_);
    if (!backend_ || aborting_) return;
    aborting_.emplace([backend = backend_] { abort_operations(*backend); });
  } catch (const std::exception&) {  // no thread can be started
  }

  // Completes the works in flight, unless another rank has failed, on a thread that can be left behind.
  void finish_works(const Call& call) {
    std::unique_lock lock(mutex_);
    const LeavableThread finishing([backend = std::move(backend_), kept = std::move(kept_),
                                    timeout = timeout(), on_device = !on_host()]() mutable {
      const SigpipeGuard guard;
      for (auto& message : kept) try {
          message->wait(timeout);
        } catch (const std::exception&) {  // its peer has gone without receiving it
        }
      kept.clear();
      if (on_device && backend.use_count() == 1) shut_down(*backend);
      backend.reset();
    });
    lock.unlock();
    while (!finishing.ends_within(look_interval)) {
      if (membership().monitor() && membership().monitor()->ended(membership().name())) return;
      if (Clock::now() >= call.start + timeout()) throw_timeout(call);
    }
  }

  // Stores `error` if it is the first, and throws it. No-op for null.
  void check(const std::exception_ptr& error) {
    if (!error) return;
    state_.record(error, false);
    if (!watches()) membership().notice();  // the program does not know of it yet
    std::rethrow_exception(error);
  }

  // Throws the TimeoutError of this call, which names the late ranks.
  [[noreturn]] void throw_timeout(const Call& call) {
    const bool last = Clock::now() >= call.start + timeout();
    check(membership().look(call));
    const std::string text = membership().lateness_of(call);
    check(membership().look(call));
    TimeoutError error(text, state_.world().rank());
    if (last) state_.record(std::make_exception_ptr(error), false);
    throw error;
  }

  // The backend failed: finds the rank that caused it and throws.
  [[noreturn]] void throw_transport_error(const Call& call, const std::exception_ptr& cause) {
    state_.check_error();
    const ForeignError foreign = backend_error(cause);
    check(membership().cause_of(
        call, detail::formatted("does not answer and has closed its connections ({})", foreign.text)));
    const CommunicationError error(
        Failure{.rank = state_.world().rank(),
                .call = call.failed(),
                .message = detail::formatted("{} failed: {}", call.text(), foreign.text)});
    state_.record(std::make_exception_ptr(error), false);
    throw error;
  }

  ProcessGroupOptions options_;
  GroupState state_;
  Backend backend_;
  TensorCheck check_;
  bool is_gloo_ = false, is_nccl_ = false;
  std::atomic<bool> has_futures_{false};
  std::mutex mutex_;
  Messages kept_;
  std::optional<LeavableThread> aborting_;  // it may use the backend after this group has gone

  std::mutex watch_mutex_;
  std::condition_variable watch_changed_;
  std::deque<InFlight> in_flight_;
  std::atomic<bool> watch_ends_{false};
  std::thread watch_;
};

}  // namespace lockstep::detail
