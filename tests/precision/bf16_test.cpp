#include "lockstep/precision/precision.hpp"

#include <type_traits>

#include "support/catch.hpp"

namespace bf16_test {

static_assert(lockstep::Precision<lockstep::Bf16> && lockstep::Precision<lockstep::Fp16>);

TEST_CASE("half precisions reach the operators of a forward, and end with it") {
  torch::nn::Linear layer(4, 3);
  const auto input = torch::randn({2, 4});
  const auto check = [&](auto precision, at::ScalarType type) {
    const auto output = precision.forward([&] { return layer(input); });
    CHECK(output.scalar_type() == type);
    CHECK(layer(input).scalar_type() == at::kFloat);
    CHECK_THROWS_AS(precision.forward([]() -> int { throw std::runtime_error("no"); }), std::runtime_error);
    CHECK(layer(input).scalar_type() == at::kFloat);
  };
  check(lockstep::Bf16(), at::kBFloat16);
  check(lockstep::Fp16(), at::kHalf);
}

TEST_CASE("nested scopes are each left for the one around") {
  torch::nn::Linear layer(4, 3);
  const auto input = torch::randn({2, 4});
  const auto forward = [&] { return layer(input); };
  lockstep::Fp16 half;
  lockstep::Bf16().forward([&] {
    CHECK(half.forward(forward).scalar_type() == at::kHalf);
    CHECK(forward().scalar_type() == at::kBFloat16);
    return 0;
  });
}

TEST_CASE("copies of parameters do not outlive a forward") {
  torch::nn::Linear layer(4, 3);
  const auto input = torch::randn({2, 4});
  const lockstep::Bf16 precision;
  const auto before = precision.forward([&] { return layer(input).sum(); });
  {
    const torch::NoGradGuard no_grad;
    layer->weight.zero_();
    layer->bias.zero_();
  }
  CHECK(precision.forward([&] { return layer(input).sum(); }).item<float>() == 0);
}

}  // namespace bf16_test
