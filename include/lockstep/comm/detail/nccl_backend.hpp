#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <utility>

#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#define LOCKSTEP_DETAIL_DEFINED_USE_C10D_NCCL
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#if __has_include(<torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>)
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>
#define LOCKSTEP_DETAIL_HAS_NCCL2
#endif
#ifdef LOCKSTEP_DETAIL_DEFINED_USE_C10D_NCCL
#undef LOCKSTEP_DETAIL_DEFINED_USE_C10D_NCCL
#undef USE_C10D_NCCL
#endif

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/gpus.hpp"
#include "lockstep/world/detail/nccl_environment.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Formats a version of NCCL as nccl.h numbers it: 23007 is "2.30.7".
inline std::string nccl_version_text(unsigned version) {
  return detail::formatted("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

/// Checks that LibTorch and this program agree on the size of ncclConfig_t, which ProcessGroupNCCL::Options
/// holds by value: LibTorch's constructor would write past the object. Throws UsageError.
inline void check_nccl_header() {
  using Options = c10d::ProcessGroupNCCL::Options;
  struct alignas(Options) Room {
    std::byte bytes[sizeof(Options) + 4096];
  };
  const auto room = std::make_unique<Room>();
  auto* const options = ::new (static_cast<void*>(room->bytes)) Options();
  // The members before `config`, and its first ones, lie at the same place in every version.
  const std::size_t size = options->config.size;
  if (size == sizeof(ncclConfig_t)) return options->~Options();
  throw UsageError(detail::formatted(
      "this program was compiled with the nccl.h of NCCL {} (ncclConfig_t has {} bytes), and LibTorch with "
      "that of {} ({} bytes): compile it with the header of LibTorch's NCCL, as the CMake target "
      "lockstep::cuda does",
      nccl_version_text(NCCL_VERSION_CODE), sizeof(ncclConfig_t), nccl_version_text(options->config.version),
      size));
}

/// Warns once for this process of an environment in which LibTorch may end it.
inline void warn_of_nccl_environment(const World& world) {
  static std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  if (const std::string warning = nccl_environment_warning(); !warning.empty())
    world.log.warning("{}", warning);
}

/// The work on the current stream of a device up to now, as a Work of c10d.
class StreamWork : public c10d::Work {
 public:
  explicit StreamWork(const at::Device& device) : event_(device.type()) {
    event_.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  bool isCompleted() override { return event_.query(); }

 private:
  c10::Event event_;
};

/// Creates a ProcessGroupNCCL of the chosen engine and connects it on `device`. Blocks until all ranks have
/// joined.
inline c10::intrusive_ptr<c10d::Backend> connect_nccl(const StorePtr& store, int rank, int size,
                                                      const at::Device& device, const NcclOptions& options) {
  const c10::cuda::CUDAGuard guard(device);
  auto nccl = c10d::ProcessGroupNCCL::Options::create(options.is_high_priority_stream);
  // LibTorch's own timeout error says less than ours, so it must expire later.
  nccl->timeout = options.timeout + std::chrono::seconds(10);
#ifdef LOCKSTEP_DETAIL_HAS_NCCL2
  if (options.engine == NcclEngine::nccl2) {
    auto group = c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(store, rank, size, std::move(nccl));
    group->setBoundDeviceId(device);  // connects
    return group;
  }
#endif
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(nccl));
  // Not bound to the device: it then refuses tensors on the other GPUs of this rank.
  group->eagerConnectSingleDevice(device);
  return group;
}

/// Returns the options of a group whose backends are ProcessGroupNCCLs. Throws UsageError if this rank has no
/// GPU, or its LibTorch lacks the engine.
inline ProcessGroupOptions nccl_backend(const World& world, const NcclOptions& nccl) {
  check_nccl_header();
#ifndef LOCKSTEP_DETAIL_HAS_NCCL2
  if (nccl.engine == NcclEngine::nccl2)
    throw UsageError(
        "NcclOptions::engine is nccl2, which this LibTorch does not have: it came with 2.15; use "
        "NcclEngine::nccl");
#endif
  const int gpu = gpu_of_rank(world.environment(), static_cast<int>(c10::cuda::device_count()), nccl.device);
  warn_of_nccl_environment(world);
  ProcessGroupOptions options;
  options.timeout = nccl.timeout;
  options.check_shapes = nccl.check_shapes;
  options.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  options.make_backend = [device = options.device, nccl](const StorePtr& store, int rank, int size) {
    return connect_nccl(store, rank, size, device, nccl);
  };
  return options;
}

}  // namespace lockstep::detail
