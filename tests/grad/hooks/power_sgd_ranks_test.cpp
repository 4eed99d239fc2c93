// What PowerSGD promises beyond Python's bits, which hooks_parity.py compares.

#include "grad/hooks/buckets.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"

namespace power_sgd_ranks_test {

using namespace lockstep;

namespace {

PowerSgdOptions at_once(std::int64_t rank = 1) {
  return {.matrix_approximation_rank = rank, .start_iteration = 0};
}

const Plan plan{{{40, 30}, {7}}, {{20, 5, 6}, {4}}};

/// The norm of what a matrix of rank `rank` must miss of it, over its own.
double best_error(const torch::Tensor& matrix, std::int64_t rank) {
  const auto values = torch::linalg_svdvals(matrix.to(torch::kDouble));
  return (values.slice(0, rank).norm() / values.norm()).item<double>();
}

}  // namespace

TEST_CASE("power_sgd is exact where the gradients have its rank") {
  const int ranks = test_world().size();
  PowerSgdHook hook(at_once(3));
  Buckets buckets(Plan{{{50, 40}}});
  torch::manual_seed(3);
  const auto left = torch::randn({50, 3});
  torch::Tensor mine, sum = torch::zeros({50, 40});
  for (int rank = 0; rank < ranks; ++rank) {
    const auto matrix = left.mm(torch::randn({3, 40}));
    if (rank == test_world().rank()) mine = matrix;
    sum += matrix;
  }
  const auto average = buckets.reduce(hook, shared_comm(), {mine.view({-1})})[0];
  CHECK(relative_error(average.view({50, 40}), sum / ranks) < 1e-5);
  CHECK(hook.wire_bytes() == on_the_wire(4 * 3 * (50 + 40)));
}

TEST_CASE("a warm start nears the best matrix of its rank") {
  PowerSgdOptions options = at_once(2);
  options.use_error_feedback = false;
  PowerSgdHook hook(options);
  Buckets buckets(Plan{{{30, 20}}});
  const auto exact = buckets.average(1)[0].view({30, 20});
  const auto error = [&] {
    return relative_error(buckets.reduce(hook, shared_comm(), buckets.mine(1))[0].view({30, 20}), exact);
  };
  const double first = error();
  double last = first;
  for (int step = 0; step < 60; ++step) last = error();
  CAPTURE(first, last, best_error(exact, 2));
  CHECK(last < first);
  CHECK(last < 1.02 * best_error(exact, 2));
  CHECK(last > 0.9999 * best_error(exact, 2));
}

TEST_CASE("error feedback sends in the long run all there is") {
  const auto mean_error = [](bool feedback, int steps) {
    PowerSgdOptions options = at_once(2);
    options.use_error_feedback = feedback;
    PowerSgdHook hook(options);
    Buckets buckets(Plan{{{30, 20}}});
    torch::Tensor sum = torch::zeros({600}, torch::kDouble);
    for (int step = 0; step < steps; ++step) sum += buckets.reduce(hook, shared_comm(), buckets.mine(1))[0];
    return relative_error(sum / steps, buckets.average(1)[0]);
  };
  const double one = mean_error(true, 1), ten = mean_error(true, 10), hundred = mean_error(true, 100);
  CAPTURE(one, ten, hundred);
  CHECK(ten < one);
  CHECK(hundred < 0.3 * ten);
  CHECK(hundred < 0.1);
  CHECK(mean_error(false, 100) > 0.5);
}

TEST_CASE("what is not worth compressing is summed exactly, and has no error memory") {
  // 8 x 8 at rank 4: (8 + 8) * 4 is not below 64. A vector, a scalar and an empty tensor never are.
  PowerSgdHook hook(at_once(4));
  Buckets buckets(Plan{{{8, 8}, {100, 90}, {5}, {}, {0, 3}}, {{9}}});
  std::vector<torch::Tensor> first;
  for (int step = 0; step < 4; ++step) {
    const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(1));
    const auto exact = buckets.average(1);
    const auto whole = [](const torch::Tensor& flat) {
      return torch::cat({flat.slice(0, 0, 64), flat.slice(0, 9064)});
    };
    CHECK(torch::allclose(whole(averages[0]).to(torch::kDouble), whole(exact[0]), 1e-5, 1e-6));
    CHECK(torch::allclose(averages[1].to(torch::kDouble), exact[1], 1e-5, 1e-6));
    if (step == 0) first = {whole(averages[0]), averages[1]};
    CHECK(same_bits({whole(averages[0]), averages[1]}, first));
  }
  std::vector<std::string> names;
  for (const auto& [name, tensor] : hook.state()) names.push_back(name);
  CHECK(names == std::vector<std::string>{"counters", "error.1", "q.1"});
  CHECK(hook.wire_bytes() == on_the_wire(4 * 4 * (64 + 5 + 1 + 4 * (100 + 90) + 9)));
}

