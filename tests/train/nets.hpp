#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/data/dataset.hpp"
#include "support/catch.hpp"

/// Small models and data for the tests of training.
struct TinyNetImpl : torch::nn::Module {
  TinyNetImpl() : TinyNetImpl(6, 3) {}
  TinyNetImpl(int inputs, int classes)
      : hidden(register_module("hidden", torch::nn::Linear(inputs, 8))),
        norm(register_module("norm", torch::nn::BatchNorm1d(8))),
        last(register_module("last", torch::nn::Linear(8, classes))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(norm(hidden(x)))); }

  torch::nn::Linear hidden;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear last;
};
TORCH_MODULE(TinyNet);

/// Points of three classes, of which the largest of the first three coordinates tells.
inline lockstep::TensorDataset three_classes(std::int64_t samples, std::uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  auto data = torch::randn({samples, 6}, generator);
  return {data, data.slice(1, 0, 3).argmax(1)};
}

/// Whether two models have the same bits in all parameters and buffers.
inline bool same_bits(const TinyNet& a, const TinyNet& b) {
  const auto equal = [](const std::vector<torch::Tensor>& one, const std::vector<torch::Tensor>& other) {
    return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                      [](const auto& x, const auto& y) { return torch::equal(x, y); });
  };
  return equal(a->parameters(), b->parameters()) && equal(a->buffers(), b->buffers());
}

/// The bytes of all parameters.
inline std::string parameter_bytes(const torch::nn::Module& module) {
  std::string bytes;
  for (const auto& parameter : module.parameters())
    bytes.append(static_cast<const char*>(parameter.const_data_ptr()), parameter.nbytes());
  return bytes;
}

inline const auto cross_entropy_of = [](auto& net, auto& batch) {
  return torch::cross_entropy_loss(net->forward(batch.data), batch.target);
};
