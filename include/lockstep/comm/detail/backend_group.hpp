#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <stop_token>
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

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/detail/call_watch.hpp"
#include "lockstep/comm/detail/group.hpp"
#include "lockstep/comm/detail/host_work.hpp"
#include "lockstep/comm/detail/shm_engine.hpp"
#include "lockstep/comm/detail/tensor_check.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/at_most.hpp"
#include "lockstep/detail/capture_scope.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/control_plane.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/failure_text.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1::detail {

/// Exposes the protected members of c10d's Work. Waiting on its condition variable directly avoids the
/// exception, with its stack trace, by which Work::wait reports a timeout.
struct WorkInternals : c10d::Work {
  static constexpr auto mutex = &WorkInternals::mutex_;
  static constexpr auto changed = &WorkInternals::cv_;
  static constexpr auto completed = &WorkInternals::completed_;
};

/// An operation of a backend in flight.
using BackendWork = c10::intrusive_ptr<c10d::Work>;

/// Blocks SIGPIPE in this thread while it lives, and for good in threads that start meanwhile. Gloo writes to
/// sockets whose other end may be closed and reads the error code.
class SigpipeGuard {
 public:
  SigpipeGuard() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~SigpipeGuard() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    const timespec now{0, 0};
    sigtimedwait(&pipe_, nullptr, &now);  // consume our own signal, if there is one
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;

 private:
  sigset_t pipe_{}, before_{};
};

/// The state that a ProcessGroupComm and its Works share: a Group with its backend.
///
/// On a device a thread of the group watches the operations in flight: the program itself may wait for the
/// device, which does not return while another rank is missing. The thread waits for the oldest operation as
/// await() does, and so stores the error of a failed rank or of the timeout, and ends the operations.
///
/// The destructor of a backend may wait for all works in flight, up to its timeout. So it runs on a thread
/// that may be left behind. After a failure, or without shutdown(), a backend that the group has made is
/// aborted first; one on a device then leaks: the process is about to end.
class BackendGroup final : public Group {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  BackendGroup(const World& world, std::vector<int> ranks, std::string name, ProcessGroupOptions options,
               Backend backend = {})
      : Group(world, std::move(ranks), std::move(name), options.timeout),
        options_(std::move(options)),
        backend_(std::move(backend)),
        made_(!backend_) {
    if (!on_host()) c10::impl::VirtualGuardImpl(options_.device.type()).setDevice(options_.device);
    const std::jthread mover = ShmEngine::mover();
    join();
    if (!backend_)
      backend_ = connect(this->name(), [rank = rank(), size = size(), own = options_](const StorePtr& store) {
        return own.make_backend(store, rank, size);
      });
    const std::string backend_name = backend_->getBackendName();
    is_gloo_ = backend_name == "gloo";
    is_nccl_ = backend_name == "nccl" || backend_name == "nccl2";
    is_own_ = dynamic_cast<HostBackend*>(backend_.get()) != nullptr;
    is_shm_ = is_own_ && backend_name == "shm";
    check_ = {is_gloo_  ? "Gloo"
              : is_own_ ? (is_shm_ ? "shared memory" : "MPI")
                        : formatted("the backend '{}'", backend_name),
              options_.device.type()};
    // From now on the other ranks notice by the transport when this rank dies, until now by its connection to the store.
    if (plane() && !state_of(world).communicates.exchange(true))
      plane()->publish({.kind = Event::connected, .rank = world.rank()});
    if (!on_host()) watch_ = std::jthread([this](const std::stop_token& stop) { watch_operations(stop); });
  }

