#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "lockstep/train/trainer.hpp"
#include "train/nets.hpp"

/// What the tests of exact weights share: small smooth networks in fp64, and the same training by one process
/// on the whole of each step's samples, by hand.

/// A random function of 3 numbers, of which the targets are unlike each other.
inline lockstep::TensorDataset curve(std::int64_t samples) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(samples) + 17);
  const auto data = torch::randn({samples, 3}, generator, torch::kDouble);
  return {data, torch::sin(3 * data.sum(1, true)) + data.slice(1, 0, 1).pow(2)};
}

/// The same on every rank that gives the same numbers.
inline torch::nn::Sequential tanh_network(int depth, int width, std::uint64_t seed) {
  torch::manual_seed(seed);
  torch::nn::Sequential net;
  int inputs = 3;
  for (int layer = 0; layer < depth; ++layer) {
    net->push_back(torch::nn::Linear(inputs, width));
    net->push_back(torch::nn::Tanh());
    inputs = width;
  }
  net->push_back(torch::nn::Linear(inputs, 1));
  net->to(torch::kDouble);
  return net;
}

inline const auto squared_error = [](auto& net, const auto& batch) {
  return torch::mse_loss(net->forward(batch.data), batch.target);
};

/// The same as a sum and a count.
inline const auto summed_squared_error = [](auto& net, const auto& batch) {
  return lockstep::Mean{torch::mse_loss(net->forward(batch.data), batch.target, torch::Reduction::Sum),
                        batch.data.size(0)};
};

inline const lockstep::MakeOptimizer momentum_sgd{[](const std::vector<torch::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}};

inline torch::nn::Sequential copy_of(const torch::nn::Sequential& net) {
  return std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
}

/// One step down the mean squared error over `data` at `indices`; returns it.
inline double step_alone(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer,
                         const lockstep::TensorDataset& data, const std::vector<std::size_t>& indices) {
  const auto batch = data.get_batch(indices);
  optimizer.zero_grad();
  const auto loss = squared_error(net, batch);
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

/// The largest difference of a parameter's elements, over the largest of its elements.
inline double distance(const torch::nn::Sequential& a, const torch::nn::Sequential& b) {
  double most = 0;
  const auto left = a->parameters(), right = b->parameters();
  for (std::size_t i = 0; i < left.size(); ++i)
    most = std::max(most, ((left[i] - right[i]).abs().max() / right[i].abs().max()).item<double>());
  return most;
}