TEST_CASE("the reductions before start_iteration are plain") {
  const int ranks = test_world().size();
  PowerSgdHook hook({.start_iteration = 2});
  AllReduceHook plain;
  Buckets buckets(plan), others(plan);
  for (int step = 0; step < 3; ++step) {
    auto divided = buckets.mine(step);
    for (auto& gradient : divided) gradient.div_(ranks);
    const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(step));
    CHECK(same_bits(averages, others.reduce(plain, shared_comm(), divided)) == (step < 2));
  }
  const std::uint64_t elements = 1200 + 7 + 600 + 4;
  CHECK(hook.wire_bytes() == on_the_wire(4 * (2 * elements + 40 + 30 + 7 + 20 + 30 + 4)));
}

TEST_CASE("a gradient of zeros stays zero, and the next one is there again") {
  const std::int64_t rank = GENERATE(1, 2, 4);
  CAPTURE(rank);
  PowerSgdOptions options = at_once(rank);
  options.use_error_feedback = GENERATE(true, false);
  PowerSgdHook hook(options);
  Buckets buckets(Plan{{{40, 30}}});
  const auto zeros = torch::zeros({1200});
  CHECK(same_bits(buckets.reduce(hook, shared_comm(), {zeros})[0].abs(), zeros));
  torch::manual_seed(2);
  const auto exact = torch::randn({40, 1}).mm(torch::randn({1, 30})).view({-1});
  // Of rank 1: found at once by any right factor.
  CHECK(relative_error(buckets.reduce(hook, shared_comm(), {exact})[0], exact) < 1e-4);
  CHECK(buckets.reduce(hook, shared_comm(), {zeros})[0].abs().max().item<float>() < 1e-4);
  CHECK(relative_error(buckets.reduce(hook, shared_comm(), {exact})[0], exact) < 1e-4);
}

TEST_CASE("a rank above that of the gradient does no harm") {
  const std::int64_t rank = GENERATE(2, 3, 6);
  CAPTURE(rank);
  PowerSgdHook hook(at_once(rank));
  Buckets buckets(Plan{{{80, 60}}});
  for (int step = 0; step < 6; ++step) {
    torch::manual_seed(step);
    const auto exact = torch::randn({80, 1}).mm(torch::randn({1, 60})).view({-1});
    CAPTURE(step);
    // The columns beyond the gradient's rank are rounding errors, orthogonal as far as the processor's are small.
    CHECK(relative_error(buckets.reduce(hook, shared_comm(), {exact})[0], exact) < 1e-2);
  }
}

TEST_CASE("an epsilon and float64 change little") {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    PowerSgdOptions options = at_once(2);
    Buckets buckets(Plan{{{40, 30}}}, type);
    PowerSgdHook without(options);
    options.orthogonalization_epsilon = 1e-8;
    PowerSgdHook with(options);
    const auto one = buckets.reduce(without, shared_comm(), buckets.mine(1))[0];
    const auto other = buckets.reduce(with, shared_comm(), buckets.mine(1))[0];
    CHECK(one.dtype() == type);
    CHECK(relative_error(other, one) < 1e-5);
  }
}

TEST_CASE("power_sgd averages complex gradients as the real ones that they are made of") {
  const auto& world = test_world();
  std::vector<at::Tensor> list;
  for (int i = 0; i < 2; ++i)
    list.push_back(torch::zeros({24, 16}, torch::kComplexFloat).requires_grad_(true));
  lockstep::DistributedDataParallel ddp{list, shared_comm(), {}, PowerSgdHook(at_once(1))};
  // Of rank 1, so that nothing is lost.
  const auto weights = [&](int which, int rank) {
    torch::manual_seed(10 * which + 1);
    const auto columns = torch::randn({1, 32});
    return torch::view_as_complex(
        (torch::randn({24, 1}).mm(columns) * (rank + 1.0)).view({24, 16, 2}).contiguous());
  };
  for (int step = 0; step < 3; ++step) {
    for (auto& parameter : list) parameter.mutable_grad().reset();
    at::Tensor loss = torch::zeros({});
    for (int i = 0; i < 2; ++i)
      loss = loss + (torch::view_as_real(list[static_cast<std::size_t>(i)]) *
                     torch::view_as_real(weights(i, world.rank())))
                        .sum();
    ddp.backward(loss);
    for (int i = 0; i < 2; ++i)
      CHECK(relative_error(torch::view_as_real(list[static_cast<std::size_t>(i)].grad()),
                           torch::view_as_real(weights(i, 0)) * ((world.size() + 1) / 2.0)) < 1e-4);
  }
}

}  // namespace power_sgd_ranks_test
