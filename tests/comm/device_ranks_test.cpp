#include <string>

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"

namespace device_ranks_test {

TEST_CASE("ranks that would compute on GPUs and on CPUs are told so, with two of them by name", "[2+]") {
  lockstep::GlooComm comm{test_world()};
  const auto make = [](at::DeviceType device) {
    lockstep::ProcessGroupOptions options;
    options.device = at::Device(device, device == at::kCPU ? -1 : 0);
    lockstep::detail::world_group("a constructor", test_world(), options);
  };
  // Rank 1 comes first, and fails as this LibTorch has no such device.
  if (comm.rank() == 1) CHECK_THROWS(make(at::kXLA));
  comm.barrier();
  if (comm.rank() == 1) return;
  CHECK(text_of<lockstep::MismatchError>([&] { make(at::kCPU); }) ==
        fmt::format("rank 1 would compute on GPUs, and rank {} on CPUs: set LOCKSTEP_DEVICE=cpu on all of "
                    "them, or give each a GPU and a program built with CUDA",
                    comm.rank()));
}

}  // namespace device_ranks_test
