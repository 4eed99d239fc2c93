// Gradients that travel as 8 bits.
#include <cmath>
#include <limits>

#include "grad/hooks/buckets.hpp"
#include "lockstep/grad/hooks/quantized_hook.hpp"

namespace quantized_ranks_test {

using namespace lockstep;

namespace {

/// Half a step of each rank, averaged: the largest error of an element of these channels. [n] float64
torch::Tensor error_bound(const Buckets& buckets, int step, std::size_t b, std::int64_t channel) {
  torch::Tensor bound = torch::zeros({buckets[b].flat.numel()}, torch::kDouble);
  for (int rank = 0; rank < test_world().size(); ++rank) {
    const auto gradient = buckets.gradients_of(rank, step)[b].to(torch::kDouble);
    for (std::int64_t first = 0; first < gradient.numel(); first += channel) {
      const auto part = gradient.slice(0, first, std::min(first + channel, gradient.numel()));
      const double high = std::max(0.0, part.max().item<double>());
      const double low = std::min(0.0, part.min().item<double>());
      bound.slice(0, first, first + part.numel()) += (high - low) / 255 / 2 / test_world().size();
    }
  }
  return bound;
}

const Plan plan{{{40, 30}, {3}}, {{1024}}, {{1}}, {{50}}};

}  // namespace

TEST_CASE("8 bits err by half a step at most, the same on every rank") {
  const bool per_channel = GENERATE(false, true);
  CAPTURE(per_channel);
  QuantizedHook hook({.per_channel = per_channel, .channel = 64});
  Buckets buckets(plan);
  for (int step = 0; step < 3; ++step) {
    const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(step));
    const auto exact = buckets.average(step);
    for (std::size_t b = 0; b < averages.size(); ++b) {
      CAPTURE(step, b);
      const auto bound = error_bound(buckets, step, b, per_channel ? 64 : buckets[b].flat.numel());
      const auto error = (averages[b].to(torch::kDouble) - exact[b]).abs();
      CHECK((error <= bound * 1.0001 + 1e-6).all().item<bool>());
      // It is not exact by accident: most elements lie between two steps.
      if (error.numel() > 1) CHECK(error.mean().item<double>() > 0.01 * bound.mean().item<double>());
      CHECK(same_on_all_ranks(averages[b]));
    }
  }
  const std::uint64_t channels = per_channel ? 19 + 16 + 1 + 1 : 4;
  CHECK(hook.wire_bytes() == on_the_wire(3 * (1203 + 1024 + 1 + 50 + 8 * channels)));
}

TEST_CASE("8 bits keep multiples of a step exactly, zero among them") {
  QuantizedHook hook;
  Buckets buckets(Plan{{{256}}, {{10}}});
  const auto steps = torch::arange(256, torch::kFloat) - 100;
  const auto averages = buckets.reduce(hook, shared_comm(), {steps, torch::zeros({10})});
  CHECK(torch::allclose(averages[0], steps, 1e-6, 1e-5));
  CHECK(averages[0][100].item<float>() == 0);
  CHECK(same_bits(averages[1], torch::zeros({10})));
}

TEST_CASE("channels keep small gradients beside large ones") {
  Buckets buckets(Plan{{{2, 512}}});
  const auto gradient = torch::cat({torch::randn({512}), 1e-4 * torch::ones({512})});
  QuantizedHook whole, channels({.per_channel = true});
  const auto by_bucket = buckets.reduce(whole, shared_comm(), {gradient})[0];
  const auto by_channel = buckets.reduce(channels, shared_comm(), {gradient})[0];
  CHECK(by_bucket.slice(0, 512).abs().max().item<float>() == 0);
  CHECK(torch::allclose(by_channel.slice(0, 512), gradient.slice(0, 512), 1e-5, 0));
}

TEST_CASE("what is not finite on one rank makes its channel not-a-number on all") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity());
  CAPTURE(bad);
  QuantizedHook hook({.per_channel = true, .channel = 16});
  Buckets buckets(Plan{{{40}}});
  auto gradient = torch::ones({40});
  if (test_world().rank() + 1 == test_world().size()) gradient[20] = bad;
  const auto average = buckets.reduce(hook, shared_comm(), {gradient})[0];
  const auto nan = average.isnan();
  CHECK(nan.slice(0, 16, 32).all().item<bool>());
  CHECK_FALSE(nan.slice(0, 0, 16).any().item<bool>());
  CHECK_FALSE(nan.slice(0, 32).any().item<bool>());
}

TEST_CASE("8 bits take float64 and LocalComm, and refuse an empty channel") {
  QuantizedHook hook;
  Buckets buckets(Plan{{{100}}}, torch::kDouble);
  const auto average = buckets.reduce(hook, shared_comm(), buckets.mine(5))[0];
  CHECK(average.dtype() == torch::kDouble);
  CHECK(relative_error(average, buckets.average(5)[0]) < 0.02);
  if (test_world().size() == 1) {
    LocalComm local{test_world()};
    CHECK(same_bits(buckets.reduce(hook, local, buckets.mine(5))[0], average));
  }
  CHECK_THROWS_WITH(QuantizedHook({.per_channel = true, .channel = 0}),
                    ContainsSubstring("a channel of 0 elements"));
}

}  // namespace quantized_ranks_test
