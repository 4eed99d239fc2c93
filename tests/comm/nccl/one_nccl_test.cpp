#include "lockstep/comm/nccl/one_nccl.hpp"

#include "support/catch.hpp"

using lockstep::detail::nccl_conflict;
using lockstep::detail::NcclsFound;

TEST_CASE("one NCCL, as new as its header, is no conflict") {
  CHECK(!nccl_conflict({{"/torch/libnccl.so.2"}, "/torch/libnccl.so.2", 23007, 22809, 23007}));
  CHECK(!nccl_conflict({{}, "/opt/libtorch/lib/libtorch_cuda.so", 22105, 22105, 22105}));  // linked into LibTorch
}

TEST_CASE("two NCCLs in a process, and one too old, are told with their files") {
  const auto text = [](const NcclsFound& found) { return nccl_conflict(found).value_or(""); };
  CHECK_THAT(text({{"/a/libnccl.so.2", "/b/libnccl.so.2"}, "/a/libnccl.so.2", 23007, 23007, 23007}),
             ContainsSubstring("two NCCLs in this process, /a/libnccl.so.2 and /b/libnccl.so.2"));
  CHECK_THAT(text({{"/a/libnccl.so.2"}, "/a/libnccl.so.2", 23007, 23007, 22105}),
             ContainsSubstring("LibTorch's own 2.21.5 and 2.30.7 of /a/libnccl.so.2"));
  CHECK_THAT(text({{"/a/libnccl.so.2"}, "/a/libnccl.so.2", 21703, 21703, 21703}),
             ContainsSubstring("is 2.17.3, and 2.18 is the oldest"));
  CHECK_THAT(text({{"/a/libnccl.so.2"}, "/a/libnccl.so.2", 22105, 22809, 22105}),
             ContainsSubstring("is 2.21.5, older than the nccl.h 2.28.9"));
}

TEST_CASE("LibTorch's way to give a version") {
  CHECK(lockstep::detail::nccl_version_of_torch((std::uint64_t{2} << 32) | (30 << 16) | 7) == 23007);
}
