// Gradients that travel in a shorter type: the plain hook, fp16, bf16, and bf16 summed in float32.
#include <cmath>
#include <limits>

#include "grad/hooks/buckets.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace compression_ranks_test {

using namespace lockstep;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float no_number = std::numeric_limits<float>::quiet_NaN();

const Plan plan{{{7, 5}, {3}}, {{64}}, {{1}}};

/// Each bucket's gradients of all ranks.
std::vector<std::vector<torch::Tensor>> all_ranks(const Buckets& buckets, int step) {
  std::vector<std::vector<torch::Tensor>> result(buckets.size());
  for (int rank = 0; rank < test_world().size(); ++rank) {
    const auto gradients = buckets.gradients_of(rank, step);
    for (std::size_t b = 0; b < buckets.size(); ++b) result[b].push_back(gradients[b]);
  }
  return result;
}

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

const Plan quantized_plan{{{40, 30}, {3}}, {{1024}}, {{1}}, {{50}}};

}  // namespace

TEST_CASE("the plain hook sums, and counts its bytes") {
  AllReduceHook hook;
  Buckets buckets(plan, torch::kDouble);
  auto divided = buckets.mine(1);
  for (auto& gradient : divided) gradient.div_(test_world().size());
  const auto averages = buckets.reduce(hook, shared_comm(), divided);
  const auto exact = buckets.average(1);
  for (std::size_t b = 0; b < averages.size(); ++b)
    CHECK(torch::allclose(averages[b], exact[b], 1e-14, 1e-15));
  CHECK(hook.wire_bytes() == on_the_wire(8 * (38 + 64 + 1)));
  CHECK(std::string(hook.name()) == "all_reduce");
}

TEST_CASE("bf16 keeps what is not finite, and the range of float32") {
  const bool last = test_world().rank() + 1 == test_world().size();
  const auto gradient = torch::tensor({last ? no_number : 1.0F, 1e30F, last ? infinity : 0.0F, 0.5F, 1e-30F});
  const auto check = [&](auto hook) {
    Buckets buckets(Plan{{{5}}});
    const torch::Tensor average = buckets.reduce(hook, shared_comm(), {gradient})[0];
    CHECK(std::isnan(average[0].item<float>()));
    CHECK(std::abs(average[1].item<float>() / 1e30F - 1) < 1e-2);
    CHECK(average[2].item<float>() == infinity);
    CHECK(average[3].item<float>() == 0.5F);
    CHECK(std::abs(average[4].item<float>() / 1e-30F - 1) < 1e-2);
  };
  check(Bf16Hook());
  check(Bf16Fp32Hook());
}

TEST_CASE("bf16 summed in float32 rounds twice, in any bucket") {
  const int ranks = test_world().size();
  Bf16Fp32Hook hook;
  Buckets buckets(plan);
  std::uint64_t bytes = 0;
  for (int step = 0; step < 3; ++step) {
    const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(step));
    const auto inputs = all_ranks(buckets, step);
    for (std::size_t b = 0; b < averages.size(); ++b) {
      CAPTURE(step, b);
      torch::Tensor sum;
      for (const auto& gradient : inputs[b]) {
        const auto part = gradient.to(torch::kBFloat16).to(torch::kFloat);
        sum = sum.defined() ? sum + part : part;
      }
      CHECK(same_bits(averages[b], (sum / ranks).to(torch::kBFloat16).to(torch::kFloat)));
      const auto share = static_cast<std::uint64_t>((averages[b].numel() + ranks - 1) / ranks);
      bytes += 2 * share * static_cast<std::uint64_t>(ranks + 1);
    }
  }
  CHECK(hook.wire_bytes() == on_the_wire(bytes));

  // The same gradients in one bucket.
  Buckets one(Plan{{{38 + 64 + 1}}});
  const auto together = one.reduce(hook, shared_comm(), {torch::cat(buckets.mine(7))});
  CHECK(same_bits(together[0], torch::cat(buckets.reduce(hook, shared_comm(), buckets.mine(7)))));
}

// A sum of two rounds once, in either.
TEST_CASE("bf16 summed in float32 is nearer to the average than bf16 summed in bf16", "[3+]") {
  Buckets buckets(Plan{{{100, 100}}});
  Bf16Hook rough;
  Bf16Fp32Hook fine;
  const auto exact = buckets.average(3)[0];
  const double rough_error = relative_error(buckets.reduce(rough, shared_comm(), buckets.mine(3))[0], exact);
  const double fine_error = relative_error(buckets.reduce(fine, shared_comm(), buckets.mine(3))[0], exact);
  CAPTURE(rough_error, fine_error);
  CHECK(fine_error < 0.95 * rough_error);
  CHECK(fine_error < 3e-3);
}

TEST_CASE("alone, LocalComm gives the bits of Gloo", "[alone]") {
  LocalComm local{test_world()};
  const auto check = [&](auto hook) {
    auto other = hook;
    Buckets one(plan), two(plan);
    CHECK(same_bits(one.reduce(hook, local, one.mine(2)), two.reduce(other, shared_comm(), two.mine(2))));
    CHECK(hook.wire_bytes() == 0);
  };
  check(AllReduceHook());
  check(Fp16Hook());
  check(Bf16Hook());
  check(Bf16Fp32Hook());
}

TEST_CASE("gradients in float64 and float16 keep their dtype") {
  for (const auto type : {torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    Buckets buckets(plan, type);
    const auto exact = buckets.average(4);
    const auto check = [&](auto hook) {
      const auto averages = buckets.reduce(hook, shared_comm(), buckets.mine(4));
      for (std::size_t b = 0; b < averages.size(); ++b) {
        CHECK(averages[b].dtype() == type);
        CHECK(torch::allclose(averages[b].to(torch::kDouble), exact[b], 3e-2, 3e-2));
      }
    };
    check(Fp16Hook());
    check(Bf16Hook());
    check(Bf16Fp32Hook());
  }
}

TEST_CASE("8 bits err by half a step at most, the same on every rank") {
  const bool per_channel = GENERATE(false, true);
  CAPTURE(per_channel);
  QuantizedHook hook({.per_channel = per_channel, .channel = 64});
  Buckets buckets(quantized_plan);
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
  CHECK_THROWS_AS(QuantizedHook({.per_channel = true, .channel = 0}), UsageError);
}

}  // namespace compression_ranks_test
