#include "lockstep/optim/averaging.hpp"

#include <torch/torch.h>

#include "optim/common.hpp"

namespace averaging_test {

using lockstep::MovingAverage;

namespace {

void shift(torch::nn::Module& model, double by) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) parameter.add_(by);
}

}  // namespace

// Against Python's AveragedModel, bit by bit: optim_parity.py.
TEST_CASE("the average follows the model, and the first update takes it as it is") {
  torch::nn::Linear model(3, 2);
  MovingAverage average(*model, {.decay = 0.75});
  shift(*model, 1);
  average.update();
  CHECK(torch::equal(average.tensors()[0], model->weight));
  const auto first = model->weight.detach().clone();
  shift(*model, 4);
  average.update();
  CHECK(torch::allclose(average.tensors()[0], first + 1));
  CHECK(average.updates() == 2);
}

TEST_CASE("buffers are copied, or averaged") {
  torch::nn::BatchNorm1d model(2);
  MovingAverage copied(*model, {.decay = 0.5});
  MovingAverage averaged(*model, {.decay = 0.5, .use_buffers = true});
  for (const double value : {2.0, 4.0}) {
    model->running_mean.fill_(value);
    model->num_batches_tracked.fill_(static_cast<std::int64_t>(value));
    copied.update();
    averaged.update();
  }
  CHECK(torch::equal(copied.tensors()[2], torch::full({2}, 4.0)));
  CHECK(torch::equal(averaged.tensors()[2], torch::full({2}, 3.0)));
  CHECK(averaged.tensors()[4].item<int>() == 3);
}

TEST_CASE("a swap lets the model hold the average, and gives back what it held") {
  torch::nn::Linear model(3, 2);
  MovingAverage average(*model, {.decay = 0.5});
  average.update();
  const auto old = model->weight.detach().clone();
  shift(*model, 2);
  average.update();
  const auto trained = model->weight.detach().clone();
  const void* memory = model->weight.data_ptr();
  {
    auto swap = average.swap_in();
    CHECK(torch::allclose(model->weight, old + 1));
    CHECK(text_of<lockstep::UsageError>([&] { average.update(); }) ==
          "MovingAverage: update while the model holds the average: end the Swap first");
    CHECK(text_of<lockstep::UsageError>([&] { (void)average.swap_in(); }) != "");
    const auto moved = std::move(swap);
    CHECK(torch::allclose(model->weight, old + 1));
  }
  CHECK(torch::equal(model->weight, trained));
  CHECK(model->weight.data_ptr() == memory);
  CHECK(torch::allclose(average.tensors()[0], old + 1));
  average.update();
}

TEST_CASE("what an average saves, another of the same model reads") {
  torch::nn::Sequential model(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  MovingAverage one(*model, {.decay = 0.5});
  one.update();
  shift(*model, 1);
  one.update();
  MovingAverage two(*model, {.decay = 0.5});
  load(two, saved(one));
  CHECK(two.updates() == 2);
  CHECK(same_bits(one.tensors(), two.tensors()));
  CHECK(saved(one) == saved(two));

  torch::nn::Sequential other(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(3));
  MovingAverage wrong(*other, {});
  CHECK(text_of<lockstep::CheckpointError>([&] { load(wrong, saved(one)); }).find("'1.weight'") !=
        std::string::npos);
  CHECK(wrong.updates() == 0);
}

TEST_CASE("a decay outside 0 to 1 is refused") {
  torch::nn::Linear model(1, 1);
  CHECK(text_of<lockstep::UsageError>([&] { MovingAverage(*model, {.decay = 1.5}); }) ==
        "MovingAverage: a decay of 1.5: give one from 0 to 1");
}

}  // namespace averaging_test
