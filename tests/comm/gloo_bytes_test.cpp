#include <random>
#include <string>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace gloo_bytes_test {

using lockstep_test::TestedComm;

namespace {
std::string bytes_of(int rank, std::size_t length) {
  std::string bytes(length, '\0');
  for (std::size_t i = 0; i < length; ++i)
    bytes[i] = static_cast<char>((i * 31 + static_cast<std::size_t>(rank) * 7) % 256);
  return bytes;
}
}  // namespace

TEST_CASE("bytes of any length are gathered by rank") {
  TestedComm comm{test_world()};
  const auto check = [&](auto length_of) {
    const auto all = comm.all_gather_bytes(bytes_of(comm.rank(), length_of(comm.rank())));
    REQUIRE(all.size() == static_cast<std::size_t>(comm.size()));
    for (int r = 0; r < comm.size(); ++r)
      CHECK(all[static_cast<std::size_t>(r)] == bytes_of(r, length_of(r)));
  };
  check([](int) { return std::size_t{0}; });
  check([](int rank) { return static_cast<std::size_t>(rank * 100); });
  check([](int) { return std::size_t{300000}; });
  // One long one among empty ones travels alone.
  check([](int rank) { return rank == 0 ? (std::size_t{5} << 20) + 3 : std::size_t{0}; });
  std::mt19937 draw(3);
  for (int i = 0; i < 20; ++i) {
    const auto seed = draw();
    check([&](int rank) { return (seed >> (3 * rank)) % 5000; });
  }
}

TEST_CASE("bytes are broadcast from any rank") {
  TestedComm comm{test_world()};
  for (int root = 0; root < comm.size(); ++root)
    for (std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{70000}, std::size_t{3} << 20})
      CHECK(comm.broadcast_bytes(comm.rank() == root ? bytes_of(root, length) : "ignored", root) ==
            bytes_of(root, length));
}

TEST_CASE("a sub-group exchanges bytes of its own") {
  TestedComm comm{test_world()};
  auto last = comm.new_group({comm.size() - 1});
  CHECK(last.has_value() == (comm.rank() == comm.size() - 1));
  if (last) CHECK(last->all_gather_bytes("alone") == std::vector<std::string>{"alone"});
  comm.barrier();
}

}  // namespace gloo_bytes_test
