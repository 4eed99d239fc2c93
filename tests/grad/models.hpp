#pragma once

#include <torch/torch.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/data/loader.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/nn/activation_checkpoint.hpp"
#include "support/catch.hpp"
#include "support/mib.hpp"
#include "support/ranks.hpp"
#include "support/refuses.hpp"
#include "support/tested_comm.hpp"

/// Three layers, so six parameters; the same values on every rank that seeds alike.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    one = register_module("one", torch::nn::Linear(4, 8));
    two = register_module("two", torch::nn::Linear(8, 8));
    three = register_module("three", torch::nn::Linear(8, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(one(x));
    if (use_two) x = torch::relu(two(x));
    return three(x);
  }
  torch::nn::Linear one{nullptr}, two{nullptr}, three{nullptr};
  bool use_two = true;
};
TORCH_MODULE(Net);

/// One bucket a layer, so that three collectives run.
inline lockstep::DdpOptions small_buckets() {
  return {.bucket_cap_mb = lockstep_test::mib({64, 300, 300})};
}

inline lockstep_test::TestedComm& shared_comm() {
  static lockstep_test::TestedComm comm{test_world()};
  return comm;
}

inline torch::Tensor batch_of(int rank, int step) {
  torch::manual_seed(1000 * step + rank);
  return torch::randn({5, 4});
}

inline std::vector<torch::Tensor> gradients(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> result;
  for (const auto& parameter : parameters)
    result.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return result;
}

/// What the average over all ranks of a model's gradients must be, computed by this rank alone. `loss(net,
/// rank)` is that rank's loss.
template <class Loss>
std::vector<torch::Tensor> expected_gradients(Net net, int ranks, Loss loss) {
  auto copy = Net();
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      copy->parameters()[i].copy_(net->parameters()[i]);
  }
  std::vector<torch::Tensor> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    copy->zero_grad();
    loss(copy, rank).backward();
    const auto grads = gradients(copy->parameters());
    if (sums.empty())
      for (const auto& grad : grads) sums.push_back(torch::zeros_like(grad));
    for (std::size_t i = 0; i < grads.size(); ++i) sums[i] += grads[i] / ranks;
  }
  return sums;
}

inline void check_close(const std::vector<torch::Tensor>& actual,
                        const std::vector<torch::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    CAPTURE(i);
    REQUIRE(actual[i].defined());
    CHECK(torch::allclose(actual[i], expected[i], 1e-4, 1e-6));
  }
}

struct Thrown : std::logic_error {  // no error of lockstep is one
  using logic_error::logic_error;
};

/// `x`, whose backward throws this.
inline torch::Tensor throwing(const torch::Tensor& x, const std::string& text = "thrown inside backward") {
  const auto out = x * 1;
  out.register_hook([text](const at::Tensor&) -> at::Tensor { throw Thrown(text); });
  return out * 1;
}

/// The text that `work` throws; empty where it throws nothing.
template <class Work>
std::string thrown_by(Work&& work) {
  try {
    std::forward<Work>(work)();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
  }
  return "";
}