  ~BackendGroup() override {
    watch_.request_stop();
    if (watch_.joinable()) watch_.join();
    if (ending_) static_cast<void>(ending_->ends_within(2 * last_wait));
    if (!backend_) return;
    // Not owned by the thread, which may never begin.
    auto* left = new std::pair{std::move(backend_), std::move(kept_)};
    if (on_host()) {
      at_most(last_wait, [left, aborts = made_] {
        if (aborts) abort_operations(*left->first);
        delete left;
      });
    } else {  // reachable, so that leak checkers do not report it
      static auto* left_behind = new std::vector<decltype(left)>();
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      left_behind->push_back(left);
    }
  }

  [[nodiscard]] const ProcessGroupOptions& options() const { return options_; }
  [[nodiscard]] const TensorCheck& tensor_check() const { return check_; }

  [[nodiscard]] bool is_forked() const { return getpid() != owner_; }
  [[nodiscard]] bool on_host() const { return options_.device.is_cpu(); }
  [[nodiscard]] bool averages() const { return !on_host() && !is_gloo_; }
  [[nodiscard]] bool ignores_tags() const { return is_nccl_; }
  [[nodiscard]] bool can_split() const {
    return options_.make_backend != nullptr || (backend_ && splits(*backend_));
  }

  template <class Start>
  BackendWork launch(const char* name, const Start& start) try {
    return start(*backend_);
  } catch (const Error&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError(
        formatted("{}: {} refused it: {}", name, check_.backend, classify(error.what()).text),
        world().rank());
  }

  /// Runs `start`, which launches a collective that has begun. If this rank has no memory for it, its next one would meet the
  /// other ranks' present one: the group ends on all ranks. What a backend refuses it refuses on all of them.
  template <class Start>
  void launch_all(const Start& start) {
    try {
      start();
    } catch (const CommunicationError&) {
      throw;
    } catch (...) {
      fail(std::current_exception(), true);
    }
  }

