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

}  // namespace fp32_test
