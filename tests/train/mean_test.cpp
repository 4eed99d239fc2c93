#include "lockstep/train/metrics.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/text_of.hpp"
#include "train/nets.hpp"

namespace mean_test {

TEST_CASE("a batch is counted by its data, itself or its size") {
  CHECK(lockstep::samples_in(lockstep::Example{torch::zeros({5, 2}), torch::zeros({5})}) == 5);
  CHECK(lockstep::samples_in(torch::zeros({3, 7})) == 3);
  CHECK(lockstep::samples_in(std::vector<int>(4)) == 4);
  CHECK(!lockstep::Countable<int>);
}

TEST_CASE("a meter adds sums and counts of batches of unequal size") {
  lockstep::MeanMeter meter(2);  // reads what is pending each two batches
  meter.add(lockstep::Mean{torch::tensor(6.0F), 3});
  meter.add(torch::tensor(5.0), 2, 2);
  meter.add(lockstep::Mean{torch::tensor(std::int64_t{4}), 5});
  meter.add(lockstep::Mean{torch::tensor(std::nan("")), 0});  // nothing was counted: nothing is added
  CHECK(meter.total().count == 10);
  CHECK(meter.total().sum == 20);
  CHECK(meter.total().mean() == 2);
  CHECK(std::isnan(lockstep::MeanMeter().total().mean()));
}

TEST_CASE("a meter holds no graph") {
  float memory = 2;
  bool freed = false;
  lockstep::MeanMeter meter;
  {
    auto activation = torch::from_blob(&memory, {1}, [&](void*) { freed = true; }).requires_grad_();
    meter.add((activation * activation).sum(), 1, 1);  // the product keeps the activation for backward
    CHECK(!freed);
  }
  CHECK(freed);
  CHECK(meter.total().sum == 4);
}

TEST_CASE("accuracy and loss of a batch") {
  const lockstep::Example batch{torch::zeros({3, 1}), torch::tensor({0, 1, 1}, torch::kLong)};
  const auto output = torch::tensor({{2.0F, 1.0F}, {0.0F, 1.0F}, {3.0F, 0.0F}});
  const auto right = lockstep::Accuracy{}(output, batch);
  CHECK(right.sum.item<int>() == 2);
  CHECK(right.count == 3);
  const auto loss = lockstep::CrossEntropy{}(output, batch);
  CHECK(loss.sum.item<float>() / loss.count ==
        Approx(torch::cross_entropy_loss(output, batch.target).item<float>()));
  CHECK(lockstep::MeanLoss{[](const auto& out, const auto& target) {
          return torch::mse_loss(out.argmax(1).to(torch::kFloat), target.to(torch::kFloat));
        }}(output, batch)
            .item<float>() == Approx(1.0F / 3));
}

TEST_CASE("accuracy refuses targets of another shape, and names it") {
  const auto output = torch::randn({8, 10});
  const auto of = [&](const torch::Tensor& target) {
    return text_of<lockstep::DataError>([&] {
      lockstep::Accuracy{}(output, lockstep::Example{output, target});
    });
  };
  CHECK(of(torch::zeros({8}, torch::kLong)).empty());
  CHECK_THAT(of(torch::zeros({8, 1}, torch::kLong)),
             ContainsSubstring("the output is [8, 10] float32 and the target [8, 1] int64"));
  CHECK(!of(torch::zeros({8, 10}, torch::kLong)).empty());
  CHECK(!of(torch::zeros({1}, torch::kLong)).empty());
  CHECK(!of(torch::zeros({}, torch::kLong)).empty());
  // Of each token of a sequence.
  const auto tokens = torch::zeros({2, 5, 3});
  CHECK(lockstep::Accuracy{}(tokens, lockstep::Example{tokens, torch::zeros({2, 5}, torch::kLong)}).count ==
        10);
}

TEST_CASE("a mean loss is over the targets that are not ignored") {
  const auto output = torch::randn({6, 4});
  const auto target = torch::tensor({1, -100, 3, -100, -100, 0}, torch::kLong);
  lockstep::MeanMeter meter;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    const lockstep::Example batch{output.slice(0, begin, end), target.slice(0, begin, end)};
    meter.add(lockstep::CrossEntropy{}(output.slice(0, begin, end), batch));
  };
  add(0, 2);
  add(2, 5);
  add(3, 5);  // nothing but ignored ones: no not-a-number
  add(5, 6);
  CHECK(meter.total().count == 3);
  CHECK(meter.total().mean() == Approx(torch::cross_entropy_loss(output, target).item<float>()));

  const auto probabilities = torch::softmax(torch::randn({6, 4}), 1);
  const auto mean = lockstep::counted_cross_entropy(output, probabilities);
  CHECK(mean.count == 6);
  CHECK(mean.sum.item<float>() / 6 == Approx(torch::cross_entropy_loss(output, probabilities).item<float>()));

  // A loss of the user's own with a count.
  lockstep::MeanLoss counted{[](const torch::Tensor&, const torch::Tensor& targets) {
    return lockstep::Mean{torch::tensor(6.0), targets.ge(0).sum().item<std::int64_t>()};
  }};
  CHECK(counted(output, lockstep::Example{output, target}).count == 3);
}

TEST_CASE("a meter knows the step of its first value that is not finite") {
  lockstep::MeanMeter meter(2);
  meter.add(torch::tensor(1.0), 1, 1, 4);
  CHECK(!meter.first_not_finite());
  meter.add(torch::tensor(std::nan("")), 1, 0, 5);  // nothing was counted
  meter.add(torch::tensor(-std::numeric_limits<double>::infinity()), 1, 1, 6);
  meter.add(torch::tensor(std::nan("")), 1, 1, 7);
  CHECK(meter.first_not_finite() == 6);
}

TEST_CASE("a loss is a mean over samples, or a sum and a count") {
  const lockstep::Example batch{torch::zeros({4, 1}), torch::zeros({4})};
  const auto mean = torch::tensor(3.0F);
  const auto plain = lockstep::weigh(mean, batch, 4, 1.0);
  CHECK(plain.value.is_same(mean));  // where there is nothing to weigh there is no operator
  CHECK(plain.total().mean() == 3);
  CHECK(plain.count == 4);

  const auto light = lockstep::weigh(mean, batch, 4, 6.0);
  CHECK(light.value.item<float>() == 0.5F);
  CHECK(light.total().sum == 12);

  CHECK_THROWS_AS(lockstep::weigh(mean, batch, 5, 1.0), lockstep::DataError);

  const auto counted = lockstep::weigh(lockstep::Mean{torch::tensor(7.0F), 2});
  CHECK(counted.value.item<float>() == 7);
  CHECK(counted.total().mean() == 3.5);

  const auto summed = lockstep::weigh(mean, batch);
  CHECK(summed.value.item<float>() == 12);
  CHECK(summed.total().mean() == 3);
  CHECK(summed.count == 4);
}

}  // namespace mean_test
