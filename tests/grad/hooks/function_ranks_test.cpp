// Hooks of one's own.
#include <stdexcept>

#include "grad/hooks/buckets.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace function_ranks_test {

using namespace lockstep;

namespace {

const Plan plan{{{4, 3}}, {{5}, {2}}};

template <class Hook>
void check_average(Hook& hook, std::uint64_t bytes) {
  static_assert(CommunicationHook<Hook, GlooComm> && CommunicationHook<Hook, LocalComm>);
  Buckets buckets(plan);
  const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(1));
  const auto exact = buckets.average(1);
  for (std::size_t b = 0; b < averages.size(); ++b)
    CHECK(torch::allclose(averages[b].to(torch::kDouble), exact[b], 1e-5, 1e-6));
  CHECK(hook.wire_bytes() == on_the_wire(bytes));
}

/// Adds up what it has seen, and stops at `limit`.
struct Counter {
  std::int64_t seen = 0, before = 0;

  template <class Comm>
  void operator()(Comm& comm, const GradientBucket& bucket) {
    if (bucket.index == 0) before = seen;
    seen += bucket.flat.numel();
    comm.all_reduce(bucket.flat, ReduceOp::avg).synchronize();
  }
  [[nodiscard]] HookState state() const { return {{"seen", torch::tensor(seen)}}; }
  void load_state(const HookState& state) { seen = state.at(0).second.item<std::int64_t>(); }
  void rollback() { seen = before; }
  void reset() { seen = before = 0; }
};

/// Sends half the bytes.
struct Halving {
  std::uint64_t bytes = 0;
  torch::Tensor operator()(auto& comm, const GradientBucket& bucket) {
    const auto half = (bucket.flat / comm.size()).to(torch::kBFloat16);
    comm.all_reduce(half).synchronize();
    bytes += half.nbytes();
    return half.to(bucket.flat.scalar_type());
  }
  [[nodiscard]] std::uint64_t wire_bytes() const { return bytes; }
};

}  // namespace

TEST_CASE("a function may return the average, write it, or return a Work") {
  auto returned = hook_of([](auto& comm, const GradientBucket& bucket) {
    const torch::Tensor half = bucket.flat / comm.size();
    comm.all_reduce(half).synchronize();
    return half;
  });
  check_average(returned, 4 * 19);
  auto written = hook_of([](auto& comm, const GradientBucket& bucket) {
    auto all = torch::empty({comm.size(), bucket.flat.numel()});
    comm.all_gather(all, bucket.flat).synchronize();
    bucket.flat.copy_(all.mean(0));
  });
  check_average(written, 4 * 19);
  auto begun = hook_of(
      [](auto& comm, const GradientBucket& bucket) {
        bucket.flat.div_(comm.size());
        return comm.all_reduce(bucket.flat);
      },
      "begun");
  check_average(begun, 4 * 19);
  CHECK(std::string(begun.name()) == "begun");
}

TEST_CASE("a function that names its communicator gets that one") {
  auto hook = hook_of([](GlooComm& comm, const GradientBucket& bucket) {
    comm.all_reduce(bucket.flat, ReduceOp::avg).synchronize();
  });
  Buckets buckets(plan);
  const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(1));
  CHECK(torch::allclose(averages[0].to(torch::kDouble), buckets.average(1)[0], 1e-5, 1e-6));
}

TEST_CASE("a function that returns another shape or dtype is an error that names both, and no rank waits") {
  Buckets buckets(plan);
  const auto text = [&](auto function) {
    auto hook = hook_of(function, "mine");
    return thrown_by([&] { buckets.reduce(hook, shared_comm(), buckets.mine(1)); });
  };
  const std::string shape = text([](auto& comm, const GradientBucket& bucket) {
    comm.all_reduce(bucket.flat).synchronize();
    return bucket.index == 1 ? bucket.flat.narrow(0, 0, 3) : bucket.flat;
  });
  CHECK(
      shape ==
      "the communication hook 'mine' returned [3] float32 on cpu for bucket 2 of 2, which is [7] float32 on "
      "cpu; "
      "return the average in the bucket's shape and dtype, or write it into bucket.flat and return nothing");
  CHECK_THAT(
      text([](auto&, const GradientBucket& bucket) { return bucket.flat.to(torch::kHalf); }),
      ContainsSubstring("returned [12] float16 on cpu for bucket 1 of 2, which is [12] float32 on cpu"));
  CHECK_THAT(text([](auto&, const GradientBucket& bucket) { return bucket.gradients[0]; }),
             ContainsSubstring("returned [4, 3] float32 on cpu for bucket 1 of 2, which is [12] float32"));
  CHECK_THAT(text([](auto&, const GradientBucket&) { return torch::Tensor(); }),
             ContainsSubstring("returned an undefined tensor for bucket 1 of 2"));
  auto wrong = hook_of([](auto&, const GradientBucket&) { return torch::zeros({1}); });
  CHECK_THROWS_AS(buckets.reduce(wrong, shared_comm(), buckets.mine(1)), GradientError);
  // The wrong tensor comes on one rank alone: the others go on.
  auto on_one = hook_of([](auto& comm, const GradientBucket& bucket) {
    comm.all_reduce(bucket.flat).synchronize();
    return comm.rank() == 0 ? bucket.flat.narrow(0, 0, 1) : bucket.flat;
  });
  const auto thrown = thrown_by([&] { buckets.reduce(on_one, shared_comm(), buckets.mine(1)); });
  CHECK(thrown.empty() == (test_world().rank() != 0));
  shared_comm().barrier();
}

TEST_CASE("a function object with state stays stateful") {
  auto hook = hook_of(Counter());
  static_assert(StatefulHook<decltype(hook)>);
  static_assert(!StatefulHook<AllReduceHook>);
  check_average(hook, 4 * 19);
  const auto saved = hook.state();
  check_average(hook, 2 * 4 * 19);
  CHECK(hook.function().seen == 2 * 19);
  hook.rollback();
  CHECK(hook.function().seen == 19);
  auto other = hook_of(Counter());
  other.load_state(saved);
  CHECK(other.function().seen == 19);
  other.reset();
  CHECK(other.function().seen == 0);
}

TEST_CASE("a function object may count its own bytes") {
  auto hook = hook_of(Halving());
  Buckets buckets(plan);
  buckets.reduce(hook, shared_comm(), buckets.mine(1));
  CHECK(hook.wire_bytes() == 2 * 19);
}

}  // namespace function_ranks_test
