#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::detail {

/// Synchronizes buffers over the ranks by a BufferPolicy.
class BufferSync {
 public:
  BufferSync() = default;
  BufferSync(const std::vector<NamedTensor>& buffers, BufferPolicy policy) {
    if (policy == BufferPolicy::none) return;
    std::vector<at::Tensor> sent;
    for (const auto& [name, buffer] : buffers) {
      const bool averaged = policy == BufferPolicy::average && at::isFloatingType(buffer.scalar_type());
      (averaged ? averaged_ : sent).push_back(buffer);
    }
    sent_ = BroadcastList(std::move(sent));
  }

  /// Synchronizes the buffers. Collective; stream-ordered.
  template <Reducing Comm>
  void run(Comm& comm) {
    sent_.run(comm, 0);
    if (averaged_.empty()) return;
    const c10::NoGradGuard no_grad;
    comm.all_reduce(averaged_, ReduceOp::avg).wait();
  }

 private:
  std::vector<at::Tensor> averaged_;
  BroadcastList sent_{{}};
};

}  // namespace lockstep::detail
