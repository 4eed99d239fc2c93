#pragma once

#include <torch/torch.h>

#include <vector>

#include "lockstep/error.hpp"
#include "support/archive.hpp"
#include "support/refuses.hpp"

/// Parameters of some shapes, those of a vector's tail among them, from a seed.
inline std::vector<torch::Tensor> some_parameters(int seed, at::ScalarType type = at::kFloat) {
  torch::manual_seed(seed);
  std::vector<torch::Tensor> parameters;
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{8, 12}, {12}, {3, 2, 5, 5}, {7}, {1}})
    parameters.push_back(torch::randn(shape).to(type).requires_grad_());
  return parameters;
}

inline void set_gradients(std::vector<torch::Tensor>& parameters, int step) {
  torch::manual_seed(1000 + step);
  for (torch::Tensor& parameter : parameters)
    parameter.mutable_grad() = torch::randn(parameter.sizes()).to(parameter.scalar_type());
}

inline bool same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!torch::equal(a[i], b[i])) return false;
  return true;
}
