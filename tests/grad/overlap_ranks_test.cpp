// Buckets are on their way while backward is still running: shown by the order of events, not by time.
#include <algorithm>
#include <string>
#include <vector>

#include "grad/models.hpp"

namespace overlap_ranks_test {

using lockstep::DistributedDataParallel;
using lockstep_test::TestedComm;

namespace {

using Events = std::vector<std::string>;

// Writes down when an all_reduce is issued.
struct WatchedComm : TestedComm {
  WatchedComm(const lockstep::World& world, Events& events) : TestedComm(world), events(&events) {}
  Work all_reduce(at::TensorList tensors, lockstep::ReduceOp op) {
    events->push_back("all_reduce");
    return TestedComm::all_reduce(tensors, op);
  }
  Events* events;
};

// How many all_reduces were issued before the last gradient came.
std::ptrdiff_t issued_before_the_last(const Events& events) {
  const auto last = std::find(events.rbegin(), events.rend(), "gradient").base();
  return std::count(events.begin(), last, "all_reduce");
}

}  // namespace

TEST_CASE("once the buckets are rebuilt, they are issued while gradients still come") {
  Events events;
  WatchedComm comm(test_world(), events);
  Net net;
  DistributedDataParallel ddp{net, comm, small_buckets()};
  for (const auto& parameter : net->parameters())
    parameter.register_hook([&events](const at::Tensor&) { events.emplace_back("gradient"); });
  for (int step = 0; step < 4; ++step) {
    CAPTURE(step);
    net->zero_grad();
    const auto loss = ddp(batch_of(test_world().rank(), 0)).sum();
    events.clear();
    ddp.backward(loss);
    REQUIRE(std::count(events.begin(), events.end(), "gradient") == 6);
    if (step == 0) continue;  // in which order gradients come is not known yet
    const auto buckets = static_cast<std::ptrdiff_t>(ddp.buckets().size());
    CHECK(buckets >= 3);
    CHECK(issued_before_the_last(events) == buckets - 1);  // the last gradient completes the last bucket
  }
}

}  // namespace overlap_ranks_test
