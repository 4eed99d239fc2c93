#pragma once

#include <torch/torch.h>

#include <memory>
#include <utility>

#include "lockstep/nn/sync_batch_norm.hpp"

/// Two ranks in one process, the other of which has the very same batch; so the joined batch is this one twice.
struct Twin : lockstep::detail::StatisticsExchange {
  [[nodiscard]] int size() const override { return 2; }
  [[nodiscard]] at::Tensor gather(const at::Tensor& row) override {
    ++calls;
    return torch::stack({row, row});
  }
  void sum(const at::Tensor& values) override {
    ++calls;
    at::Tensor target = values;
    target.mul_(2);
  }
  int calls = 0;
};

/// The ranks of a batch norm that meet through `exchange`.
inline auto group_of(std::shared_ptr<Twin> exchange = std::make_shared<Twin>()) {
  return lockstep::detail::BatchNormGroup(std::move(exchange));
}
