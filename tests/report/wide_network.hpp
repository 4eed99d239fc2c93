#pragma once

#include <torch/torch.h>

/// A network of several buckets where these hold some KiB. It has no buffers, so that the ranks meet in the
/// reduction alone.
inline torch::nn::Sequential wide_network(int layers = 4, int width = 64) {
  torch::manual_seed(3);
  torch::nn::Sequential net;
  for (int layer = 0; layer < layers; ++layer) {
    net->push_back(torch::nn::Linear(layer == 0 ? 6 : width, width));
    net->push_back(torch::nn::Tanh());
  }
  net->push_back(torch::nn::Linear(width, 3));
  return net;
}
