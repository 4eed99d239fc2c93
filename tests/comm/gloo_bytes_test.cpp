#include <chrono>
#include <random>
#include <string>
#include <thread>

#include "support/catch.hpp"
#include "support/late_rank.hpp"
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

TEST_CASE("exchanges of bytes that nobody waits for yet run beside each other and other collectives") {
  TestedComm comm{test_world()};
  constexpr int rounds = 12;
  std::vector<std::vector<std::string>> gathered(rounds);
  std::vector<std::string> copies(rounds);
  std::vector<TestedComm::Work> gathers, broadcasts, sums;
  std::vector<at::Tensor> tensors;
  const auto length = [](int round, int rank) {
    return static_cast<std::size_t>(round * 997 % 5000 * (rank % 2) + rank);
  };
  for (int round = 0; round < rounds; ++round) {
    const int root = round % comm.size();
    gathers.push_back(
        comm.all_gather_bytes_async(gathered[round], bytes_of(comm.rank(), length(round, comm.rank()))));
    tensors.push_back(at::ones({100}));
    sums.push_back(comm.all_reduce(tensors.back()));
    copies[round] = comm.rank() == root ? bytes_of(round, 70000) : "ignored";
    broadcasts.push_back(comm.broadcast_bytes_async(copies[round], root));
  }
  // Every rank waits in an order of its own.
  for (int i = 0; i < rounds; ++i) {
    const int round = comm.rank() % 2 == 0 ? i : rounds - 1 - i;
    broadcasts[round].synchronize();
    CHECK(copies[round] == bytes_of(round, 70000));
    gathers[round].synchronize();
    REQUIRE(gathered[round].size() == static_cast<std::size_t>(comm.size()));
    for (int rank = 0; rank < comm.size(); ++rank)
      CHECK(gathered[round][rank] == bytes_of(rank, length(round, rank)));
    sums[round].synchronize();
    CHECK(tensors[round][0].item<double>() == comm.size());
  }
}

TEST_CASE("an exchange of bytes does not wait for the other ranks before it is waited for") {
  TestedComm comm{test_world()};
  std::vector<std::string> all;
  const bool late = comm.size() > 1 && comm.rank() == 1;
  if (late) lockstep_test::come_late("the bytes");
  auto work = comm.all_gather_bytes_async(all, bytes_of(comm.rank(), 10));
  if (comm.size() > 1 && !late) {
    // Rank 1 comes when the others have seen that it is missing: had the call waited for it, all would hang.
    CHECK_THROWS_WITH(work.synchronize(std::chrono::milliseconds(50)),
                      ContainsSubstring("rank 1 has not entered all_gather_bytes #1"));
    CHECK(all.empty());
    lockstep_test::saw_it_late("the bytes");
  }
  work.synchronize();
  CHECK(all.size() == static_cast<std::size_t>(comm.size()));
  work.synchronize();  // again: nothing happens
  CHECK(all.back() == bytes_of(comm.size() - 1, 10));
}

TEST_CASE("exchanges of bytes whose Work is dropped are carried to their end") {
  TestedComm comm{test_world()};
  {
    std::vector<std::string> never;
    std::string nor;
    static_cast<void>(comm.all_gather_bytes_async(never, bytes_of(comm.rank(), 100000)));
    static_cast<void>(comm.broadcast_bytes_async(nor, 0));
  }
  std::vector<std::string> all;
  comm.all_gather_bytes_async(all, bytes_of(comm.rank(), 3)).synchronize();
  CHECK(all[0] == bytes_of(0, 3));
  std::vector<std::string> dropped_with_the_communicator;
  static_cast<void>(comm.all_gather_bytes_async(dropped_with_the_communicator, bytes_of(comm.rank(), 200)));
  comm.shutdown();
}

TEST_CASE("a sub-group exchanges bytes of its own") {
  TestedComm comm{test_world()};
  auto last = comm.new_group({comm.size() - 1});
  CHECK(last.has_value() == (comm.rank() == comm.size() - 1));
  if (last) {
    std::vector<std::string> all;
    last->all_gather_bytes_async(all, "alone").synchronize();
    CHECK(all == std::vector<std::string>{"alone"});
  }
  comm.barrier();
}

}  // namespace gloo_bytes_test
