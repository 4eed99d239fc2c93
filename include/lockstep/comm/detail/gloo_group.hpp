#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/gloo_bytes.hpp"
#include "lockstep/comm/detail/gloo_devices.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/error.hpp"
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

/// Calls `action` on a thread of its own at `when`, unless the DelayedCall is destroyed earlier.
class DelayedCall {
 public:
  DelayedCall(std::chrono::steady_clock::time_point when, std::function<void()> action)
      : thread_([this, when, action = std::move(action)] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_until(lock, when, [&] { return off_; })) action();
        }) {}
  ~DelayedCall() {
    {
      std::lock_guard lock(mutex_);
      off_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  DelayedCall(const DelayedCall&) = delete;
  DelayedCall& operator=(const DelayedCall&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool off_ = false;
  std::thread thread_;
};

/// Returns Gloo's error text without LibTorch's stack trace and source locations.
inline std::string gloo_error_text(const std::exception_ptr& cause) {
  std::string text = "of an unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  } catch (...) {
  }
  text = text.substr(0, text.find('\n'));
  // "[/path/to/pair.cc:553] Connection closed by peer [127.0.0.1]:41234"
  if (const auto end = text.find("] ");
      text.starts_with("[") && text.substr(0, end).find(".cc:") != std::string::npos)
    text = text.substr(end + 2);
  // "[enforce fail at /path/to/pair.cc:544] op.preamble.length <= op.nbytes. 60 vs 20"
  if (const auto sizes = text.find("op.nbytes. "); sizes != std::string::npos)
    return detail::formatted("the ranks gave it tensors of different sizes (a part of {} bytes)",
                             text.substr(sizes + std::string_view("op.nbytes. ").size()));
  return text.substr(0, text.find(". This is typically"));
}

/// The state that a GlooComm and its Works share: the GroupState and the process group.
///
/// ProcessGroupGloo's destructor waits for all works in flight, up to the timeout. So the process group is
/// destroyed only after every rank has said farewell. In every other case it leaks: the process is about to
/// end, and its sockets with it.
class GlooGroup {
 public:
  using Clock = std::chrono::steady_clock;

  GlooGroup(const World& world, std::vector<int> ranks, std::string name, const GlooOptions& options)
      : options_(checked(options)), state_(world, std::move(ranks), std::move(name), options_.timeout) {
    membership().join("");
    connect();
    lane_ = std::make_shared<BytesLane>(
        [world, rank = state_.rank(), size = state_.size(), own = options_, name = state_.name()] {
          return connect_gloo(own_store(world, name + "/bytes", own.timeout), rank, size, world, own);
        });
  }

  ~GlooGroup() {
    if (!process_group_) return;
    // Reachable, so that leak checkers do not report it.
    struct Left {
      c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group;
      std::shared_ptr<BytesLane> lane;
      Messages messages;
    };
    static auto* left_behind = new std::vector<Left>();
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    left_behind->push_back({std::move(process_group_), std::move(lane_), std::move(kept_)});
  }
  GlooGroup(const GlooGroup&) = delete;
  GlooGroup& operator=(const GlooGroup&) = delete;

  [[nodiscard]] GroupState& state() { return state_; }
  [[nodiscard]] const GlooOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return options_.timeout; }
  [[nodiscard]] c10d::ProcessGroupGloo& process_group() { return *process_group_; }
  [[nodiscard]] BytesLane& bytes_lane() { return *lane_; }

  /// Blocks until `work` completes. Throws if it failed, if another rank failed, or at `until`.
  void await(const Call& call, c10d::Work& work, Clock::time_point until) {
    Membership::CallWatch watch(membership(), call);
    std::unique_lock lock(work.*WorkInternals::mutex);
    const auto complete = [&] { return work.*WorkInternals::completed; };
    while (!complete()) {
      const auto now = Clock::now();
      if (now >= until) {
        lock.unlock();
        throw_timeout(call);
      }
      if ((work.*WorkInternals::changed).wait_until(lock, std::min(until, now + slice), complete)) break;
      lock.unlock();
      check(watch.look());
      lock.lock();
    }
    if (auto cause = work.*WorkInternals::exception) {
      lock.unlock();
      throw_transport_error(call, cause);
    }
  }

  /// await() for a send or recv. Gloo ends such a wait only by abort, or by a timeout that breaks its
  /// connection.
  void await_message(const Call& call, const c10::intrusive_ptr<c10d::Work>& work, Clock::time_point until) {
    const auto left = [](Clock::time_point end) {
      const auto time = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
      return std::max(time, std::chrono::milliseconds(1));
    };
    Membership::CallWatch watch(membership(), call);
    for (;;) {
      bool arrived = false;
      {
        std::optional<FailureMonitor::Interruption> interruption;
        if (membership().monitor()) interruption.emplace(*membership().monitor(), work, watch.next());
        // After the registration: a failure that arrived before it aborts nothing.
        check(watch.look(true));
        try {
          std::optional<DelayedCall> delayed_abort;
          if (until < call.start + timeout()) delayed_abort.emplace(until, [&] { work->abort(); });
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

  /// Leaves the group gracefully: completes all works in flight and says farewell to the other ranks. The
  /// rank that hosts the store leaves last. Throws TimeoutError at the timeout.
  void shutdown() {
    if (state_.closed() || state_.failed()) return;
    const Call call = state_.message("shutdown", -1, 0);
    membership().depart();
    state_.close();
    if (finish_works(call)) membership().farewell(call);
  }

 private:
  using Messages = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // How long a waiting thread sleeps between two checks for failures.
  static constexpr std::chrono::milliseconds slice{50};

  [[nodiscard]] Membership& membership() { return state_.membership(); }

  // Returns the keys of a process group on a separate connection: the program may block on the shared one.
  static StorePtr own_store(const World& world, const std::string& name, std::chrono::milliseconds limit) {
    if (world.size() == 1) return c10::make_intrusive<c10d::HashStore>();
    return c10::make_intrusive<c10d::PrefixStore>(name, world.connect_again(limit));
  }

  // Gloo has no bound on the time to connect: a peer or the store may never answer.
  void connect() {
    const Call call{"the start of the communicator", 0, -1, 0, Clock::now()};
    std::promise<c10::intrusive_ptr<c10d::ProcessGroupGloo>> promise;
    auto connected = promise.get_future();
    std::thread([promise = std::move(promise), rank = state_.rank(), size = state_.size(),
                 world = state_.world(), name = state_.name(), options = options_]() mutable {
      try {
        promise.set_value(connect_gloo(own_store(world, name, options.timeout), rank, size, world, options));
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    }).detach();
    Membership::CallWatch watch(membership(), call);
    while (connected.wait_for(slice) != std::future_status::ready) {
      check(watch.look());
      if (Clock::now() >= call.start + timeout()) throw_timeout(call);
    }
    try {
      process_group_ = connected.get();
    } catch (const Error&) {
      throw;
    } catch (...) {
      throw_transport_error(call, std::current_exception());
    }
  }

  // Completes the works in flight, on a thread that can be left behind. Returns false if another rank failed.
  bool finish_works(const Call& call) {
    std::promise<void> promise;
    auto finished = promise.get_future();
    std::thread([promise = std::move(promise), gloo = std::move(process_group_), lane = std::move(lane_),
                 kept = std::move(kept_), timeout = timeout()]() mutable {
      try {
        const SigpipeGuard guard;
        for (auto& message : kept) try {
            message->wait(timeout);
          } catch (const std::exception&) {  // its peer has gone without receiving it
          }
        kept.clear();
        gloo.reset();
        lane->close();
        promise.set_value();
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    }).detach();
    while (finished.wait_for(slice) != std::future_status::ready) {
      if (membership().monitor() && membership().monitor()->failure()) return false;
      if (Clock::now() >= call.start + timeout()) throw_timeout(call);
    }
    return true;
  }

  // Stores `error` if it is the first, and throws it. No-op for null.
  void check(const std::exception_ptr& error) {
    if (!error) return;
    state_.record(error, false);
    membership().notice();
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

  // Gloo failed: finds the rank that caused it and throws.
  [[noreturn]] void throw_transport_error(const Call& call, const std::exception_ptr& cause) {
    state_.check_error();
    const std::string text = gloo_error_text(cause);
    check(membership().cause_of(
        call, detail::formatted("it does not answer and has closed its connections ({})", text)));
    const CommunicationError error(detail::formatted("{} failed: {}", call.text(), text),
                                   state_.world().rank());
    state_.record(std::make_exception_ptr(error), false);
    throw error;
  }

  GlooOptions options_;
  GroupState state_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group_;
  std::shared_ptr<BytesLane> lane_;
  std::mutex mutex_;
  Messages kept_;
};

}  // namespace lockstep::detail
