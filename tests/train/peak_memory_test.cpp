#include "lockstep/train/peak_memory.hpp"

#include <ATen/ops/zeros.h>

#include "support/catch.hpp"

namespace peak_memory_test {

TEST_CASE("peak memory grows with what is taken, and does not shrink") {
  const auto before = lockstep::peak_memory();
  CHECK(before > (1 << 20));
  constexpr std::int64_t bytes = 256 << 20;
  at::zeros({bytes}, at::kByte).fill_(1);  // what is not written to is not resident
  const auto after = lockstep::peak_memory();
  // Some of it may have been there already, in memory that the allocator kept.
  CHECK(after >= before + bytes / 2);
  CHECK(lockstep::peak_memory() >= after);
}

}  // namespace peak_memory_test
