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

/// Owns an NCCL communicator. Ensures that one thread at a time calls NCCL with it, and none once it is
/// destroyed.
///
/// Thread-safe.
template <NcclDevice D>
class NcclHandle {
 public:
  using Comm = typename D::Comm;

  explicit NcclHandle(const D& device) : device_(device) {}
  ~NcclHandle() { abort(); }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  /// Where NCCL stores a new communicator, possibly later and from a thread of its own.
  using Place = std::shared_ptr<Comm>;

  /// Creates the communicator with `start(Comm&)`, which may return in_progress.
  template <class Start>
  NcclResult make(Start&& start) {
    std::lock_guard lock(mutex_);
    const NcclResult result = start(*own_);
    comm_.store(*own_);
    return result;
  }
  /// Takes ownership of a communicator that was split from another.
  void adopt(Comm comm) { comm_.store(comm); }

  /// Splits off another communicator with `start(comm, made)`. The handle keeps the place of `made` until
  /// taken_from(), even if the caller abandons the split; an abort also aborts the communicator stored there.
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
  /// Returns the communicator that was split off, once the split has settled; null if an abort has ended it.
  [[nodiscard]] Comm taken_from(const Place& place) {
    std::lock_guard lock(places_mutex_);
    if (std::erase(places_, place) == 0) return Comm{};
    return std::atomic_ref<Comm>(*place).load();
  }

  /// Calls `use(comm)`. Returns invalid_usage if the communicator is gone.
  template <class Use>
  NcclResult call(Use&& use) {
    std::lock_guard lock(mutex_);
    const Comm comm = comm_.load();
    if (comm == Comm{}) return NcclResult::invalid_usage;
    return use(comm);
  }

  /// Calls `launch()`, which launches a graph that uses the communicator. Returns invalid_usage if the
  /// communicator is gone. Other threads may call on the communicator meanwhile. An abort waits at most 1 s
  /// for `launch` to return.
  template <class Launch>
  NcclResult launch(Launch&& launch) {
    std::lock_guard lock(launch_mutex_);
    if (gone()) return NcclResult::invalid_usage;
    launch();
    return NcclResult::success;
  }

  /// Polls until `result` is no longer in_progress, and returns the final result. Calls `look()` between
  /// polls, which may throw to stop.
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
  /// Non-blocking state(): returns std::nullopt while another thread calls on the communicator.
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

  /// Aborts the works in flight and destroys the communicator. Waits at most 1 s for a thread that is inside
  /// an NCCL call; after that the abort itself unblocks the thread.
  void abort() noexcept {
    std::unique_lock lock(mutex_, std::defer_lock), launch_lock(launch_mutex_, std::defer_lock);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (std::try_lock(lock, launch_lock) >= 0 && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Comm comm = comm_.exchange(Comm{});
    if (comm == Comm{}) return;
    device_.abort(comm);
    // After the abort no thread of NCCL's writes to the places.
    std::vector<Place> places;
    {
      std::lock_guard places_lock(places_mutex_);
      places.swap(places_);
    }
    for (const Place& place : places)
      if (*place != Comm{}) device_.abort(*place);
  }
  /// Destroys the communicator after `finalize` has succeeded.
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
  const std::unique_ptr<Comm> own_ = std::make_unique<Comm>();  // where NCCL stores it
  std::mutex places_mutex_;
  std::vector<Place> places_;  // of the splits in progress
};

}  // namespace lockstep::detail
