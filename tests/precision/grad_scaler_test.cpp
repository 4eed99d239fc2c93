#include "lockstep/precision/grad_scaler.hpp"

#include <torch/torch.h>

#include <limits>
#include <sstream>

#include "lockstep/precision/fp16.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

using lockstep::GradScaler;

namespace {

struct Problem {
  at::Tensor parameter = torch::full({2}, 3.0F, torch::requires_grad());
  torch::optim::SGD optimizer{{parameter}, 0.5};

  void backward(GradScaler& scaler, double factor = 1) {
    optimizer.zero_grad();
    scaler.scale((parameter * factor).sum()).backward();
  }
};

}  // namespace

TEST_CASE("a step that is not finite is left out, counted, and halves the scale") {
  Problem problem;
  GradScaler scaler({.init_scale = 8, .growth_interval = 2});
  problem.backward(scaler, std::numeric_limits<double>::infinity());
  CHECK(!scaler.step(problem.optimizer));
  scaler.update();
  CHECK(problem.parameter[0].item<float>() == 3);
  CHECK(scaler.get_scale() == 4);
  CHECK(scaler.skipped() == 1);
  for (int i = 0; i < 2; ++i) {
    problem.backward(scaler);
    CHECK(problem.parameter.grad()[0].item<float>() == 4);
    CHECK(scaler.step(problem.optimizer));
    scaler.update();
  }
  CHECK(problem.parameter[0].item<float>() == 2);
  CHECK(scaler.get_scale() == 8);
  CHECK(scaler.growth_tracker() == 0);
}

TEST_CASE("calls in a wrong order are refused in words") {
  Problem problem;
  GradScaler scaler;
  CHECK_THAT(text_of<lockstep::UsageError>([&] { scaler.update(); }), ContainsSubstring("nothing to learn"));
  CHECK_THAT(text_of<lockstep::GradientError>([&] { scaler.step(problem.optimizer); }),
             ContainsSubstring("call backward before"));
  problem.backward(scaler);
  scaler.unscale(problem.optimizer);
  CHECK(problem.parameter.grad()[0].item<float>() == 1);
  CHECK_THAT(text_of<lockstep::UsageError>([&] { scaler.unscale(problem.optimizer); }),
             ContainsSubstring("called already"));
  CHECK(scaler.step(problem.optimizer));
  CHECK_THAT(text_of<lockstep::UsageError>([&] { scaler.step(problem.optimizer); }),
             ContainsSubstring("called already"));
  CHECK_THAT(text_of<lockstep::UsageError>([&] { scaler.unscale(problem.optimizer); }),
             ContainsSubstring("unscale after step"));
  scaler.update();
  problem.backward(scaler);
  CHECK(scaler.step(problem.optimizer));
}

TEST_CASE("gradients in float16 and options without a meaning are refused") {
  auto half = torch::full({2}, 3.0F, torch::kHalf).requires_grad_();
  torch::optim::SGD optimizer({half}, 0.5);
  GradScaler scaler;
  scaler.scale(half.sum().to(torch::kFloat)).backward();
  CHECK_THAT(text_of<lockstep::GradientError>([&] { scaler.unscale(optimizer); }),
             ContainsSubstring("float16"));

  const auto refused = [](const lockstep::GradScalerOptions& options) {
    return text_of<lockstep::UsageError>([&] { GradScaler{options}; });
  };
  CHECK_THAT(refused({.init_scale = 0}), ContainsSubstring("init_scale is 0"));
  CHECK_THAT(refused({.growth_factor = 1}), ContainsSubstring("growth_factor is 1"));
  CHECK_THAT(refused({.backoff_factor = 1}), ContainsSubstring("backoff_factor is 1"));
  CHECK_THAT(refused({.growth_interval = 0}), ContainsSubstring("growth_interval is 0"));
}

TEST_CASE("a scaler that is off passes everything through") {
  Problem problem;
  GradScaler scaler({.enabled = false});
  problem.backward(scaler, std::numeric_limits<double>::infinity());
  scaler.unscale(problem.optimizer);
  CHECK(scaler.step(problem.optimizer));
  scaler.update();
  CHECK(scaler.get_scale() == 1);
  CHECK(!std::isfinite(problem.parameter[0].item<float>()));
}

TEST_CASE("a scaler that was saved goes on, in a scaler that was used and in a new one") {
  Problem problem;
  GradScaler scaler({.init_scale = 64, .growth_interval = 3});
  problem.backward(scaler);
  scaler.step(problem.optimizer);
  scaler.update();
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  scaler.save(out);
  out.save_to(stream);
  GradScaler fresh, used;
  problem.backward(used);
  for (GradScaler* other : {&fresh, &used}) {
    torch::serialize::InputArchive in;
    stream.seekg(0);
    in.load_from(stream);
    other->load(in);
    CHECK(other->growth_tracker() == 1);
    for (int i = 0; i < 2; ++i) {
      CHECK(other->get_scale() == 64);
      problem.backward(*other);
      other->step(problem.optimizer);
      other->update();
    }
    CHECK(other->get_scale() == 128);
  }
  torch::serialize::OutputArchive nothing;
  std::stringstream empty;
  nothing.save_to(empty);
  torch::serialize::InputArchive in;
  in.load_from(empty);
  CHECK_THROWS_AS(fresh.load(in), lockstep::CheckpointError);
}
