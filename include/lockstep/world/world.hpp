#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/rank_zero_scope.hpp"

namespace lockstep {

/// Who this process is among all: a cheap value to copy, sharing one store connection, made once a process.
class World {
 public:
  /// torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or alone.
  static World from_environment() {
    auto number = [](const char* name, int fallback) {
      const char* text = std::getenv(name);
      return text ? std::atoi(text) : fallback;
    };
    World world;
    world.rank_ = number("RANK", 0);
    world.size_ = number("WORLD_SIZE", 1);
    world.local_rank_ = number("LOCAL_RANK", world.rank_);
    world.local_size_ = number("LOCAL_WORLD_SIZE", world.size_);
    world.log = Log(world.rank_);
    detail::process_rank = world.rank_;
    return world;
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  /// The rank among the processes of this host, and their number.
  [[nodiscard]] int local_rank() const { return local_rank_; }
  [[nodiscard]] int local_size() const { return local_size_; }

  /// The key-value store in which the ranks meet; connects at the first call. Throws RendezvousError.
  [[nodiscard]] c10::intrusive_ptr<c10d::Store> store() const {
    if (!*store_) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
      const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
      options.isServer = rank_ == 0 && !(agent && std::string(agent) == "True");
      options.useLibUV = false;
      options.waitWorkers = false;
      *store_ = c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options);
    }
    return *store_;
  }

  /// Runs `work` on global rank 0 only. A collective inside it throws at once instead of hanging.
  template <class Work>
  void rank_zero(Work&& work) const {
    if (rank_ != 0) return;
    RankZeroScope scope;
    std::forward<Work>(work)();
  }

  Log log;

 private:
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
  std::shared_ptr<c10::intrusive_ptr<c10d::Store>> store_ =
      std::make_shared<c10::intrusive_ptr<c10d::Store>>();
};

}  // namespace lockstep
