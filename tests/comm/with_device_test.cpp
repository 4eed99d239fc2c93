#include "lockstep/comm/with_device.hpp"

#include <map>
#include <string>

#include "lockstep/comm/local_comm.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace with_device_test {

namespace {

using lockstep::DeviceKind;
using Values = std::map<std::string, std::string>;

// Stands for the communicator of a GPU.
struct PlayedComm : lockstep::LocalComm {
  using LocalComm::LocalComm;
  [[nodiscard]] at::Device tensor_device() const { return at::kMeta; }
};
static_assert(lockstep::DeviceCommunicator<PlayedComm>);
static_assert(!lockstep::DeviceCommunicator<lockstep::LocalComm>);
static_assert(!lockstep::DeviceCommunicator<lockstep::GlooComm>);

DeviceKind choose(std::optional<int> visible, std::optional<DeviceKind> wanted, Values values = {},
                  int local_rank = 0) {
  lockstep::Environment rank;
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
  const auto text = [](auto&&... arguments) {
    return text_of<lockstep::UsageError>([&] { choose(arguments...); });
  };
  CHECK_THAT(text(0, DeviceKind::gpu), ContainsSubstring("rank 0 has no GPU: there is no CUDA device"));
  CHECK_THAT(text(std::nullopt, DeviceKind::gpu), ContainsSubstring("this program was built without CUDA"));
  CHECK_THAT(text(0, std::optional<DeviceKind>{}, Values{{"LOCKSTEP_DEVICE", "gpu"}}),
             ContainsSubstring("there is no CUDA device"));
  CHECK_THAT(text(2, std::optional<DeviceKind>{}, Values{}, 2), ContainsSubstring("start at most 2 ranks"));
  CHECK_THAT(text(4, std::optional<DeviceKind>{}, Values{{"LOCKSTEP_DEVICE", "tpu"}}),
             ContainsSubstring("LOCKSTEP_DEVICE=tpu is unknown"));
}

TEST_CASE("one program is compiled for both, and one of the two is run") {
  const lockstep::World world;
  const auto program = []<class Comm>(const Comm& comm) {
    if constexpr (lockstep::DeviceCommunicator<Comm>)
      return comm.tensor_device().str();
    else
      return lockstep::comm_device(comm).str() + ", without another";
  };
  using lockstep::detail::with_device_of;
  CHECK(with_device_of<PlayedComm, lockstep::LocalComm>(1, world, program, {}) == "meta");
  CHECK(with_device_of<PlayedComm, lockstep::LocalComm>(0, world, program, {}) == "cpu, without another");
  CHECK(with_device_of<PlayedComm, lockstep::LocalComm>(1, world, program, DeviceKind::cpu) ==
        "cpu, without another");
  CHECK(with_device_of<void, lockstep::LocalComm>(std::nullopt, world, program, {}) ==
        "cpu, without another");
}

}  // namespace with_device_test
