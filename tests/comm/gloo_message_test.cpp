#include <utility>

#include "support/catch.hpp"
#include "support/ranks.hpp"
#include "support/tested_comm.hpp"

namespace gloo_message_test {

using lockstep_test::TestedComm;
using namespace std::chrono_literals;

namespace {

/// The ranks after and before this one in a ring.
std::pair<int, int> neighbours(const TestedComm& comm) {
  return {(comm.rank() + 1) % comm.size(), (comm.rank() + comm.size() - 1) % comm.size()};
}

}  // namespace

TEST_CASE("messages pass round a ring, in order and by tag", "[2+]") {
  TestedComm comm{test_world()};
  const auto [next, previous] = neighbours(comm);
  for (auto type : {at::kFloat, at::kLong, at::kShort, at::kBool}) {
    auto first = at::full({3}, comm.rank()).to(type), second = at::full({3}, comm.rank() + 1).to(type);
    auto got_first = at::zeros({3}, type), got_second = at::zeros({3}, type),
         got_tagged = at::zeros({3}, type);
    auto tagged = comm.send(second, next, 9);
    auto a = comm.send(first, next), b = comm.send(second, next);
    comm.recv(got_first, previous).synchronize();
    comm.recv(got_second, previous).synchronize();
    comm.recv(got_tagged, previous, 9).synchronize();
    a.synchronize();
    b.synchronize();
    tagged.synchronize();
    CHECK(at::equal(got_first, at::full({3}, previous).to(type)));
    CHECK(at::equal(got_second, at::full({3}, previous + 1).to(type)));
    CHECK(at::equal(got_tagged, got_second));
  }
}

TEST_CASE("a message whose Work is dropped arrives", "[2+]") {
  TestedComm comm{test_world()};
  const auto [next, previous] = neighbours(comm);
  const auto message_of = [](int rank) { return at::full({1 << 20}, rank, at::kFloat); };
  static_cast<void>(comm.send(message_of(comm.rank()), next));
  comm.barrier();  // every Work is gone before anybody receives
  auto tensor = at::zeros({1 << 20});
  comm.recv(tensor, previous).synchronize();
  CHECK(at::equal(tensor, message_of(previous)));
}

TEST_CASE("a wait for a message that runs out can be repeated", "[2+]") {
  TestedComm comm{test_world()};
  if (comm.rank() == 0) {
    auto tensor = at::zeros({4});
    auto work = comm.recv(tensor, 1);
    CHECK_THROWS_AS(work.synchronize(50ms), lockstep::TimeoutError);
    comm.barrier();
    work.synchronize();
    CHECK(at::equal(tensor, at::ones({4})));
  } else {
    comm.barrier();
    if (comm.rank() == 1) comm.send(at::ones({4}), 0).synchronize();
  }
  CHECK_NOTHROW(comm.barrier());
}

TEST_CASE("messages that cannot be are refused") {
  TestedComm comm{test_world()};
  CHECK_THROWS_AS(comm.send(at::ones({1}), comm.rank()), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.recv(at::ones({1}), comm.size()), lockstep::CommunicationError);
  if (comm.size() == 1) return;
  const int other = comm.rank() == 0 ? 1 : 0;
  CHECK_THROWS_AS(comm.send(at::ones({1}), other, -1), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.send(at::ones({2}).to_sparse(), other), lockstep::CommunicationError);
}

TEST_CASE("a message is received whatever the strides of its place", "[2+]") {
  TestedComm comm{test_world()};
  const auto [next, previous] = neighbours(comm);
  const auto message_of = [](int rank) { return (at::arange(6, at::kLong) + rank).view({2, 3}).t(); };
  auto sent = comm.send(message_of(comm.rank()), next);
  auto place = at::zeros({3, 5}, at::kLong);
  comm.recv(place.narrow(1, 1, 2), previous).synchronize();
  sent.synchronize();
  CHECK(at::equal(place.narrow(1, 1, 2), message_of(previous)));
  CHECK(place.select(1, 0).eq(0).all().item<bool>());
}

}  // namespace gloo_message_test
