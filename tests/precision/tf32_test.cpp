#include "lockstep/precision/precision.hpp"

#include <stdexcept>
#include <type_traits>

#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace tf32_test {

static_assert(lockstep::Precision<lockstep::Tf32> && !lockstep::ScalingPrecision<lockstep::Tf32>);

namespace {

bool high() {
  return at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGH &&
         at::globalContext().allowTF32CuDNN();
}

bool as_before() {
  return at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::MEDIUM &&
         !at::globalContext().allowTF32CuDNN();
}

// Settings of the user's own, which are those of LibTorch again afterwards.
struct OwnSettings {
  OwnSettings() { set("medium", false); }
  ~OwnSettings() { set("highest", true); }
  static void set(const char* matmul, bool cudnn) {
    at::globalContext().setFloat32MatmulPrecision(matmul);
    at::globalContext().setAllowTF32CuDNN(cudnn);
  }
};

}  // namespace

TEST_CASE("tf32 holds in the forward and from scale to step, and leaves the settings as they were") {
  const OwnSettings own;
  lockstep::Tf32 precision;
  auto parameter = torch::full({1}, 3.0F, torch::requires_grad());
  torch::optim::SGD optimizer({parameter}, 0.5);
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < 2; ++micro) {
      bool inside = false;
      const auto loss = precision.forward([&] {
        inside = high();
        return (parameter * parameter).sum() / 4;
      });
      CHECK(inside);
      CHECK(as_before() == (micro == 0));
      const torch::Tensor& scaled = precision.scale(loss);
      CHECK(&scaled == &loss);
      CHECK(high());
      scaled.backward();
    }
    CHECK(precision.step(optimizer));
    CHECK(as_before());
  }
  CHECK(parameter.item<float>() == 0.75F);  // 3 - 0.5 * 3, then 1.5 - 0.5 * 1.5
}

TEST_CASE("tf32 ends with what throws, with a step that is given up, and with its owner") {
  const OwnSettings own;
  const auto loss = torch::ones({});
  {
    lockstep::Tf32 precision;
    CHECK_THROWS_AS(precision.forward([]() -> int { throw std::runtime_error("no"); }), std::runtime_error);
    CHECK(as_before());
    precision.scale(loss);
    precision.forget();
    CHECK(as_before());
    precision.scale(loss);
    lockstep::Tf32 moved(std::move(precision));
    CHECK(high());
  }
  CHECK(as_before());
}

}  // namespace tf32_test
