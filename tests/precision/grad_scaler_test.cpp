#include "lockstep/precision/precision.hpp"

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "lockstep/optim/optimizers.hpp"
#include "support/archive.hpp"
#include "support/refuses.hpp"

namespace grad_scaler_test {

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
  refuses<lockstep::UsageError>([&] { scaler.update(); }, "nothing to learn");
  refuses<lockstep::GradientError>([&] { scaler.step(problem.optimizer); }, "call backward before");
  problem.backward(scaler);
  scaler.unscale(problem.optimizer);
  CHECK(problem.parameter.grad()[0].item<float>() == 1);
  refuses<lockstep::UsageError>([&] { scaler.unscale(problem.optimizer); }, "called already");
  CHECK(scaler.step(problem.optimizer));
  refuses<lockstep::UsageError>([&] { scaler.step(problem.optimizer); }, "called already");
  refuses<lockstep::UsageError>([&] { scaler.unscale(problem.optimizer); }, "unscale after step");
  scaler.update();
  problem.backward(scaler);
  CHECK(scaler.step(problem.optimizer));
}

TEST_CASE("gradients in float16 and options without a meaning are refused") {
  auto half = torch::full({2}, 3.0F, torch::kHalf).requires_grad_();
  torch::optim::SGD optimizer({half}, 0.5);
  GradScaler scaler;
  scaler.scale(half.sum().to(torch::kFloat)).backward();
  refuses<lockstep::GradientError>([&] { scaler.unscale(optimizer); }, "float16");

  const auto refused = [](const lockstep::GradScalerOptions& options, const char* words) {
    refuses<lockstep::UsageError>([&] { GradScaler{options}; }, words);
  };
  refused({.init_scale = 0}, "init_scale is 0");
  refused({.growth_factor = 1}, "growth_factor is 1");
  refused({.backoff_factor = 1}, "backoff_factor is 1");
  refused({.growth_interval = 0}, "growth_interval is 0");
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
  // One that is on takes up the scale that it keeps, not the 1 that it multiplies by.
  torch::serialize::OutputArchive written;
  scaler.save(written);
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  GradScaler on({.init_scale = 4});
  on.load(archive);
  CHECK(on.get_scale() == 65536);
}

TEST_CASE("a scaler that was saved goes on, in a scaler that was used and in a new one") {
  Problem problem;
  GradScaler scaler({.init_scale = 64, .growth_interval = 3});
  problem.backward(scaler);
  scaler.step(problem.optimizer);
  scaler.update();
  const std::string bytes = saved(scaler);
  GradScaler fresh, used;
  problem.backward(used);
  for (GradScaler* other : {&fresh, &used}) {
    load(*other, bytes);
    CHECK(other->growth_tracker() == 1);
    for (int i = 0; i < 2; ++i) {
      CHECK(other->get_scale() == 64);
      problem.backward(*other);
      other->step(problem.optimizer);
      other->update();
    }
    CHECK(other->get_scale() == 128);
  }
}

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Steps once with a gradient of (factor, factor); whether it was made.
template <class Optimizer>
bool step_once(GradScaler& scaler, Optimizer& optimizer, const at::Tensor& parameter, double factor) {
  optimizer.zero_grad();
  scaler.scale((parameter * factor).sum()).backward();
  const auto stepped = scaler.step(optimizer);
  scaler.update();
  return stepped;
}

}  // namespace

TEST_CASE("a fused step divides and skips by itself, and counts when it is asked") {
  auto parameter = torch::full({2}, 3.0F, torch::requires_grad());
  lockstep::AdamW optimizer({parameter}, {.lr = 0.5, .implementation = lockstep::Implementation::fused});
  const auto step_of = [&] {
    return static_cast<lockstep::AdamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()))
        .step.item<float>();
  };
  GradScaler scaler({.init_scale = 8, .growth_interval = 100});
  CHECK(optimizer.takes_scale());
  scaler.scale((parameter * infinity).sum()).backward();
  const auto skipped = scaler.step(optimizer);
  CHECK(!skipped.known());
  CHECK(skipped.found_inf().item<float>() == 1);
  scaler.update();
  CHECK(!skipped);
  CHECK(parameter[0].item<float>() == 3);
  CHECK(step_of() == 0);
  CHECK(scaler.get_scale() == 4);
  CHECK(step_once(scaler, optimizer, parameter, 1));
  CHECK(step_of() == 1);
  CHECK(parameter[0].item<float>() < 3);
  CHECK(!step_once(scaler, optimizer, parameter, infinity));
  CHECK(step_of() == 1);
  CHECK(scaler.skipped() == 2);
}

