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

/// Tells every rank which parameters took part on any, and whether a rank has failed: one sum of small
/// numbers beside the buckets, as Python's.
template <Reducing Comm>
class UsageExchange {
 public:
  /// `parameters` is 0 where only failures are exchanged.
  UsageExchange(std::size_t parameters, at::Device device)
      : sent_(at::zeros({static_cast<std::int64_t>(parameters) + 1},
                        at::TensorOptions(at::kInt).device(device))),
        host_(at::zeros({static_cast<std::int64_t>(parameters) + 1}, at::kInt)) {}

  /// `used[i]`: parameter i has a gradient here.
  void start(Comm& comm, const std::vector<char>& used, bool failed) {
    auto* number = host_.mutable_data_ptr<std::int32_t>();
    const std::int64_t parameters = host_.numel() - 1;
    for (std::int64_t i = 0; i < parameters; ++i) number[i] = used[static_cast<std::size_t>(i)] != 0;
    number[parameters] = failed;
    sent_.copy_(host_);
    work_.emplace(comm.all_reduce(sent_, ReduceOp::sum));
  }
  [[nodiscard]] std::optional<typename Comm::Work>& work() { return work_; }
  /// Reads the sums, once the work was waited for.
  void read() {
    work_.reset();
    host_.copy_(sent_);
  }
  void drop() {
    // What nobody has waited for may write there still.
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