  /// Runs `function(error)` on the backend's thread when `work` has completed or failed, and before it counts
  /// as complete, so that a Work that is never waited for is finished too; two functions of one work may run
  /// concurrently. Returns false, and does nothing, on a device and if the backend's works have no futures.
  bool at_completion(const BackendWork& work, std::function<void(bool error)> function) {
    if (is_own_) static_cast<HostWork&>(*work).at_end(std::move(function));
    if (is_own_ || !has_futures_) return is_own_;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const c10::Error&) {
    }
    if (!future) return has_futures_ = false;
    future->addCallback(
        [function = std::move(function)](c10::ivalue::Future& done) { function(done.hasError()); });
    return true;
  }

  /// Makes the group of `members`, null on the other ranks. See ProcessGroupComm::new_group.
  [[nodiscard]] std::shared_ptr<BackendGroup> new_group(const std::vector<int>& members) {
    std::vector<int> world_ranks;
    for (const int member : members) {
      check_rank("new_group", member);
      const int world_rank = ranks()[static_cast<std::size_t>(member)];
      if (!world_ranks.empty() && world_rank <= world_ranks.back())
        throw CommunicationError("new_group: the ranks must ascend, and none may be named twice",
                                 world().rank());
      world_ranks.push_back(world_rank);
    }
    // The store compares the label: ranks with other lists would meet under one name.
    begin("new_group", {}, std::make_shared<const std::string>("of " + listed_ranks(members)));
    const CallScope scope("new_group");
    if (!can_split())
      throw CommunicationError(
          formatted("new_group: {} cannot split: set ProcessGroupOptions::make_backend", check_.backend),
          world().rank());
    std::string child = formatted("{}/{}", name(), children_++);
    Backend backend;  // null on the other ranks, and if the options create it
    if (!members.empty() && !options_.make_backend)
      backend = connect(child, [backend = backend_, members, child](const StorePtr& store) {
        return split(*backend, store, members, child);
      });
    if (std::find(members.begin(), members.end(), rank()) == members.end()) return nullptr;
    return std::make_shared<BackendGroup>(world(), std::move(world_ranks), std::move(child), options_,
                                          std::move(backend));
  }

  /// Throws the first error: on a device also of an operation that the backend has ended, and whose cause the
  /// watching thread has not found yet. The program may have read its result.
  void check_error() {
    Group::check_error();
    std::unique_lock lock(watch_mutex_);
    for (const auto& [call, work] : in_flight_)
      if (const auto cause = failure_of_work(*work)) {
        const Call last = in_flight_.back().first;
        lock.unlock();
        throw_transport_error(last, cause);
      }
  }

  void order_stream(const Call& call, c10d::Work& work) {
    Group::check_error();
    of_backend(call, [&] { work.wait(); });
    Group::check_error();
  }

  /// Holds an operation in flight: on the host a message until forget() or shutdown(), as Gloo would not send one
  /// whose work is destroyed; on a device any operation, which the thread watches until it is complete. A no-op while
  /// a graph is captured: a captured operation completes only when the graph is replayed, and a query of it would end the capture.
  void hold(const Call& call, BackendWork work) {
    if (on_host() && !call.peer) return;
    if (on_host()) {
      const std::lock_guard lock(mutex_);
      return kept_.push_back(std::move(work));
    }
    const c10::impl::VirtualGuardImpl guard(options_.device.type());
    if (CaptureScope::active_anywhere() || is_capturing(guard, guard.getStream(options_.device))) return;
    {
      const std::lock_guard lock(watch_mutex_);
      in_flight_.emplace_back(call, std::move(work));
      if (in_flight_.size() > 1) return;  // the thread is awake
    }
    watch_changed_.notify_all();
  }

  /// Blocks until `work` completes. Throws if it failed, if another rank failed, or at `until`.
  void await(const Call& call, const BackendWork& work, Clock::time_point until,
             std::chrono::microseconds pause = first_pause) {
    const std::jthread mover = is_shm_ ? std::jthread() : ShmEngine::mover();
    if (is_gloo_ && call.peer) return await_message(call, work, until);
    CallWatch watch(*this, call);
    while (!completes(call, *work, until, pause)) {
      if (watches() && (watch_.get_stop_token().stop_requested() || failed())) return;
      Group::check_error();
      if (Clock::now() >= until) throw_timeout(call);
      check(watch.look());
    }
    if (!on_host() && !watches()) Group::check_error();  // an aborted operation completes, too
    if (auto cause = failure_of_work(*work)) throw_transport_error(call, cause);
  }

  /// Starts an operation and blocks until it completes.
  template <class Start>
  void run(const Call& call, const Start& start) {
    await(call, launch(call.name, start), call.start + timeout());
  }

  /// Fails the group since its ranks have made different calls, as this one has found. The store finds the first calls
  /// that differ.
  [[noreturn]] void throw_mismatch(const Call& call) {
    if (plane()) static_cast<void>(plane()->await_mismatch());
    auto error = obstacle(call);
    if (!error)
      error =
          std::make_exception_ptr(MismatchError("the ranks have made different calls before " + call.text() +
                                                "; every rank must make the same, in order"));
    fail(error, true);
  }

  /// Ends hold() of a message.
  void forget(const BackendWork& message) {
    const std::lock_guard lock(mutex_);
    std::erase(kept_, message);
  }

  /// Completes all works in flight and leaves the group. Throws TimeoutError at the timeout.
  void shutdown() {
    if (closed() || failed()) return;
    const std::jthread mover = ShmEngine::mover();
    const Call call = message("shutdown", {}, 0);
    depart(&call);  // closes the group: what throws below is not called again
    await_works(call);
    CallWatch(*this, call).await_departures();
  }
  /// Leaves the group without waiting for another rank: works in flight are completed on a thread that may be left behind,
  /// or where the backend allows none by what the program calls later. The end of `launch` awaits them. Logs once that the
  /// ranks have made different calls, if nobody else says so.
  void leave() noexcept try {
    if (closed() || failed()) return;
    const auto over = [plane = plane(), name = name(), until = Clock::now() + timeout() + backend_slack] {
      return (plane && plane->ended(name)) || Clock::now() >= until;
    };
    auto* own = dynamic_cast<HostBackend*>(backend_.get());
    const bool needs_caller = own && !own->leave(over);
    depart();
    if (needs_caller) {
      const std::lock_guard lock(mutex_);
      state_of(world()).leave_behind(
          [backend = std::move(backend_), own, kept = std::exchange(kept_, {})](Milliseconds limit) {
            const auto until = Clock::now() + limit;
            return own->drain(until) &&
                   std::all_of(kept.begin(), kept.end(), [&](const BackendWork& message) {
                     return static_cast<HostWork&>(*message).wait_until(until);
                   });
          },
          over);
    } else if (const std::shared_ptr finishing = finish_works(); !finishing->ends_within(last_wait)) {
      state_of(world()).leave_behind(
          [finishing](Milliseconds limit) { return finishing->ends_within(limit); }, over);
    }
    if (!plane() || ending_rank.load()) return;
    static std::atomic_flag told;
    if (const auto failure = plane()->different_ends(status(), false); failure && !told.test_and_set())
      world().log.all().error("{}", failure->message);
  } catch (const std::exception&) {  // there is no memory or no thread
  }

 private:
  // Waits for a work, a while and at most until `until`. Returns whether it has completed. Gloo's works and lockstep's
  // say so; another must be asked, with growing pauses.
  bool completes(const Call& call, c10d::Work& work, Clock::time_point until,
                 std::chrono::microseconds& pause) {
    if (is_gloo_) {
      std::unique_lock lock(work.*WorkInternals::mutex);
      return (work.*WorkInternals::changed)
          .wait_until(lock, std::min(until, Clock::now() + look_interval),
                      [&] { return work.*WorkInternals::completed; });
    }
    if (is_own_)
      return static_cast<HostWork&>(work).wait_until(std::min(until, Clock::now() + look_interval));
    if (of_backend(call, [&] { return work.isCompleted(); })) return true;
    std::this_thread::sleep_for(pause);
    pause = std::max(pause, std::min(2 * pause, last_pause));
    return false;
  }
  // Gloo ends a wait for a message only by abort, or by a timeout that breaks its connection.
  void await_message(const Call& call, const BackendWork& work, Clock::time_point until) {
    const auto end = call.start + timeout();
    for (CallWatch watch(*this, call);;) {
      {
        const ControlPlane::Interruption interruption(
            *plane(), [work] { work->abort(); }, std::min(watch.next(), until));
        // After the registration: a failure that arrived before it aborts nothing.
        Group::check_error();
        check(watch.look());
        try {
          const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
          if (work->wait(std::max(left, std::chrono::milliseconds(1)))) return;
        } catch (...) {
          if (Clock::now() >= end) throw_timeout(call);
          throw_transport_error(call, std::current_exception());
        }
      }
      if (Clock::now() >= until) throw_timeout(call);
    }
  }
  // Returns why the backend has ended a work. NCCL's watchdog aborts all operations of a communicator for the
  // error of one: the others complete without an exception.
  std::exception_ptr failure_of_work(c10d::Work& work) {
    if (auto cause = work.exception()) return cause;
    const std::lock_guard lock(mutex_);
    if (!is_nccl_ || !backend_ || !has_failed(*backend_)) return nullptr;
    return std::make_exception_ptr(CommunicationError("NCCL has aborted its communicator"));
  }

  // The thread that watches the operations on a device. The errors that it finds are stored; the next call of
  // the program throws them.
  void watch_operations(const std::stop_token& stop) {
    c10::impl::VirtualGuardImpl(options_.device.type()).setDevice(options_.device);
    std::unique_lock lock(watch_mutex_);
    while (watch_changed_.wait(lock, stop, [&] { return !in_flight_.empty(); }) && !stop.stop_requested()) {
      const auto [call, oldest] = in_flight_.front();
      lock.unlock();
      if (!failed()) try {
          await(call, oldest, call.start + timeout(), watch_pause);
        } catch (const std::exception&) {
        }
      lock.lock();
      in_flight_.pop_front();
    }
  }
  [[nodiscard]] bool watches() const { return std::this_thread::get_id() == watch_.get_id(); }

  // Runs `make(store)` on a thread that can be left behind: a backend has no bound on the time to connect, since
  // a peer or the store may never answer. The store holds the keys of the process group `name`.
  Backend connect(const std::string& name, std::function<Backend(const StorePtr&)> make) {
    const Call call{"the start of the communicator", 0, {}, 0, Clock::now(), served_call};
    const auto made = std::make_shared<Backend>();
    const LeavableThread connecting([made, make = std::move(make), world = world(), name, own = timeout()] {
      StorePtr store = c10::make_intrusive<c10d::HashStore>();
      if (world.size() > 1) store = c10::make_intrusive<c10d::PrefixStore>(name, state_of(world).client(own));
      *made = make(store);
    });
    CallWatch watch(*this, call);
    while (!connecting.ends_within(look_interval)) {
      check(watch.look());
      if (Clock::now() >= call.start + timeout()) throw_timeout(call);
    }
    try {
      connecting.rethrow();
    } catch (const Error&) {
      record(std::current_exception(), true);
      throw;
    } catch (...) {
      throw_transport_error(call, std::current_exception());
    }
    return std::move(*made);
  }

  // Ends the operations in flight after a failure. On the host not of a backend that the program may share;
  // nor at a timeout, which leaves that to the destructor: a rank that has come later may still find who is late.
  void end_operations() noexcept override try {
    const std::lock_guard lock(mutex_);
    if (!backend_ || ending_ || (on_host() && (!made_ || failure_of(error()).kind == FailureKind::timed_out)))
      return;
    ending_.emplace([backend = backend_] { abort_operations(*backend); });
  } catch (const std::exception&) {  // no thread can be started
  }

  // Completes the works in flight on a thread that can be left behind.
  std::unique_ptr<LeavableThread> finish_works() {
    const std::lock_guard lock(mutex_);
    return std::make_unique<LeavableThread>([backend = std::move(backend_), kept = std::exchange(kept_, {}),
                                             timeout = timeout(), on_device = !on_host(),
                                             mover = ShmEngine::mover()]() mutable {
      const SigpipeGuard guard;
      for (auto& message : kept) try {
          if (message.use_count() == 1) message->wait(timeout);  // a message may be waited for only once
        } catch (const std::exception&) {                        // its peer has gone without receiving it
        }
      kept.clear();
      if (auto* own = dynamic_cast<HostBackend*>(backend.get())) own->drain(Clock::now() + timeout);
      if (on_device && backend.use_count() == 1) shut_down(*backend);
      backend.reset();
    });
  }
  // The same, and waits for it unless another rank has failed.
  void await_works(const Call& call) {
    const Backend left = made_ && on_host() ? backend_ : Backend();
    const auto finishing = finish_works();
    const auto end = call.start + timeout();
    while (!finishing->ends_within(look_interval) && !ended() && Clock::now() < end) {
    }
    if (finishing->ends_within({})) return;
    if (left) at_most(last_wait, [left] { abort_operations(*left); });
    if (!ended()) throw_timeout(call);
  }

  // Stores `error` if it is the first, and throws it. No-op for null.
  void check(const std::exception_ptr& error) {
    if (!error) return;
    record(error, false);
    if (!watches()) notice();  // the program does not know of it yet
    std::rethrow_exception(error);
  }

  // Throws the TimeoutError of this call, which names the late ranks.
  [[noreturn]] void throw_timeout(const Call& call) {
    const bool last = Clock::now() >= call.start + timeout();
    check(obstacle(call));
    const TimeoutError error = CallWatch(*this, call).timeout_error();
    check(obstacle(call));
    if (last) record(std::make_exception_ptr(error), false);
    throw error;
  }

  // Returns `ask()` of the backend. If the backend throws, finds the rank that caused it and throws that error.
  template <class Ask>
  auto of_backend(const Call& call, const Ask& ask) -> decltype(ask()) try {
    return ask();
  } catch (...) {
    throw_transport_error(call, std::current_exception());
  }
  // The backend failed: finds the rank that caused it and throws.
  [[noreturn]] void throw_transport_error(const Call& call, const std::exception_ptr& cause) {
    Group::check_error();
    if (is_own_) try {
        std::rethrow_exception(cause);
      } catch (const OtherOperation& other) {
        if (call.peer)
          fail(std::make_exception_ptr(MismatchError(formatted("{}: {}", call.text(), other.what()))), true);
        throw_mismatch(call);
      } catch (const std::exception&) {
      }
    const ForeignError foreign = classify(first_line(cause));
    check(CallWatch(*this, call)
              .cause_of(formatted("does not answer and has closed its connections ({})", foreign.text)));
    const CommunicationError error(Failure{.rank = world().rank(),
                                           .call = call.failed(),
                                           .message = formatted("{} failed: {}", call.text(), foreign.text)});
    record(std::make_exception_ptr(error), true);
    throw error;
  }

  ProcessGroupOptions options_;
  Backend backend_;
  const bool made_;  // by options_.make_backend
  const pid_t owner_ = getpid();
  TensorCheck check_;
  bool is_gloo_ = false, is_nccl_ = false, is_own_ = false, is_shm_ = false;  // is_own_: a HostBackend
  std::atomic<bool> has_futures_{on_host()};
  std::mutex mutex_;
  std::vector<BackendWork> kept_;
  int children_ = 0;
  std::optional<LeavableThread> ending_;  // it may use the backend after this group has gone

  std::mutex watch_mutex_;
  std::condition_variable_any watch_changed_;
  std::deque<std::pair<Call, BackendWork>> in_flight_;  // on a device, and may not be complete
  std::jthread watch_;
};

