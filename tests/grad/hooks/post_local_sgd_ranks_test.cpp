// Averages over all ranks at first, over a sub-group later.
#include "lockstep/grad/hooks/post_local_sgd_hook.hpp"

#include <optional>

#include "grad/hooks/buckets.hpp"

namespace post_local_sgd_ranks_test {

using namespace lockstep;

namespace {

const Plan plan{{{4, 3}, {7}}, {{5}}};

/// Rank 0 alone, and the others together; LocalComm's kind where this rank is in neither.
CpuComm own_group() {
  const int size = shared_comm().size();
  std::optional<CpuComm> mine = shared_comm().new_group({0});
  if (size > 1) {
    std::vector<int> others;
    for (int rank = 1; rank < size; ++rank) others.push_back(rank);
    auto rest = shared_comm().new_group(others);
    if (rest) mine = std::move(rest);
  }
  return std::move(*mine);
}

torch::Tensor mean_of(const std::vector<std::vector<torch::Tensor>>& of_ranks, std::size_t bucket, int from,
                      int to) {
  torch::Tensor sum = torch::zeros_like(of_ranks[0][bucket]);
  for (int rank = from; rank < to; ++rank) sum += of_ranks[static_cast<std::size_t>(rank)][bucket];
  return sum / (to - from);
}

}  // namespace

static_assert(StatefulHook<PostLocalSgdHook<CpuComm>>);
static_assert(CommunicationHook<PostLocalSgdHook<CpuComm>, CpuComm>);

TEST_CASE("gradients are averaged over all ranks, then over the sub-group or not at all") {
  const int size = shared_comm().size(), rank = shared_comm().rank();
  const bool within = GENERATE(true, false);
  CAPTURE(within);
  CpuComm group = own_group();
  PostLocalSgdHook hook(group, {.start_iteration = 2, .reduce_in_subgroup = within});
  Buckets buckets(plan);
  const auto gradients = [](int of, int step) {
    torch::manual_seed(100 * step + of);
    return std::vector<torch::Tensor>{torch::randn({19}), torch::randn({5})};
  };
  HookState saved;
  std::uint64_t bytes = 0;
  for (int step = 0; step < 5; ++step) {
    CAPTURE(step);
    std::vector<std::vector<torch::Tensor>> of_ranks;
    for (int of = 0; of < size; ++of) of_ranks.push_back(gradients(of, step));
    if (step == 1) {  // a step that is given up does not count
      buckets.reduce(hook, shared_comm(), gradients(rank, step));
      hook.rollback();
      hook.rollback();
    }
    bytes = hook.wire_bytes();
    const auto averages = buckets.reduce(hook, shared_comm(), gradients(rank, step));
    for (std::size_t b = 0; b < 2; ++b) {
      const bool all = step < 2;
      const int from = all ? 0 : !within ? rank : rank == 0 ? 0 : 1;
      const int to = all ? size : !within || rank == 0 ? rank + 1 : size;
      CHECK(torch::allclose(averages[b], mean_of(of_ranks, b, from, to), 1e-5, 1e-6));
    }
    const bool alone = step < 2 ? size == 1 : !within || group.size() == 1;
    CHECK(hook.wire_bytes() - bytes == (alone ? 0 : 24 * sizeof(float)));
    if (step == 1) saved = hook.state();
  }
  PostLocalSgdHook loaded(group, {.start_iteration = 2, .reduce_in_subgroup = false});
  loaded.load_state(PostLocalSgdHook<CpuComm>::shared_state(saved));
  Buckets fresh(plan);
  const auto own = gradients(rank, 7);
  CHECK(torch::equal(fresh.reduce(loaded, shared_comm(), own)[0], own[0]));
  CHECK_THROWS_AS(loaded.load_state({}), CheckpointError);
  for (const at::Tensor& counters :
       {torch::tensor({-1}), torch::tensor({std::numeric_limits<std::int64_t>::max()}), torch::tensor({NAN}),
        at::Tensor()})
    CHECK_THROWS_AS(loaded.load_state({{"counters", counters}}), CheckpointError);
  CHECK_THROWS_AS(PostLocalSgdHook(group, {.start_iteration = -1}), UsageError);
}

TEST_CASE("inside DistributedDataParallel ranks part, and a missing gradient is found by all") {
  const int size = shared_comm().size(), rank = shared_comm().rank();
  CpuComm group = own_group();
  Net net;
  DistributedDataParallel ddp{net, shared_comm(), small_buckets(),
                              PostLocalSgdHook(group, {.start_iteration = 1})};
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    ddp.backward(net(batch_of(rank, step)).sum());
    const auto bits =
        shared_comm().all_gather_bytes(std::to_string(net->one->weight.grad().sum().item<double>()));
    CHECK((bits[0] == bits.back()) == (step == 0 || size == 1));
    CHECK((size < 3 || bits[1] == bits.back()));
  }
  net->zero_grad();
  net->use_two = rank != 0;
  const auto loss = net(batch_of(rank, 0)).sum();
  net->use_two = true;
  CHECK_THROWS_AS(ddp.backward(loss), lockstep::GradientError);
}

}  // namespace post_local_sgd_ranks_test
