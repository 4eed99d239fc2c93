#pragma once

// The communicator of the rank tests: TestedComm is CpuComm, which is in shared memory here. In a file that defines
// LOCKSTEP_TEST_PROCESS_GROUP it is a ProcessGroupComm over a ProcessGroupGloo that the test has created, as a
// program does that already holds a process group.
#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/gloo_comm.hpp"

#ifdef LOCKSTEP_TEST_PROCESS_GROUP
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/process_group_gloo.hpp"

namespace lockstep_test {

/// Returns a ProcessGroupGloo of the world's ranks. Collective.
inline c10::intrusive_ptr<c10d::Backend> process_group(const lockstep::World& world,
                                                       const lockstep::GlooOptions& options = {}) {
  static int made = 0;
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  if (world.size() > 1)
    store =
        c10::make_intrusive<c10d::PrefixStore>("test/process group " + std::to_string(made++), world.store());
  // Gloo has no room for more than the longest timeout.
  const auto timeout = std::min<std::chrono::milliseconds>(options.timeout, std::chrono::hours(24));
  auto gloo = c10d::ProcessGroupGloo::Options::create(timeout + std::chrono::seconds(10));
  gloo->threads = options.threads;
  gloo->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, world.rank(), world.size(), std::move(gloo));
}

class TestedComm : public lockstep::ProcessGroupComm {
 public:
  explicit TestedComm(const lockstep::World& world, const lockstep::GlooOptions& options = {})
      : ProcessGroupComm(world, process_group(world, options), {.timeout = options.timeout}) {}

  [[nodiscard]] std::optional<TestedComm> new_group(const std::vector<int>& ranks) {
    if (auto group = ProcessGroupComm::new_group(ranks)) return TestedComm(std::move(*group));
    return std::nullopt;
  }

 private:
  explicit TestedComm(ProcessGroupComm&& group) : ProcessGroupComm(std::move(group)) {}
};

}  // namespace lockstep_test
#else
namespace lockstep_test {
using TestedComm = lockstep::CpuComm;
}  // namespace lockstep_test
#endif
