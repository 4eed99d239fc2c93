// The metrics of docs/metrics.md.
#include <cmath>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/train/evaluate.hpp"
#include "lockstep/train/metrics.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"
#include "support/written.hpp"
#include "train/nets.hpp"

namespace metrics_ranks_test {

namespace {

// The fraction of each class's samples that the model classifies correctly.
struct PerClassAccuracy {
  std::int64_t classes;

  // [2, classes]: the correctly classified samples of each class, and all of them.
  template <class Batch>
  lockstep::Sums operator()(const torch::Tensor& output, const Batch& batch) const {
    const torch::Tensor correct = batch.target.masked_select(output.argmax(-1).eq(batch.target));
    return {torch::stack({correct.bincount({}, classes), batch.target.bincount({}, classes)})};
  }

  // NaN for a class without samples.
  [[nodiscard]] torch::Tensor compute(const torch::Tensor& sums) const { return sums[0] / sums[1]; }
};

void says(const std::string& text, const std::string& words) {
  CHECK_THAT(text, ContainsSubstring(words));
}

// A trained model whose accuracy differs between the classes.
auto trained() {
  auto trainer = std::make_unique<lockstep::Trainer<TinyNet>>(
      test_world(), lockstep::TrainerOptions{.epochs = 2, .batch_size = 4, .lr = 0.2, .progress = false});
  trainer->fit(three_classes(48), cross_entropy_of);
  return trainer;
}

}  // namespace

TEST_CASE("the accuracy of each class is that of one process over all samples") {
  auto owner = trained();
  auto& trainer = *owner;
  const lockstep::TensorDataset test = three_classes(37, 5);

  const auto [loss, accuracy, per_class] =
      trainer.evaluate(test, lockstep::CrossEntropy{}, lockstep::Accuracy{}, PerClassAccuracy{.classes = 4});

  const lockstep::EvaluationMode mode(*trainer.model());
  const torch::Tensor output = trainer.model()(test.data()), target = test.target();
  const torch::Tensor correct = output.argmax(1).eq(target);
  CHECK(loss == Approx(torch::cross_entropy_loss(output, target).item<double>()));
  CHECK(accuracy == correct.sum().item<double>() / 37);
  REQUIRE(per_class.sizes() == torch::IntArrayRef{4});
  bool differ = false;
  for (int c = 0; c < 3; ++c) {
    const auto of_class = target.eq(c);
    const double expected =
        correct.logical_and(of_class).sum().item<double>() / of_class.sum().item<double>();
    CHECK(per_class[c].item<double>() == expected);
    differ |= expected != accuracy;
  }
  CHECK(differ);
  CHECK(std::isnan(per_class[3].item<double>()));

  // One metric has its result alone.
  const torch::Tensor alone = trainer.evaluate(test, PerClassAccuracy{.classes = 3});
  CHECK(torch::equal(alone, per_class.slice(0, 0, 3)));
}

TEST_CASE("a rank without a batch adds nothing to sums, of any shape") {
  auto trainer = trained();
  const auto numbers = [](const torch::Tensor& shape) {
    struct Metric {
      torch::Tensor shape;
      lockstep::Sums operator()(const torch::Tensor& output, const lockstep::Example&) const {
        return {shape.expand(shape.sizes()) * output.size(0)};
      }
      [[nodiscard]] torch::Tensor compute(const torch::Tensor& total) const { return total; }
    };
    return Metric{shape};
  };
  // One sample, which only one rank has.
  const auto one = three_classes(1);
  CHECK(torch::equal(trainer->evaluate(one, numbers(torch::tensor(3))), torch::tensor(3.0, torch::kDouble)));
  const auto matrix = torch::arange(6).reshape({3, 2}).t();  // not contiguous
  CHECK(torch::equal(trainer->evaluate(one, numbers(matrix)), matrix.to(torch::kDouble)));
  CHECK(torch::equal(trainer->evaluate(three_classes(40), numbers(matrix)), matrix.to(torch::kDouble) * 40));
  // A tensor that the metric keeps is not changed.
  const auto kept = torch::ones({2}, torch::kDouble);
  struct Keeps {
    torch::Tensor kept;
    lockstep::Sums operator()(const torch::Tensor&, const lockstep::Example&) const { return {kept}; }
    double compute(const torch::Tensor& total) const { return total.sum().item<double>(); }
  };
  CHECK(trainer->evaluate(three_classes(test_world().size() * 6), Keeps{kept}) == 4 * test_world().size());
  CHECK(torch::equal(kept, torch::ones({2}, torch::kDouble)));
}

TEST_CASE("sums of unequal shapes, and sums of nothing, are an error on every rank") {
  const auto& world = test_world();
  auto trainer = trained();
  struct Ragged {
    std::int64_t length;
    lockstep::Sums operator()(const torch::Tensor&, const lockstep::Example&) {
      return {torch::ones({length++})};
    }
    double compute(const torch::Tensor&) const { return 0; }
  };
  const auto shared = [&](const std::string& text, const std::string& words) {
    says(text, words);
    for (const auto& other : trainer->comm().all_gather_bytes(text)) CHECK(other == text);
  };
  shared(text_of<lockstep::DataError>([&] { trainer->evaluate(three_classes(world.size() * 6), Ragged{2}); }),
         "return a tensor of the same shape for every batch");
  if (world.size() > 1)
    shared(text_of<lockstep::MismatchError>([&] {
             trainer->evaluate(three_classes(world.size()), Ragged{world.rank() == world.size() - 1 ? 5 : 4});
           }),
           fmt::format("on rank {}", world.size() - 1));
  const lockstep::TensorDataset empty{torch::zeros({0, 6}), torch::zeros({0}, torch::kLong)};
  shared(text_of<lockstep::DataError>([&] { trainer->evaluate(empty, PerClassAccuracy{3}); }),
         "the dataset has no samples");
  CHECK(std::isfinite(trainer->evaluate(three_classes(8), lockstep::Accuracy{})));
}

TEST_CASE("values of each sample arrive on every rank in the dataset's order, each once") {
  using lockstep::PerSample;
  auto trainer = trained();
  const auto number = [](const auto& tensor) { return PerSample{tensor}; };
  const auto outputs = [&](const torch::Tensor& output, const lockstep::Example&) { return number(output); };
  const auto right = [&](const torch::Tensor& output, const lockstep::Example& batch) {
    return number(output.argmax(1).eq(batch.target));
  };
  struct Rank {
    PerSample operator()(const torch::Tensor&, const lockstep::Example& batch) const {
      return {batch.target};
    }
    double compute(const torch::Tensor& all) const { return all.max().item<double>(); }
  };
  for (const std::int64_t samples : {1, 2, 13, 37}) {
    const auto test = three_classes(samples, 5);
    const auto [all, correct, most, accuracy] =
        trainer->evaluate(test, outputs, right, Rank{}, lockstep::Accuracy{});
    const lockstep::EvaluationMode mode(*trainer->model());
    CHECK(all.sizes() == at::IntArrayRef({samples, 3}));
    CHECK(torch::allclose(all, trainer->model()(test.data())));
    CHECK(correct.scalar_type() == torch::kBool);
    CHECK(correct.equal(all.argmax(1).eq(test.target())));
    CHECK(most == test.target().max().item<double>());
    CHECK(accuracy == correct.sum().item<double>() / static_cast<double>(samples));
  }
  const auto complex = [&](const torch::Tensor& output, const lockstep::Example&) {
    return number(output.to(torch::kComplexDouble));
  };
  CHECK(trainer->evaluate(three_classes(5), complex).is_complex());
  const auto no_width = [&](const torch::Tensor& output, const lockstep::Example&) {
    return number(output.slice(1, 0, 0));
  };
  CHECK(trainer->evaluate(three_classes(5), no_width).sizes() == at::IntArrayRef({5, 0}));
  const auto a_mean = [&](const torch::Tensor& output, const lockstep::Example&) {
    return number(output.mean());
  };
  CHECK_THROWS_AS(trainer->evaluate(three_classes(40), a_mean), lockstep::DataError);
}

TEST_CASE("what cannot be restored at the end of an evaluation is warned of") {
  struct Stubborn : torch::nn::Module {
    void train(bool on) override {
      if (on) throw std::runtime_error("no more training");
      Module::train(on);
    }
  } stubborn;
  says(written(2, [&] { const lockstep::EvaluationMode mode(stubborn); }),
       "a module's training mode could not be restored");
  torch::nn::BatchNorm1d norm(2);
  says(written(2,
               [&] {
                 const lockstep::BufferSnapshot kept(*norm);
                 norm->running_mean.resize_({3});
               }),
       "a buffer of the module could not be restored");
}

}  // namespace metrics_ranks_test
