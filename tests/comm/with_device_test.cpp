#include "lockstep/comm/with_device.hpp"

#include <map>
#include <string>

#include "support/catch.hpp"

namespace with_device_test {

namespace {

using lockstep::DeviceKind;
using Values = std::map<std::string, std::string>;

static_assert(!lockstep::DeviceCommunicator<lockstep::LocalComm>);
static_assert(!lockstep::DeviceCommunicator<lockstep::GlooComm>);

DeviceKind choose(std::optional<int> visible, std::optional<DeviceKind> wanted, Values values = {},
                  int local_rank = 0) {
  lockstep::detail::Environment rank;
  rank.rank = rank.local_rank = local_rank;
  rank.size = rank.local_size = 4;
  return lockstep::detail::choose_device(
      rank, visible, wanted, [&](const char* name) -> std::optional<std::string> {
        const auto found = values.find(name);
        return found == values.end() ? std::nullopt : std::optional(found->second);
      });
}

}  // namespace

TEST_CASE("the program computes on GPUs where there are some") {
  CHECK(choose(4, {}) == DeviceKind::gpu);
  CHECK(choose(0, {}) == DeviceKind::cpu);
  CHECK(choose(std::nullopt, {}) == DeviceKind::cpu);
}

TEST_CASE("the program or its user chooses otherwise") {
  CHECK(choose(4, DeviceKind::cpu) == DeviceKind::cpu);
  CHECK(choose(4, {}, {{"LOCKSTEP_DEVICE", "cpu"}}) == DeviceKind::cpu);
  CHECK(choose(4, {}, {{"LOCKSTEP_DEVICE", "auto"}}) == DeviceKind::gpu);
  CHECK(choose(4, DeviceKind::gpu, {{"LOCKSTEP_DEVICE", "cpu"}}) == DeviceKind::gpu);
}

TEST_CASE("a GPU that is not there is an error and never a CPU") {
  using lockstep::UsageError;
  CHECK_THROWS_AS(choose(0, DeviceKind::gpu), UsageError);
  CHECK_THROWS_AS(choose(0, {}, {{"LOCKSTEP_DEVICE", "gpu"}}), UsageError);
  CHECK_THROWS_AS(choose(2, {}, {}, 2), UsageError);
  CHECK_THROWS_WITH(choose(std::nullopt, DeviceKind::gpu),
                    "rank 0 is to compute on a GPU, but this program was built without CUDA: link "
                    "lockstep::cuda, or compute on CPUs");
  CHECK_THROWS_WITH(choose(4, {}, {{"LOCKSTEP_DEVICE", "tpu"}}),
                    "LOCKSTEP_DEVICE=tpu is unknown: it must be auto, cpu or gpu");
}

TEST_CASE("a program that wants the CPU runs there") {
  const auto device = [](const auto& comm) { return lockstep::comm_device(comm).str(); };
  CHECK(lockstep::with_device(lockstep::World(), device, DeviceKind::cpu) == "cpu");
}

}  // namespace with_device_test
