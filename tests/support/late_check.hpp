#pragma once

#include <algorithm>
#include <vector>

#include <torch/torch.h>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/detail/poison_check.hpp"

namespace lockstep_test {

/// A check of buckets on the CPU that the host reads late, as it reads that of a device.
class LateHostCheck {
 public:
  static bool on_device(const at::Tensor&) { return true; }
  void launch(const std::vector<lockstep::detail::TensorGroup>& groups) {
    ++launched;
    found_ = std::any_of(groups.begin(), groups.end(), [](const auto& group) {
      return torch::stack(group).isnan().any().template item<bool>();
    });
  }
  bool read() {
    ++was_read;
    return found_;
  }

  /// How many checks there were in this process.
  static inline int launched = 0, was_read = 0;

 private:
  bool found_ = false;
};

/// GlooComm whose backwards do not wait for the check of the buckets, as those on GPUs do not.
struct LateComm : lockstep::GlooComm {
  using GlooComm::GlooComm;
  using NanCheck = LateHostCheck;
};

static_assert(lockstep::detail::NanCheck<LateHostCheck>);

}  // namespace lockstep_test
