#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/nccl/device.hpp"

namespace lockstep::detail {

/// Owns an NCCL communicator, and sees to it that one thread at a time calls on it, and none once it is gone.
///
/// Thread safety: every function may be called from any thread.
template <NcclDevice D>
class NcclHandle {
 public:
  using Comm = typename D::Comm;

  explicit NcclHandle(const D& device) : device_(device) {}
  ~NcclHandle() { abort(); }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  /// Where NCCL puts a communicator that it makes: maybe later, and from a thread of its own.
  using Place = std::shared_ptr<Comm>;

  /// Makes the communicator: `start(Comm&)` starts that.
  template <class Start>
  NcclResult make(Start&& start) {
    std::lock_guard lock(mutex_);
    const NcclResult result = start(*own_);
    comm_.store(*own_);
    return result;
  }
  /// Takes one that was split from another.
  void adopt(Comm comm) { comm_.store(comm); }

  /// Splits another one off: `start(comm, made)` starts that. Until it is settled, the place of `made` is
  /// kept here, whoever gives up waiting meanwhile, and an abort takes along what has come there.
  template <class Start>
  std::pair<NcclResult, Place> split(Start&& start) {
    auto place = std::make_shared<Comm>();
    {
      std::lock_guard lock(places_mutex_);
      places_.push_back(place);
    }
    const NcclResult result = call([&](Comm comm) { return start(comm, *place); });
    return {result, std::move(place)};
  }
  /// What was split off, once that is settled; null where an abort has taken it along.
  [[nodiscard]] Comm taken_from(const Place& place) {
    std::lock_guard lock(places_mutex_);
    if (std::erase(places_, place) == 0) return Comm{};
    return std::atomic_ref<Comm>(*place).load();
  }

  /// Calls `use(comm)` unless the communicator is gone: then the answer is invalid_usage.
  template <class Use>
  NcclResult call(Use&& use) {
    std::lock_guard lock(mutex_);
    const Comm comm = comm_.load();
    if (comm == Comm{}) return NcclResult::invalid_usage;
    return use(comm);
  }

  /// Calls `launch()`, which launches a graph that uses the communicator, unless that is gone: then the
  /// answer is invalid_usage. Other threads may call on the communicator meanwhile; an abort gives it a
  /// second to return.
  template <class Launch>
  NcclResult launch(Launch&& launch) {
    std::lock_guard lock(launch_mutex_);
    if (gone()) return NcclResult::invalid_usage;
    launch();
    return NcclResult::success;
  }

  /// Waits for what `result` says is still in progress, and returns how it ended. Calls `look()` in between,
  /// which throws to give up.
  template <class Look>
  NcclResult settle(NcclResult result, Look&& look) {
    for (auto pause = std::chrono::microseconds(1); result == NcclResult::in_progress; pause *= 2) {
      look();
      if (pause > std::chrono::microseconds(1000)) pause = std::chrono::microseconds(1000);
      if (pause > std::chrono::microseconds(16)) std::this_thread::sleep_for(pause);
      result = state();
    }
    return result;
  }

  [[nodiscard]] NcclResult state() {
    return call([&](Comm comm) { return device_.state(comm); });
  }
  /// The same without blocking; nothing while another thread calls on the communicator.
  [[nodiscard]] std::optional<NcclResult> state_if_idle() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return std::nullopt;
    const Comm comm = comm_.load();
    return comm == Comm{} ? NcclResult::invalid_usage : device_.state(comm);
  }
  [[nodiscard]] std::string last_error() {
    std::string text;
    call([&](Comm comm) {
      text = device_.last_error(comm);
      return NcclResult::success;
    });
    return text;
  }

  /// Ends what is in flight, and the communicator. A thread that is stuck inside one of NCCL's calls is given
  /// a second to come out; after that the abort is what gets it out.
  void abort() noexcept {
    std::unique_lock lock(mutex_, std::defer_lock), launch_lock(launch_mutex_, std::defer_lock);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (std::try_lock(lock, launch_lock) >= 0 && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Comm comm = comm_.exchange(Comm{});
    if (comm == Comm{}) return;
    device_.abort(comm);
    // Behind that no thread of NCCL's is at it any more.
    std::vector<Place> places;
    {
      std::lock_guard places_lock(places_mutex_);
      places.swap(places_);
    }
    for (const Place& place : places)
      if (*place != Comm{}) device_.abort(*place);
  }
  /// Ends the communicator after `finalize` has succeeded.
  void destroy() {
    std::lock_guard lock(mutex_);
    const Comm comm = comm_.exchange(Comm{});
    if (comm != Comm{}) device_.destroy(comm);
  }
  [[nodiscard]] bool gone() const { return comm_.load() == Comm{}; }

 private:
  D device_;
  std::mutex mutex_;
  std::mutex launch_mutex_;
  std::atomic<Comm> comm_{Comm{}};
  const std::unique_ptr<Comm> own_ = std::make_unique<Comm>();  // where NCCL puts it
  std::mutex places_mutex_;
  std::vector<Place> places_;  // of those that are being split off
};

}  // namespace lockstep::detail
