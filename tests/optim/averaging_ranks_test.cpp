#include "lockstep/optim/averaging.hpp"

#include <torch/torch.h>

#include <vector>

#include "grad/models.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "optim/common.hpp"

namespace averaging_ranks_test {

using lockstep::PeriodicModelAverager;

TEST_CASE("parameters become their average over the ranks, whatever their dtypes and layouts") {
  const auto& world = test_world();
  std::vector<torch::Tensor> parameters{
      torch::full({2, 3, 4, 4}, world.rank() + 1.0).contiguous(at::MemoryFormat::ChannelsLast),
      torch::full({5}, world.rank() + 1.0, torch::kDouble), torch::arange(6.0) * (world.rank() + 1),
      torch::empty({0}), torch::full({3}, c10::complex<double>(world.rank() + 1, 2), torch::kComplexFloat)};
  for (auto& parameter : parameters) parameter.requires_grad_(true);
  const auto* place = parameters[2].data_ptr();
  lockstep::average_parameters(parameters, shared_comm());
  const double mean = (world.size() + 1) / 2.0;
  CHECK(torch::allclose(parameters[0], torch::full({2, 3, 4, 4}, mean)));
  CHECK(torch::allclose(parameters[1], torch::full({5}, mean, torch::kDouble)));
  CHECK(torch::allclose(parameters[2], torch::arange(6.0) * mean));
  CHECK(torch::equal(parameters[4], torch::full({3}, c10::complex<double>(mean, 2), torch::kComplexFloat)));
  CHECK(parameters[2].data_ptr() == place);
  CHECK(parameters[0].is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST_CASE("averages are taken in the steps of Python's averager") {
  const auto& world = test_world();
  PeriodicModelAverager averager({.period = 3, .warmup_steps = 2});
  std::vector<int> averaged;
  for (int step = 0; step < 10; ++step) {
    std::vector<torch::Tensor> parameters{torch::full({2}, static_cast<float>(world.rank()))};
    const bool here = averager.step(parameters, shared_comm());
    if (here) averaged.push_back(step);
    const float expected = here ? static_cast<float>(world.size() - 1) / 2 : static_cast<float>(world.rank());
    CHECK(parameters[0][0].item<float>() == Approx(expected));
  }
  CHECK(averaged == std::vector<int>{2, 5, 8});
  CHECK(averager.steps() == 10);
  PeriodicModelAverager going_on({.period = 3, .warmup_steps = 2});
  going_on.set_steps(8);
  std::vector<torch::Tensor> parameters{torch::ones({1})};
  CHECK(going_on.step(parameters, shared_comm()));
  CHECK_THROWS_AS(PeriodicModelAverager({.period = 0}), lockstep::UsageError);
  CHECK_THROWS_AS(PeriodicModelAverager({.warmup_steps = -1}), lockstep::UsageError);
}

}  // namespace averaging_ranks_test
