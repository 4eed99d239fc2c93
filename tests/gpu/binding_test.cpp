// NcclComm linked with the real CUDA and NCCL: what it does where there is no GPU.
#include "lockstep/comm/nccl_comm.hpp"

#include <vector>

#include "lockstep/world/detail/cpu_affinity.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace binding_test {

TEST_CASE("the nccl.h of this program is the one that LibTorch was built with") {
  CHECK_NOTHROW(lockstep::detail::check_nccl_header());
}

TEST_CASE("NcclComm without a GPU is an error that says what to do") {
  if (lockstep::detail::visible_gpus() > 0) {
    WARN("SKIPPED: this host has GPUs");
    return;
  }
  std::vector engines{lockstep::NcclEngine::nccl};
#ifdef LOCKSTEP_DETAIL_HAS_NCCL2
  engines.push_back(lockstep::NcclEngine::nccl2);
#endif
  for (const auto engine : engines)
    CHECK_THAT(text_of<lockstep::UsageError>(
                   [&] { lockstep::NcclComm comm(lockstep::World(), {.engine = engine}); }),
               ContainsSubstring("rank 0 has no GPU") && ContainsSubstring("use GlooComm"));
}

}  // namespace binding_test
