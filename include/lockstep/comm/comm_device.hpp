#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>

#include "lockstep/comm/communicator.hpp"

namespace lockstep {

/// A communicator whose tensors live on a device of its own, one GPU a rank: `tensor_device()` says which. It
/// stays the same, and is the current device of the thread that made the communicator.
template <class C>
concept DeviceCommunicator = Communicator<C> && requires(const C& comm) {
  { comm.tensor_device() } -> std::convertible_to<at::Device>;
};

/// Where the tensors of a communicator live: on its device where it has one, and else in the CPU's memory.
template <class C>
at::Device comm_device([[maybe_unused]] const C& comm) {
  if constexpr (DeviceCommunicator<C>)
    return comm.tensor_device();
  else
    return at::kCPU;
}

}  // namespace lockstep
