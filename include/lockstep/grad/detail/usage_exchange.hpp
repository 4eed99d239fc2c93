#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// Exchanges which parameters were used on any rank and whether any rank has failed, in one small integer
/// all-reduce, like Python's.
template <Reducing Comm>
class UsageExchange {
 public:
  /// `parameters` is 0 if only failures are exchanged.
  UsageExchange(std::size_t parameters, at::Device device)
      : sent_(at::zeros({static_cast<std::int64_t>(parameters) + 1},
                        at::TensorOptions(at::kInt).device(device))),
        host_(at::zeros({static_cast<std::int64_t>(parameters) + 1}, at::kInt)) {}

  /// Launches the all-reduce. `used[i]`: parameter i has a gradient on this rank. `failed`: this rank has
  /// failed. Collective; does not block on the collective.
  void start(Comm& comm, const std::vector<char>& used, bool failed) {
    auto* number = host_.mutable_data_ptr<std::int32_t>();
    const std::int64_t parameters = host_.numel() - 1;
    for (std::int64_t i = 0; i < parameters; ++i) number[i] = used[static_cast<std::size_t>(i)] != 0;
    number[parameters] = failed;
    sent_.copy_(host_);
    work_.emplace(comm.all_reduce(sent_, ReduceOp::sum));
  }
  [[nodiscard]] std::optional<typename Comm::Work>& work() { return work_; }
  /// Reads the sums back. Call after waiting for `work()`.
  void read() {
    work_.reset();
    host_.copy_(sent_);
  }
  /// Abandons the exchange.
  void drop() {
    // A work in flight may still write to the old tensor.
    if (std::exchange(work_, std::nullopt)) sent_ = at::zeros_like(sent_);
  }

  [[nodiscard]] bool used(std::size_t i) const { return host_.const_data_ptr<std::int32_t>()[i] != 0; }
  [[nodiscard]] bool failed() const { return host_.const_data_ptr<std::int32_t>()[host_.numel() - 1] != 0; }
  [[nodiscard]] std::size_t bytes() const { return sent_.nbytes(); }

 private:
  at::Tensor sent_, host_;
  std::optional<typename Comm::Work> work_;
};

}  // namespace lockstep::detail
