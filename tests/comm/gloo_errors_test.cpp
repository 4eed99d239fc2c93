#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "support/catch.hpp"
#include "support/late_rank.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"
#include "support/text_of.hpp"

namespace gloo_errors_test {

using lockstep::ReduceOp;
using lockstep_test::come_late;
using lockstep_test::saw_it_late;
using lockstep_test::TestedComm;
using namespace std::chrono_literals;

TEST_CASE("a collective in a rank-zero scope throws at once") {
  TestedComm comm{test_world()};
  auto tensor = at::ones({2});
  test_world().rank_zero([&] {
    CHECK_THROWS_AS(comm.all_reduce(tensor), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.broadcast(tensor), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.all_gather_bytes(""), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.barrier(), lockstep::CommunicationError);
    CHECK_THROWS_AS(comm.new_group({0}), lockstep::CommunicationError);
  });
  CHECK_NOTHROW(comm.barrier());  // none of it counted
}

TEST_CASE("tensors that Gloo cannot take are refused by name") {
  TestedComm comm{test_world()};
  using Tensors = std::vector<at::Tensor>;
  for (const auto& [tensors, op, words] : std::vector<std::tuple<Tensors, ReduceOp, std::string>>{
           {{at::zeros({2}, at::kShort)}, ReduceOp::sum, "[2] int16"},
           {{at::ones({1}), at::zeros({2}, at::kShort)}, ReduceOp::sum, "[2] int16"},
           {{at::zeros({2}, at::kComplexFloat)}, ReduceOp::sum, "complex64"},
           {{at::zeros({2}, at::kLong)}, ReduceOp::avg, "average"},
           {{at::Tensor()}, ReduceOp::sum, "the tensor is undefined"},
           {{at::zeros({1}).expand({4})}, ReduceOp::sum, "share memory: clone it first"},
           {{at::ones({2, 2}).to_sparse()}, ReduceOp::sum, "not dense"}})
    CHECK_THAT(text_of<lockstep::CommunicationError>(
                   [&, &tensors = tensors, &op = op] { comm.all_reduce(tensors, op).synchronize(); }),
               ContainsSubstring(words));
  CHECK_THROWS_AS(comm.reduce(at::ones({1}), comm.size()), lockstep::CommunicationError);
  comm.barrier();
}

TEST_CASE("a rank that has no memory for a collective ends the communicator on all ranks", "[2+]") {
  TestedComm comm{test_world()};
  const std::vector<at::Tensor> tensors(2, at::ones({8 << 20}));  // which are sent as one of 64 MiB
  rlimit limit{};
  REQUIRE(getrlimit(RLIMIT_AS, &limit) == 0);
  if (comm.rank() == 1) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit small{pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + (32 << 20), limit.rlim_max};
    REQUIRE(setrlimit(RLIMIT_AS, &small) == 0);
  }
  CHECK_THROWS(comm.all_reduce(tensors).synchronize());
  setrlimit(RLIMIT_AS, &limit);
  CHECK_THROWS_AS(comm.barrier(), std::exception);
  TestedComm another{test_world()};
  another.barrier();
}

TEST_CASE("a wait that runs out names the late rank, and can be repeated", "[2+]") {
  TestedComm comm{test_world()};
  comm.barrier();
  auto tensor = at::ones({10});
  if (comm.rank() == 1) {
    come_late("the sum");
    comm.all_reduce(tensor).synchronize();
  } else {
    auto work = comm.all_reduce(tensor);
    CHECK_THROWS_AS(work.synchronize(200ms), lockstep::TimeoutError);
    saw_it_late("the sum");
    CHECK(work.error() == nullptr);
    work.synchronize();
  }
  CHECK(tensor[0].item<double>() == comm.size());
  comm.barrier();
}

TEST_CASE("the error of a barrier names exactly the ranks that never come", "[2+]") {
  TestedComm others{test_world()};
  const std::string missing = others.size() > 7   ? "ranks 1, 3, 5 and 7 have"
                              : others.size() > 5 ? "ranks 1, 3 and 5 have"
                              : others.size() > 3 ? "ranks 1 and 3 have"
                                                  : "rank 1 has";
  {
    TestedComm comm{test_world(), {.timeout = 2500ms}};  // in which the ranks have to meet as well
    if (comm.rank() % 2 == 0) {
      std::string text;
      try {
        comm.barrier();
      } catch (const lockstep::TimeoutError& error) {
        text = error.what();
        CHECK(error.rank() == comm.rank());
      }
      CHECK(text.starts_with(missing + " not entered barrier #1 after "));
      const auto elsewhere = text.find(". Rank 1 has entered barrier #1 in the communicator '");
      CHECK(elsewhere != std::string::npos);
      CHECK(text.substr(0, elsewhere).find("rank 0") == std::string::npos);
      CHECK(text.substr(0, elsewhere).find("rank 2") == std::string::npos);
      CHECK_THROWS_WITH(comm.barrier(), text);  // it sticks
    }
    others.barrier();  // until here every rank can say where it is
  }
  CHECK_NOTHROW(others.barrier());
}

TEST_CASE("a barrier that is waited for later lets a rank do something else before") {
  TestedComm comm{test_world()};
  auto work = comm.barrier_async();
  auto tensor = at::ones({3});
  comm.all_reduce(tensor).synchronize();
  work.synchronize();
  work.synchronize();
  CHECK(tensor[0].item<double>() == comm.size());
  if (comm.size() == 1) return;
  if (comm.rank() == 1) {
    come_late("the barrier");
    comm.barrier();
  } else {
    auto late = comm.barrier_async();
    CHECK_THROWS_AS(late.synchronize(100ms), lockstep::TimeoutError);
    saw_it_late("the barrier");
    late.synchronize();
  }
}

TEST_CASE("the longest timeout there is waits, and none at all is refused") {
  using lockstep::GlooComm, lockstep::UsageError;
  constexpr auto longest = std::chrono::milliseconds::max();
  TestedComm comm{test_world(), {.timeout = longest}};
  auto tensor = at::ones({4});
  auto work = comm.all_reduce(tensor);
  work.synchronize(longest);
  CHECK(tensor[0].item<double>() == comm.size());
  if (comm.rank() == 1) std::this_thread::sleep_for(100ms);
  comm.barrier();
  CHECK(comm.all_gather_bytes("a").size() == static_cast<std::size_t>(comm.size()));
  if (comm.size() > 1 && comm.rank() == 0) comm.send(tensor, 1).synchronize(longest);
  if (comm.size() > 1 && comm.rank() == 1) comm.recv(tensor, 0).synchronize();
  comm.shutdown();

  CHECK_THROWS_AS((GlooComm{test_world(), {.timeout = 0ms}}), UsageError);
  CHECK_THROWS_AS((GlooComm{test_world(), {.timeout = -5ms}}), UsageError);
  CHECK_THROWS_AS((GlooComm{test_world(), {.timeout = std::chrono::milliseconds::min()}}), UsageError);
  CHECK_THROWS_AS((GlooComm{test_world(), {.threads = 0}}), UsageError);
}

}  // namespace gloo_errors_test
