// What PowerSGD remembers: saved, loaded, taken back.
#include <limits>

#include "grad/hooks/buckets.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "support/refuses.hpp"

namespace power_sgd_state_ranks_test {

using namespace lockstep;

namespace {

const Plan plan{{{40, 30}, {7}}, {{20, 5, 6}, {4}}};

PowerSgdOptions options_of(bool warm) {
  return {
      .matrix_approximation_rank = 2, .start_iteration = 1, .min_compression_rate = 1, .warm_start = warm};
}

std::vector<torch::Tensor> not_a_number() {
  return {torch::full({1207}, std::numeric_limits<float>::quiet_NaN()), torch::full({604}, 1.0F)};
}

}  // namespace

static_assert(StatefulHook<PowerSgdHook>);

TEST_CASE("a saved state goes on with the same bits") {
  const bool warm = GENERATE(true, false);
  const int saved_at = GENERATE(0, 1, 3);  // before the first, before compression, later
  CAPTURE(warm, saved_at);
  PowerSgdHook hook(options_of(warm));
  Buckets buckets(plan);
  for (int step = 0; step < saved_at; ++step) buckets.reduce(hook, shared_comm(), buckets.mine(step));
  const HookState state = hook.state();
  const auto go_on = [&](PowerSgdHook& going, Buckets& its) {
    std::vector<torch::Tensor> all;
    for (int step = saved_at; step < saved_at + 3; ++step)
      for (const auto& average : its.reduce(going, shared_comm(), its.mine(step))) all.push_back(average);
    return all;
  };
  const auto expected = go_on(hook, buckets);
  PowerSgdHook loaded(options_of(warm));
  loaded.load_state(state);  // into a new process: its first reduction has number 0 again
  Buckets fresh(plan);
  CHECK(same_bits(go_on(loaded, fresh), expected));
  if (saved_at == 3) {
    PowerSgdHook forgetful(options_of(warm));
    Buckets other(plan);
    other.reduce(forgetful, shared_comm(), other.mine(0));
    CHECK_FALSE(same_bits(go_on(forgetful, other), expected));
  }
}

TEST_CASE("a skipped step leaves no trace") {
  const bool warm = GENERATE(true, false);
  const int skipped_at = GENERATE(0, 1, 2, 4);
  CAPTURE(warm, skipped_at);
  PowerSgdHook hook(options_of(warm)), undisturbed(options_of(warm));
  Buckets buckets(plan), others(plan);
  for (int step = 0; step < 6; ++step) {
    if (step == skipped_at) {
      const auto averages = buckets.reduce(hook, shared_comm(), not_a_number());
      CHECK(averages[0].isnan().any().item<bool>());
      hook.rollback();
      hook.rollback();  // nothing more to take back
    }
    const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(step));
    CHECK(same_bits(averages, others.reduce(undisturbed, shared_comm(), others.mine(step))));
  }
  const auto one = hook.state(), other = undisturbed.state();
  REQUIRE(one.size() == other.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    CHECK(one[i].first == other[i].first);
    CHECK(same_bits(one[i].second, other[i].second));
  }
}

TEST_CASE("without a rollback the not-a-numbers stay") {
  PowerSgdHook hook(options_of(true));
  Buckets buckets(plan);
  buckets.reduce(hook, shared_comm(), buckets.mine(0));
  buckets.reduce(hook, shared_comm(), not_a_number());
  CHECK(buckets.reduce(hook, shared_comm(), buckets.mine(1))[0].isnan().any().item<bool>());
}

TEST_CASE("a reduction that was begun and never waited for can be taken back") {
  PowerSgdHook hook(options_of(true)), undisturbed(options_of(true));
  Buckets buckets(plan), others(plan);
  for (int step = 0; step < 3; ++step) {
    buckets.reduce(hook, shared_comm(), buckets.mine(step));
    others.reduce(undisturbed, shared_comm(), others.mine(step));
  }
  {
    GradientBucket bucket = buckets[0];
    bucket.iteration = 77;
    auto dropped = hook.start(shared_comm(), bucket);
    shared_comm().barrier();
  }
  hook.rollback();
  CHECK(same_bits(buckets.reduce(hook, shared_comm(), buckets.mine(3)),
                  others.reduce(undisturbed, shared_comm(), others.mine(3))));
}