/// Makes the group of all ranks in the constructor `constructor` of a communicator. Collective. Throws
/// UsageError for invalid options, and MismatchError on ranks that would compute on another kind of device than the
/// first one that comes.
///
/// Its name is "lockstep/comm/3" for the fourth one. The number is equal on every rank if all make their
/// communicators in one order. The store counts them, so that all Worlds and shared objects of a process count together.
inline std::shared_ptr<BackendGroup> world_group(const char* constructor, const World& world,
                                                 ProcessGroupOptions options,
                                                 c10::intrusive_ptr<c10d::Backend> backend = {}) {
  const CallScope scope(constructor);
  options.timeout = checked_timeout("ProcessGroupOptions", options.timeout);
  const std::string name = store_keys::communicators;
  std::int64_t number = 0;
  if (world.size() > 1) {
    const std::string own = formatted("{} {}", options.device.is_cpu() ? "CPUs" : "GPUs", world.rank());
    Group self(world, {world.rank()}, name, options.timeout);
    const std::string first = self.ask(Group::making(), [&](RunClient run) {
      number = run.add(store_keys::calls_of_rank("comm", world.rank()), 1) - 1;
      return run.compare_set(formatted("lockstep/device/{}", number), {}, own);
    });
    if (first.substr(0, 4) != own.substr(0, 4))
      throw MismatchError(
          formatted("rank {} would compute on {}, and rank {} on {}: set LOCKSTEP_DEVICE=cpu on all of them, "
                    "or give each a GPU and a program built with CUDA",
                    first.substr(5), first.substr(0, 4), world.rank(), own.substr(0, 4)));
  }
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<BackendGroup>(world, std::move(ranks), formatted("{}/{}", name, number),
                                        std::move(options), std::move(backend));
}

}  // namespace lockstep::inline v0_1::detail
