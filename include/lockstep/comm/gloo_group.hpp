#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/gloo_options.hpp"
#include "lockstep/detail/process_group_gloo.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace lockstep::detail {

/// One call of a collective or of send and recv.
struct Call {
  const char* name = "";
  std::uint64_t sequence = 0;  // of a collective, from 1
  int peer = -1;               // of a message: the rank in the group
  int tag = 0;
  std::chrono::steady_clock::time_point start{};

  /// "all_reduce #57", "recv from rank 2 (tag 5)"
  [[nodiscard]] std::string text() const {
    if (peer < 0) return fmt::format("{} #{}", name, sequence);
    return fmt::format("{} {} rank {} (tag {})", name, name[0] == 's' ? "to" : "from", peer, tag);
  }
};

// c10d's Work keeps its condition variable to its children. Waiting on it directly spares the exception by
// which Work::wait reports a deadline.
struct WorkInternals : c10d::Work {
  static constexpr auto mutex = &WorkInternals::mutex_;
  static constexpr auto changed = &WorkInternals::cv_;
  static constexpr auto completed = &WorkInternals::completed_;
  static constexpr auto exception = &WorkInternals::exception_;
};

/// What a GlooComm and its Works share: the process group, the count of collectives, and the first error.
class GlooGroup {
 public:
  GlooGroup(const World& world, std::vector<int> ranks, std::string name, const GlooOptions& options)
      : world_(world), ranks_(std::move(ranks)), name_(std::move(name)), options_(options) {
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      if (ranks_[i] == world.rank()) rank_ = static_cast<int>(i);
    auto gloo = c10d::ProcessGroupGloo::Options::create(options.deadline + std::chrono::seconds(10));
    gloo->threads = options.threads;
    gloo->devices = devices();
    c10::intrusive_ptr<c10d::Store> store;
    if (world.size() == 1)
      store = c10::make_intrusive<c10d::HashStore>();
    else
      store = world.store();
    process_group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::PrefixStore>(name_, store), rank_, size(), std::move(gloo));
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] const World& world() const { return world_; }
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::vector<int>& ranks() const { return ranks_; }
  [[nodiscard]] const GlooOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds deadline() const { return options_.deadline; }
  [[nodiscard]] c10d::ProcessGroupGloo& process_group() { return *process_group_; }
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// Opens a collective: throws in a rank-zero scope, and the first error again if there was one.
  Call begin(const char* name) {
    Call call = message(name, -1, 0);
    call.sequence = ++sequence_;
    return call;
  }
  Call message(const char* name, int peer, int tag) {
    forbid_in_rank_zero_scope(name);
    if (failed()) std::rethrow_exception(error_);
    return {name, 0, peer, tag, std::chrono::steady_clock::now()};
  }

  /// Blocks until `work` is complete; throws when it failed, or when `until` has come.
  void await(const Call& call, c10d::Work& work, std::chrono::steady_clock::time_point until) {
    std::unique_lock lock(work.*WorkInternals::mutex);
    const bool complete = (work.*WorkInternals::changed).wait_until(lock, until, [&] {
      return work.*WorkInternals::completed;
    });
    if (!complete) {
      lock.unlock();
      throw TimeoutError(fmt::format("{} is not complete", call.text()));
    }
    if (work.*WorkInternals::exception) {
      auto cause = work.*WorkInternals::exception;
      lock.unlock();
      std::rethrow_exception(cause);
    }
  }
  void await_message(const Call& call, const c10::intrusive_ptr<c10d::Work>& work,
                     std::chrono::steady_clock::time_point until) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (!work->wait(std::max(left, std::chrono::milliseconds(1))))
      throw TimeoutError(fmt::format("{} is not complete", call.text()));
  }

  /// Keeps a message alive whose Work was dropped.
  void keep(c10::intrusive_ptr<c10d::Work> message) noexcept {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(message));
  }

  void shutdown() {}
  void abort(const std::string&) {}

 private:
  [[nodiscard]] std::vector<std::shared_ptr<gloo::transport::Device>> devices() const {
    std::string interfaces = options_.interfaces;
    if (const char* chosen = std::getenv("GLOO_SOCKET_IFNAME"); interfaces.empty() && chosen)
      interfaces = chosen;
    std::vector<std::shared_ptr<gloo::transport::Device>> devices;
    std::size_t begin = 0;
    while (begin < interfaces.size()) {
      const std::size_t end = std::min(interfaces.find(',', begin), interfaces.size());
      if (end > begin)
        devices.push_back(
            c10d::ProcessGroupGloo::createDeviceForInterface(interfaces.substr(begin, end - begin)));
      begin = end + 1;
    }
    if (devices.empty() && world_.local_size() == world_.size())
      devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    if (devices.empty()) devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    return devices;
  }

  World world_;
  std::vector<int> ranks_;  // global, by rank in the group
  std::string name_;
  GlooOptions options_;
  int rank_ = 0;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> process_group_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> kept_;
};

}  // namespace lockstep::detail
