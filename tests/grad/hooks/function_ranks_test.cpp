// Hooks of one's own.
#include "grad/hooks/buckets.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace function_ranks_test {

using namespace lockstep;

namespace {

const Plan plan{{{4, 3}}, {{5}, {2}}};

template <class Hook>
void check_average(Hook& hook, std::uint64_t bytes) {
  static_assert(CommunicationHook<Hook, CpuComm> && CommunicationHook<Hook, LocalComm>);
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

}  // namespace

TEST_CASE("a function may write the average, or return a Work") {
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
  auto hook = hook_of([](CpuComm& comm, const GradientBucket& bucket) {
    comm.all_reduce(bucket.flat, ReduceOp::avg).synchronize();
  });
  Buckets buckets(plan);
  const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(1));
  CHECK(torch::allclose(averages[0].to(torch::kDouble), buckets.average(1)[0], 1e-5, 1e-6));
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

}  // namespace function_ranks_test