TEST_CASE("a fused step after unscale does not divide twice, and one option turns it off") {
  auto parameter = torch::full({2}, 3.0F, torch::requires_grad());
  lockstep::SGD optimizer({parameter}, {.lr = 0.5, .implementation = lockstep::Implementation::fused});
  GradScaler scaler({.init_scale = 8});
  scaler.scale(parameter.sum()).backward();
  scaler.unscale(optimizer);
  CHECK(parameter.grad()[0].item<float>() == 1);
  parameter.mutable_grad().mul_(0.5);
  CHECK(scaler.step(optimizer));
  scaler.update();
  CHECK(parameter[0].item<float>() == 2.75F);

  optimizer.options().implementation = lockstep::Implementation::automatic;
  CHECK(!optimizer.takes_scale());
  optimizer.zero_grad();
  scaler.scale(parameter.sum()).backward();
  const auto stepped = scaler.step(optimizer);
  CHECK(stepped.known());
  CHECK(stepped);
  CHECK(parameter[0].item<float>() == 2.25F);
}

TEST_CASE("a first step that is skipped leaves momentum to begin with the next") {
  for (const double dampening : {0.0, 0.5}) {
    at::Tensor ends[2];
    for (const bool fused : {false, true}) {
      auto parameter = torch::full({16}, 3.0F, torch::requires_grad());
      lockstep::SGD optimizer({parameter}, {.lr = 0.5,
                                            .momentum = 0.9,
                                            .dampening = dampening,
                                            .implementation = fused ? lockstep::Implementation::fused
                                                                    : lockstep::Implementation::automatic});
      GradScaler scaler({.init_scale = 8});
      CHECK(!step_once(scaler, optimizer, parameter, infinity));
      CHECK(step_once(scaler, optimizer, parameter, 1));
      CHECK(step_once(scaler, optimizer, parameter, 2));
      ends[fused] = parameter.detach();
    }
    CHECK(at::equal(ends[0], ends[1]));
  }
}

TEST_CASE("a saved scaler is checked as a new one is, and a bad one changes nothing") {
  const auto refused = [](const char* key, const c10::IValue& value) {
    torch::serialize::OutputArchive archive;
    for (const auto& [name, good] : std::vector<std::pair<const char*, c10::IValue>>{{"scale", 8.0},
                                                                                     {"growth_factor", 2.0},
                                                                                     {"backoff_factor", 0.5},
                                                                                     {"growth_interval", 7},
                                                                                     {"growth_tracker", 3},
                                                                                     {"skipped", 1}})
      if (!(std::string_view(name) == key && value.isNone()))
        archive.write(name, std::string_view(name) == key ? value : good);
    std::stringstream stream;
    archive.save_to(stream);
    GradScaler scaler({.init_scale = 4});
    std::string text = text_of<lockstep::CheckpointError>([&] { load(scaler, stream.str()); });
    CHECK(scaler.get_scale() == (text.empty() ? 8 : 4));
    return text;
  };
  for (const double scale : {0.0, -1.0, 1e300, std::nan(""), std::numeric_limits<double>::infinity()})
    CHECK(refused("scale", scale).find("init_scale") != std::string::npos);
  CHECK(refused("scale", 8).find("'scale'") != std::string::npos);  // no float
  CHECK(refused("growth_interval", 0).find("growth_interval is 0") != std::string::npos);
  CHECK(refused("growth_factor", 1.0).find("growth_factor is 1") != std::string::npos);
  CHECK(refused("backoff_factor", 1.0).find("backoff_factor is 1") != std::string::npos);
  for (const std::int64_t tracker : {std::int64_t{-1}, std::int64_t{1} << 40})
    CHECK(!refused("growth_tracker", tracker).empty());
  CHECK(!refused("skipped", -1).empty());
  CHECK(!refused("scale", {}).empty());
  CHECK(refused("none", 0).empty());
}

TEST_CASE("what fused steps have skipped is saved, and a load takes its place") {
  auto parameter = torch::full({2}, 3.0F, torch::requires_grad());
  lockstep::SGD optimizer({parameter}, {.lr = 0.5, .implementation = lockstep::Implementation::fused});
  GradScaler scaler({.init_scale = 8}), other;
  for (int i = 0; i < 3; ++i) step_once(scaler, optimizer, parameter, infinity);
  const std::string bytes = saved(scaler);
  for (GradScaler* loaded : {&scaler, &other}) {
    load(*loaded, bytes);
    CHECK(loaded->skipped() == 3);
    CHECK(loaded->get_scale() == 1);
    step_once(*loaded, optimizer, parameter, infinity);
    CHECK(loaded->skipped() == 4);
  }
}

TEST_CASE("two losses and two optimizers have one scale, and each its own answer") {
  auto first = torch::full({2}, 3.0F, torch::requires_grad()),
       second = torch::full({2}, 3.0F, torch::requires_grad());
  lockstep::SGD plain({first}, {.lr = 0.5});
  lockstep::SGD fused({second}, {.lr = 0.5, .implementation = lockstep::Implementation::fused});
  GradScaler scaler({.init_scale = 8});
  scaler.scale((first * infinity).sum()).backward();
  scaler.scale(second.sum()).backward();
  CHECK(!scaler.step(plain));
  CHECK(scaler.step(fused));
  scaler.update();
  CHECK(first[0].item<float>() == 3);
  CHECK(second[0].item<float>() == 2.5F);
  CHECK(scaler.get_scale() == 4);
  CHECK(scaler.skipped() == 1);
}

}  // namespace grad_scaler_test
