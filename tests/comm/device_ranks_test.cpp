#include <string>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/with_device.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"

namespace device_ranks_test {

using lockstep::DeviceKind;

TEST_CASE("ranks that would compute on GPUs and on CPUs are told so, with two of them by name", "[2+]") {
  lockstep::GlooComm comm{test_world()};
  lockstep::detail::agree_on_device(test_world(), DeviceKind::gpu);
  lockstep::detail::agree_on_device(test_world(), DeviceKind::cpu);
  const std::string said = text_of<lockstep::MismatchError>([&] {
    lockstep::detail::agree_on_device(test_world(), comm.rank() == 1 ? DeviceKind::gpu : DeviceKind::cpu);
  });
  int told = 0;
  const auto all = comm.all_gather_bytes(said);
  for (int rank = 0; rank < comm.size(); ++rank) {
    const std::string& text = all[static_cast<std::size_t>(rank)];
    if (text.empty()) continue;
    ++told;
    CHECK_THAT(text, ContainsSubstring(rank == 1 ? " would compute on CPUs, and rank 1 on GPUs: "
                                                 : fmt::format("rank 1 would compute on GPUs, and rank {} on "
                                                               "CPUs: ",
                                                               rank)));
  }
  CHECK(told >= 1);
}

}  // namespace device_ranks_test
