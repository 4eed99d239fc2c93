#include "lockstep/nn/activation_checkpoint.hpp"

#include <torch/torch.h>

#include <functional>
#include <vector>

#include "lockstep/precision/precision.hpp"
#include "support/catch.hpp"

namespace activation_checkpoint_test {

using lockstep::checkpoint;

namespace {

struct Block {
  torch::nn::Linear linear{6, 6};
  int calls = 0;
  torch::Tensor operator()(const torch::Tensor& x) {
    ++calls;
    return torch::dropout(torch::relu(linear(x)), 0.5, /*train=*/true) + torch::rand({6});
  }
};

struct Run {
  std::vector<torch::Tensor> tensors;
  at::Tensor generator;
};

at::Tensor generator_state() {
  return at::globalContext().defaultGenerator(at::kCPU).get_state();
}

/// The loss, the gradients and the generator afterwards of `forward`, under the same seed.
Run run(const std::vector<torch::Tensor>& leaves, const std::function<torch::Tensor()>& forward) {
  for (const auto& leaf : leaves) leaf.mutable_grad().reset();
  torch::manual_seed(5);
  const torch::Tensor loss = forward().pow(2).sum();
  Run result{{loss.detach()}, generator_state()};
  loss.backward();
  CHECK(generator_state().equal(result.generator));
  for (const auto& leaf : leaves) result.tensors.push_back(leaf.grad());
  return result;
}

bool same_bits(const Run& a, const Run& b) {
  for (std::size_t i = 0; i < a.tensors.size(); ++i)
    if (!a.tensors[i].defined() || !a.tensors[i].equal(b.tensors[i])) return false;
  return a.generator.equal(b.generator);
}

}  // namespace

TEST_CASE("a checkpoint has the bits of a plain call, and calls the function again in backward") {
  torch::manual_seed(1);
  Block first, second;
  const auto x = torch::randn({4, 6}, torch::requires_grad());
  const std::vector<torch::Tensor> leaves{x, first.linear->weight, first.linear->bias, second.linear->weight};
  const bool autocast = GENERATE(false, true);
  const auto under = [&](auto&& forward) -> std::function<torch::Tensor()> {
    return [&, forward] {
      if (!autocast) return forward();
      return lockstep::Bf16().forward(forward).to(torch::kFloat);
    };
  };
  const Run plain = run(leaves, under([&] { return first(second(first(x))); }));
  CHECK(first.calls == 2);
  const Run again = run(leaves, under([&] {
                          const auto y = first(checkpoint(std::ref(second), first(x)));
                          CHECK(at::autocast::is_autocast_enabled(at::kCPU) == autocast);
                          return y;
                        }));
  CHECK(second.calls == 3);
  CHECK(same_bits(plain, again));
  // One in another, several inputs of which one has no gradient, and several outputs.
  const auto index = torch::tensor({3, 1, 1, 0});
  const auto pair = [&](const torch::Tensor& value, const torch::Tensor& at) {
    const auto inner = checkpoint(std::ref(second), value);
    return std::vector<torch::Tensor>{inner.index_select(0, at), inner * 2};
  };
  const Run whole = run(leaves, under([&] {
                          const auto y = second(first(x));
                          return y.index_select(0, index) + y * 2;
                        }));
  CHECK(same_bits(whole, run(leaves, under([&] {
                               const auto parts = checkpoint(pair, first(x), index);
                               return parts[0] + parts[1];
                             }))));
}

TEST_CASE("a parameter has its gradient where no input requires grad, and outside of the checkpoint too") {
  Block block;
  const auto x = torch::randn({4, 6});
  const auto& weight = block.linear->weight;
  const auto forward = [&](bool checkpointed) {
    return [&, checkpointed] {
      const auto sum = [&] {
        const auto y = checkpointed ? checkpoint(std::ref(block), x) : block(x);
        return y.sum() + torch::linear(x, weight).sum();
      };
      return lockstep::Bf16().forward(sum).to(torch::kFloat);
    };
  };
  const Run plain = run({weight}, forward(false)), again = run({weight}, forward(true));
  // Autocast casts the weight once in a plain call, and the gradients of both uses are added in bfloat16.
  CHECK(again.tensors[0].equal(plain.tensors[0]));
  CHECK(torch::allclose(again.tensors[1], plain.tensors[1], 0.02, 0.02));
  CHECK(run({weight}, [&] { return checkpoint(std::ref(block), x); }).tensors[1].defined());
}

TEST_CASE("a checkpoint without a gradient is a plain call, and higher gradients are refused") {
  Block block;
  const auto x = torch::randn({4, 6}, torch::requires_grad());
  {
    const torch::NoGradGuard no_grad;
    CHECK_FALSE(checkpoint(std::ref(block), x).requires_grad());
  }
  const auto loss = [&] { return checkpoint(std::ref(block), x).sum(); };
  CHECK_THROWS_AS(torch::autograd::grad({loss()}, {x}), lockstep::GradientError);
  CHECK_THROWS_AS(loss().backward({}, /*retain_graph=*/true, /*create_graph=*/true), lockstep::GradientError);
  const auto twice = loss();
  twice.backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  twice.backward();
  CHECK(x.grad().equal(once * 2));
}

}  // namespace activation_checkpoint_test
