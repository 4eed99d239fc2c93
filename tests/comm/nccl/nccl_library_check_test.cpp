#include "lockstep/comm/detail/nccl/nccl_library_check.hpp"

#include "support/catch.hpp"

namespace nccl_library_check_test {

using lockstep::detail::nccl_conflict;
using lockstep::detail::NcclsFound;

TEST_CASE("one NCCL, as new as its header, is no conflict") {
  const std::string wheel = "/torch/libnccl.so.2", zip = "/opt/libtorch/lib/libtorch_cuda.so";
  CHECK(!nccl_conflict({{wheel}, wheel, wheel, 23007, 22809}));
  CHECK(!nccl_conflict({{wheel}, wheel, std::nullopt, 23007, 22809}));  // a LibTorch without NCCL
  CHECK(!nccl_conflict({{}, zip, zip, 22105, 22105}));                  // one that LibTorch holds and shows
}

TEST_CASE("two NCCLs in a process, and one too old, are told with their files") {
  const auto text = [](const NcclsFound& found) { return nccl_conflict(found).value_or(""); };
  const std::string a = "/a/libnccl.so.2", b = "/b/libnccl.so.2";
  CHECK_THAT(text({{a, b}, a, a, 23007, 23007}),
             ContainsSubstring("two NCCLs in this process, /a/libnccl.so.2 and /b/libnccl.so.2"));
  CHECK_THAT(text({{a}, a, "", 23007, 23007}),
             ContainsSubstring("LibTorch's in libtorch_cuda and /a/libnccl.so.2"));
  CHECK_THAT(text({{a}, a, "/lib/libtorch_cuda.so", 23007, 23007}),
             ContainsSubstring("LibTorch's in /lib/libtorch_cuda.so and /a/libnccl.so.2"));
  CHECK_THAT(text({{a}, a, a, 21703, 21703}), ContainsSubstring("is 2.17.3, and 2.18 is the oldest"));
  CHECK_THAT(text({{a}, a, a, 22105, 22809}), ContainsSubstring("is 2.21.5, older than the nccl.h 2.28.9"));
}

}  // namespace nccl_library_check_test
