// NcclComm linked with the real CUDA and NCCL: what it does where there is no GPU.
#include "lockstep/comm/nccl_comm.hpp"

#include <torch/cuda.h>

#include <vector>

#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace binding_test {

TEST_CASE("NcclComm without a GPU is an error that says so") {
  if (torch::cuda::device_count() > 0) {
    WARN("SKIPPED: this host has GPUs");
    return;
  }
  std::vector engines{lockstep::NcclEngine::nccl};
#ifdef LOCKSTEP_DETAIL_HAS_NCCL2
  engines.push_back(lockstep::NcclEngine::nccl2);
#endif
  for (const auto engine : engines)  // and not that nccl.h is another one than LibTorch was built with
    CHECK(text_of<lockstep::UsageError>([&] {
            lockstep::NcclComm comm(lockstep::World(), {.engine = engine});
          }).starts_with("rank 0 has no GPU: "));
}

}  // namespace binding_test
