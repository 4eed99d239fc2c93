#include <thread>

#include "lockstep/comm/gloo_comm.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

using lockstep::GlooComm;
using namespace std::chrono_literals;

TEST_CASE("messages pass round a ring, in order and by tag") {
  GlooComm comm{test_world()};
  if (comm.size() == 1) return;
  const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
  for (auto type : {at::kFloat, at::kLong, at::kShort, at::kBool}) {
    auto first = at::full({3}, comm.rank()).to(type), second = at::full({3}, comm.rank() + 1).to(type);
    auto got_first = at::zeros({3}, type), got_second = at::zeros({3}, type),
         got_tagged = at::zeros({3}, type);
    auto tagged = comm.send(second, next, 9);
    auto a = comm.send(first, next), b = comm.send(second, next);
    comm.recv(got_first, previous).wait_host();
    comm.recv(got_second, previous).wait_host();
    comm.recv(got_tagged, previous, 9).wait_host();
    a.wait_host();
    b.wait_host();
    tagged.wait_host();
    CHECK(at::equal(got_first, at::full({3}, previous).to(type)));
    CHECK(at::equal(got_second, at::full({3}, previous + 1).to(type)));
    CHECK(at::equal(got_tagged, got_second));
  }
}

TEST_CASE("a message whose Work is dropped arrives") {
  GlooComm comm{test_world()};
  if (comm.size() == 1) return;
  if (comm.rank() == 0) {
    static_cast<void>(comm.send(at::full({1 << 20}, 3.0), 1));
  } else if (comm.rank() == 1) {
    std::this_thread::sleep_for(100ms);
    auto tensor = at::zeros({1 << 20});
    comm.recv(tensor, 0).wait_host();
    CHECK(at::equal(tensor, at::full({1 << 20}, 3.0)));
  }
}

TEST_CASE("a wait for a message that runs out can be repeated") {
  GlooComm comm{test_world()};
  if (comm.size() == 1) return;
  if (comm.rank() == 0) {
    auto tensor = at::zeros({4});
    auto work = comm.recv(tensor, 1);
    CHECK_THROWS_AS(work.wait_host(50ms), lockstep::TimeoutError);
    CHECK_THROWS_WITH(work.wait_host(50ms),
                      ContainsSubstring("recv from rank 1 (tag 0) is not complete after"));
    comm.barrier();
    work.wait_host();
    CHECK(at::equal(tensor, at::ones({4})));
  } else {
    comm.barrier();
    if (comm.rank() == 1) comm.send(at::ones({4}), 0).wait_host();
  }
  comm.barrier();
}

TEST_CASE("messages that cannot be are refused") {
  GlooComm comm{test_world()};
  CHECK_THROWS_AS(comm.send(at::ones({1}), comm.rank()), lockstep::CommunicationError);
  CHECK_THROWS_AS(comm.recv(at::ones({1}), comm.size()), lockstep::CommunicationError);
  if (comm.size() == 1) return;
  const int other = comm.rank() == 0 ? 1 : 0;
  CHECK_THROWS_AS(comm.send(at::ones({1}), other, -1), lockstep::CommunicationError);
  CHECK_THROWS_WITH(comm.send(at::ones({2}).to_sparse(), other), ContainsSubstring("not dense"));
}

TEST_CASE("a message is received whatever the strides of its place") {
  GlooComm comm{test_world()};
  if (comm.size() == 1) return;
  if (comm.rank() == 0) comm.send(at::arange(6, at::kLong).view({2, 3}).t(), 1).wait_host();
  if (comm.rank() == 1) {
    auto place = at::zeros({3, 5}, at::kLong);
    comm.recv(place.narrow(1, 1, 2), 0).wait_host();
    CHECK(at::equal(place.narrow(1, 1, 2), at::arange(6, at::kLong).view({2, 3}).t()));
    CHECK(place.select(1, 0).eq(0).all().item<bool>());
  }
}
