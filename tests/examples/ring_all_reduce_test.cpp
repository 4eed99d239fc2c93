// ring_all_reduce checks its sums against all_reduce itself; here the bytes that it counts.
#include "examples/output.hpp"

namespace ring_all_reduce_test {

using namespace lockstep_test;

namespace {

Ended run_ring(const std::string& nproc, const std::string& elements) {
  return run_example({test_program("ring_all_reduce"), "--nproc", nproc, "--elements", elements});
}

}  // namespace

TEST_CASE("a ring all-reduce sends 2 (n - 1) / n of the tensor from each rank") {
  const auto even = run_ring("4", "1000");
  CHECK(even.code == 0);
  for (int rank = 0; rank < 4; ++rank)
    CHECK(count(even.out,
                "[rank " + std::to_string(rank) + "] sent 6000 bytes: 1.5000 of the tensor's 4000\n") == 1);
  CHECK_THAT(even.out, ContainsSubstring("4 ranks: the sums equal all_reduce's; 2 (n - 1) / n = 1.5000\n"));
}

TEST_CASE("a ring all-reduce takes lengths that the ranks do not divide") {
  // Chunks of 1, 1 and 0 elements.
  const auto ended = run_ring("3", "2");
  CHECK(ended.code == 0);
  CHECK_THAT(ended.out, ContainsSubstring("[rank 2] sent 8 bytes: 1.0000 of the tensor's 8\n"));
  CHECK_THAT(ended.out, ContainsSubstring("3 ranks: the sums equal all_reduce's"));
}

TEST_CASE("a ring all-reduce refuses an empty tensor") {
  const auto ended = run_ring("2", "0");
  CHECK(ended.code == 2);
  CHECK(ended.error.starts_with("error: --elements: "));
  CHECK(ended.error.ends_with("; see --help\n"));
  CHECK(count(ended.error, "\n") == 1);
}

}  // namespace ring_all_reduce_test
