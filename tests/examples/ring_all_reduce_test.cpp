// ring_all_reduce checks its sums against all_reduce itself; here the bytes that it counts.
#include "examples/output.hpp"

namespace ring_all_reduce_test {

using namespace lockstep_test;

namespace {

std::vector<std::string> ring(const std::string& nproc, const std::string& elements) {
  return sorted_lines(out_of({test_program("ring_all_reduce"), "--nproc", nproc, "--elements", elements}));
}

}  // namespace

TEST_CASE("a ring all-reduce sends 2 (n - 1) / n of the tensor from each rank") {
  std::vector<std::string> expected{"4 ranks: the sums equal all_reduce's; 2 (n - 1) / n = 1.5000"};
  for (int rank = 0; rank < 4; ++rank)
    expected.push_back(fmt::format("[rank {}] sent 6000 bytes: 1.5000 of the tensor's 4000", rank));
  CHECK(ring("4", "1000") == expected);
}

TEST_CASE("a ring all-reduce takes lengths that the ranks do not divide") {
  // Chunks of 1, 1 and 0 elements.
  CHECK(ring("3", "2") ==
        std::vector<std::string>{"3 ranks: the sums equal all_reduce's; 2 (n - 1) / n = 1.3333",
                                 "[rank 0] sent 12 bytes: 1.5000 of the tensor's 8",
                                 "[rank 1] sent 12 bytes: 1.5000 of the tensor's 8",
                                 "[rank 2] sent 8 bytes: 1.0000 of the tensor's 8"});
}

TEST_CASE("a ring all-reduce refuses an empty tensor") {
  const auto error = refusal_of({test_program("ring_all_reduce"), "--nproc", "2", "--elements", "0"});
  CHECK(error.starts_with("error: --elements: "));
  CHECK(error.ends_with("; see --help\n"));
}

}  // namespace ring_all_reduce_test
