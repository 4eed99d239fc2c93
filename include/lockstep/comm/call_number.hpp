#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The name of the next communicator of all ranks of a world, for the keys in its store. The same on every
/// rank, also where several ranks are threads of one process: the worlds count their own.
inline std::string next_group_name(const World& world) {
  static std::mutex mutex;
  static std::map<c10d::Store*, std::pair<c10::weak_intrusive_ptr<c10d::Store>, int>> counts;
  const StorePtr store = world.store();
  std::lock_guard lock(mutex);
  auto [known, fresh] = counts.try_emplace(store.get(), store, 0);
  if (known->second.first.expired()) known->second = {c10::weak_intrusive_ptr<c10d::Store>(store), 0};
  return fmt::format("lockstep/nccl/{}", known->second.second++);
}

}  // namespace lockstep::detail
