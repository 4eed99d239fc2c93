#include "lockstep/precision/precision.hpp"

#include <type_traits>
#include <utility>

#include "support/catch.hpp"

namespace fp32_test {

static_assert(lockstep::Precision<lockstep::Fp32>);
static_assert(!lockstep::Precision<int>);
static_assert(std::is_empty_v<lockstep::Fp32>);

TEST_CASE("fp32 is the plain step") {
  lockstep::Fp32 precision;
  auto parameter = torch::full({1}, 3.0F, torch::requires_grad());
  torch::optim::SGD optimizer({parameter}, 0.5);

  const auto loss = precision.forward([&] { return (parameter * parameter).sum(); });
  const torch::Tensor& scaled = precision.scale(loss);
  CHECK(&scaled == &loss);
  scaled.backward();
  CHECK(precision.step(optimizer));
  CHECK(parameter.item<float>() == 0);  // 3 - 0.5 * 6
}

TEST_CASE("fp32's forward hands over references, values and exceptions") {
  lockstep::Fp32 precision;
  int number = 1;
  precision.forward([&]() -> int& { return number; }) = 2;
  CHECK(number == 2);
  CHECK_THROWS_AS(precision.forward([]() -> int { throw std::runtime_error("no"); }), std::runtime_error);
}

namespace {

// A precision of a user's own: a fixed scale, and no step along gradients that are not finite.
struct FixedScale {
  static constexpr double factor = 4;

  template <class Forward>
  decltype(auto) forward(Forward&& forward) {
    return std::forward<Forward>(forward)();
  }
  torch::Tensor scale(const torch::Tensor& loss) { return loss * factor; }
  bool step(torch::optim::Optimizer& optimizer) {
    const torch::NoGradGuard no_grad;
    for (auto& group : optimizer.param_groups())
      for (auto& parameter : group.params()) {
        if (!parameter.grad().isfinite().all().item<bool>()) return false;
        parameter.mutable_grad().div_(factor);
      }
    optimizer.step();
    return true;
  }
};
static_assert(lockstep::Precision<FixedScale> && !lockstep::ScalingPrecision<FixedScale>);

}  // namespace

TEST_CASE("a precision of a user's own takes the place of any other") {
  const auto step = [](auto precision, float start) {
    auto parameter = torch::full({1}, start, torch::requires_grad());
    torch::optim::SGD optimizer({parameter}, 0.25);
    precision.scale(precision.forward([&] { return (parameter * parameter).sum(); })).backward();
    const bool stepped = precision.step(optimizer);
    return std::pair(stepped, parameter.item<float>());
  };
  CHECK(step(FixedScale(), 3) == step(lockstep::Fp32(), 3));
  CHECK(step(FixedScale(), 3e38F) == std::pair(false, 3e38F));
}

}  // namespace fp32_test
