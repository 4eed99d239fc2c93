#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "lockstep/world/detail/timeouts.hpp"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep::inline v0_1 {

struct GlooOptions {
  /// Timeout of a collective, from its launch to its completion, and of the rendezvous. At least 1 ms;
  /// clamped to 24 days. Default: `--timeout` or LOCKSTEP_TIMEOUT, in seconds, else 30 minutes.
  std::chrono::milliseconds timeout = detail::default_timeout(detail::collective_timeout);
  /// Number of collectives that run concurrently. At least 1.
  std::int64_t threads = 2;
  /// Comma-separated network interfaces. If empty: GLOO_SOCKET_IFNAME if set, the loopback if all ranks are
  /// on this host, else the interface that routes to the other hosts.
  std::string interfaces = {};
};

struct ShmOptions {
  /// As GlooOptions::timeout.
  std::chrono::milliseconds timeout = detail::default_timeout(detail::collective_timeout);
};

/// LibTorch's implementations of NCCL collectives.
enum class NcclEngine {
  nccl,  ///< c10d::ProcessGroupNCCL
  /// c10d::nccl2::ProcessGroupNCCL, new in LibTorch 2.15, whose Python makes it for "nccl". Serves one GPU per rank.
  nccl2,
};

/// Options of NcclComm. What else ProcessGroupNCCL offers, it reads from its environment variables.
struct NcclOptions {
  /// As GlooOptions::timeout, and of the shutdown. Default: `--timeout` or LOCKSTEP_TIMEOUT, else 10 minutes.
  std::chrono::milliseconds timeout = detail::default_timeout(detail::nccl_timeout);
  /// The GPU's index. Default: the GPU of the local rank.
  std::optional<int> device = std::nullopt;
  NcclEngine engine = NcclEngine::nccl;  ///< equal on every rank
  bool is_high_priority_stream = false;  ///< of the stream that runs the collectives
};

/// Options of ProcessGroupComm. All ranks need equal values.
struct ProcessGroupOptions {
  /// Creates a backend of `size` ranks that rendezvous through `store`.
  using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;

  /// As GlooOptions::timeout, of a wait on the host. The backend has a timeout of its own for the operations
  /// that no thread of the host waits for.
  std::chrono::milliseconds timeout = detail::default_timeout(detail::collective_timeout);
  /// The device of the tensors, with its index unless it is the CPU.
  c10::Device device = c10::Device(c10::kCPU);
  /// Creates the backends of new_group(). It runs on a thread of its own, and must own what it uses. Default:
  /// c10d::Backend::split.
  MakeBackend make_backend = {};
};

}  // namespace lockstep::inline v0_1
