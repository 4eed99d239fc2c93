// The real CUDA and NCCL, linked: what they do where there is no GPU.
#include "lockstep/comm/nccl_comm.hpp"

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "lockstep/world/detail/cpu_affinity.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_of.hpp"

namespace binding_test {

TEST_CASE("NcclComm without a GPU is an error that says what to do") {
  if (lockstep::detail::visible_gpus() > 0) return;
  CHECK_THAT(text_of<lockstep::UsageError>([] { lockstep::NcclComm comm{lockstep::World()}; }),
             ContainsSubstring("rank 0 sees no CUDA device") && ContainsSubstring("use GlooComm"));
}

TEST_CASE("the NCCL that is called is the one that is loaded, once, and LibTorch's") {
  const auto used = lockstep::detail::file_of(reinterpret_cast<const void*>(&ncclGetVersion));
  CHECK(lockstep::detail::nccl_of_torch() == used);
  const auto libraries = lockstep::detail::loaded_nccl_libraries();
  CHECK(libraries.size() <= 1);
  if (!libraries.empty()) CHECK(libraries[0] == used);
}

TEST_CASE("a second NCCL in the process is refused, with the files of both") {
  const auto before = lockstep::detail::loaded_nccl_libraries();
  if (before.empty()) return;  // LibTorch holds its own, which cannot be copied
  const TemporaryFolder folder;
  const std::string copy = folder / "libnccl.so.2";
  std::filesystem::copy_file(before[0], copy);
  void* second = dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE(second != nullptr);
  CHECK_THAT(text_of<lockstep::UsageError>([] { lockstep::NcclComm comm{lockstep::World()}; }),
             ContainsSubstring("there are two NCCLs in this process, ") && ContainsSubstring(before[0]) &&
                 ContainsSubstring(copy));
  dlclose(second);
}

}  // namespace binding_test