TEST_CASE("what is remembered survives other buckets") {
  PowerSgdHook hook(options_of(true)), undisturbed(options_of(true));
  Buckets apart(plan), reference(plan), together(Plan{{{40, 30}, {7}, {20, 5, 6}, {4}}});
  for (int step = 0; step < 3; ++step) {
    apart.reduce(hook, shared_comm(), apart.mine(step));
    reference.reduce(undisturbed, shared_comm(), reference.mine(step));
  }
  hook.reset();
  const auto averages = together.reduce(hook, shared_comm(), {torch::cat(apart.mine(3))});
  const auto expected = torch::cat(reference.reduce(undisturbed, shared_comm(), reference.mine(3)));
  // At three ranks and more, Gloo adds in another order at another place in a buffer.
  CHECK(relative_error(averages[0], expected) < 1e-5);
}

TEST_CASE("wrong options and the state of another hook or model are refused") {
  CHECK_THROWS_AS(PowerSgdHook({.matrix_approximation_rank = 0}), UsageError);
  CHECK_THROWS_AS(PowerSgdHook({.start_iteration = -1}), UsageError);
  CHECK_THROWS_AS(PowerSgdHook({.min_compression_rate = 0}), UsageError);
  CHECK_THROWS_AS(PowerSgdHook({.orthogonalization_epsilon = -1}), UsageError);

  PowerSgdHook hook(options_of(true));
  Buckets buckets(plan);
  for (int step = 0; step < 2; ++step) buckets.reduce(hook, shared_comm(), buckets.mine(step));
  const HookState good = hook.state();
  HookState foreign = good;
  foreign.emplace_back("momentum.1", torch::zeros({3}));
  const auto refused = [](PowerSgdHook& hook, const HookState& state, const char* words) {
    refuses<CheckpointError>([&] { hook.load_state(state); }, words);
  };
  refused(hook, foreign, "no entry 'momentum.1'");
  refused(hook, {{"q.x", torch::zeros({3})}}, "no entry 'q.x'");
  refused(hook, {{"q.99999999999999999999", torch::zeros({3})}}, "no entry 'q.99999999999999999999'");
  refused(hook, {}, "no counters");
  for (const at::Tensor& counters :
       {torch::tensor({1, 2, -3}), torch::tensor({std::int64_t{1} << 32, std::int64_t{2}, std::int64_t{3}}),
        torch::tensor({1., std::numeric_limits<double>::quiet_NaN(), 3.}), torch::tensor({1, 2}),
        at::Tensor()})
    refused(hook, {{"counters", counters}}, "damaged");
  CHECK_THROWS_AS(hook.load_state({{"q.0", at::Tensor()}}), CheckpointError);
  // None of these has changed anything.
  for (std::size_t i = 0; i < good.size(); ++i) CHECK(same_bits(hook.state()[i].second, good[i].second));

  PowerSgdOptions wider = options_of(true);
  wider.matrix_approximation_rank = 3;
  PowerSgdHook other(wider);
  refused(other, good, "its factor for parameter 0 has 60 elements, and 90 are needed");
  CHECK(other.state().size() == 1);
  for (const auto& [name, tensor] : HookState{{"q.0", torch::zeros({40, 30, 2})},
                                              {"q.0", torch::zeros({60})},
                                              {"error.0", torch::tensor(1.)},
                                              {"q.0", torch::zeros({30, 3})},
                                              {"error.0", torch::zeros({0, 30})}}) {
    CAPTURE(name, tensor.sizes());
    HookState wrong = good;
    for (auto& [key, value] : wrong)
      if (key == name) value = tensor;
    CHECK_THROWS_AS(hook.load_state(wrong), CheckpointError);
  }
  const auto counters = [](std::int64_t reductions, std::int64_t drawn) {
    return HookState{{"counters", torch::tensor({reductions, drawn, std::int64_t{0}})}};
  };
  constexpr std::int64_t most = std::numeric_limits<std::uint32_t>::max();
  refused(other, counters(100, most), "damaged");
  HookState many = good;
  many[0].second = counters(1000, 100'000)[0].second;
  refused(hook, many, "damaged");
  other.load_state(counters(1000, 10'000));
}

}  // namespace power_sgd_state_ranks_test
