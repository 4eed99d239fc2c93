#pragma once

#if !__has_include(<nccl.h>) || !__has_include(<cuda_runtime_api.h>) || \
    !__has_include(<c10/cuda/CUDAStream.h>)
#error \
    "lockstep: NcclComm needs the headers of CUDA, of NCCL and of a LibTorch for CUDA: link lockstep::cuda, \
or leave this header out"
#endif

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>

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

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/nccl_environment.hpp"
#include "lockstep/world/detail/timeouts.hpp"
#include "lockstep/world/detail/world_state.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

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

/// Returns the options of a group whose backends are ProcessGroupNCCLs. Throws UsageError if this rank has no
/// GPU, or its LibTorch lacks the engine.
LOCKSTEP_PROCESS_WIDE inline ProcessGroupOptions nccl_backend(const World& world, NcclOptions nccl) {
  nccl.timeout = checked_timeout("NcclOptions", nccl.timeout);
  check_nccl_header();
#ifndef LOCKSTEP_DETAIL_HAS_NCCL2
  if (nccl.engine == NcclEngine::nccl2)
    throw UsageError(
        "NcclOptions::engine is nccl2, which this LibTorch does not have: it came with 2.15; use "
        "NcclEngine::nccl");
#endif
  static_cast<void>(world.local_rank());  // known once all ranks of the host have joined
  const int gpu = gpu_of_rank(detail::state_of(world).current_environment(),
                              static_cast<int>(c10::cuda::device_count()), nccl.device);
  static std::atomic<bool> told{false};  // that LibTorch may end this process
  if (const auto warning = nccl_environment_warning(); !warning.empty() && !told.exchange(true))
    world.log.warning("{}", warning);
  ProcessGroupOptions options;
  options.timeout = nccl.timeout;
  options.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  options.make_backend = [device = options.device, nccl](const StorePtr& store, int rank,
                                                         int size) -> c10::intrusive_ptr<c10d::Backend> {
    const c10::cuda::CUDAGuard guard(device);
    auto own = c10d::ProcessGroupNCCL::Options::create(nccl.is_high_priority_stream);
    // LibTorch's own timeout error says less than ours, so it must expire later.
    own->timeout = nccl.timeout + detail::backend_slack;
#ifdef LOCKSTEP_DETAIL_HAS_NCCL2
    if (nccl.engine == NcclEngine::nccl2) {
      auto backend = c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(store, rank, size, std::move(own));
      backend->setBoundDeviceId(device);  // connects
      return backend;
    }
#endif
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(own));
    // Not bound to the device: it then refuses tensors on the other GPUs of this rank.
    backend->eagerConnectSingleDevice(device);
    return backend;
  };
  return options;
}

}  // namespace detail

/// Collectives of CUDA tensors over LibTorch's own NCCL backend: a ProcessGroupComm that creates its
/// ProcessGroupNCCL, and one for each sub-group. Not part of lockstep.hpp, so that CPU-only programs need no
/// CUDA headers.
///
/// Tensors may be on any GPU of this rank: ProcessGroupNCCL opens one NCCL communicator for each device, so
/// that a model on several GPUs needs one NcclComm. The tensors of one list are on one device. With
/// NcclEngine::nccl2 a tensor on another GPU than `tensor_device()` throws CommunicationError.
///
/// When another rank has failed, or the timeout has passed, a thread calls c10d::Backend::abort(), so that a
/// host that waits for the GPU continues; results of an aborted operation are undefined.
/// Counterpart: torch.distributed.ProcessGroupNCCL.
class NcclComm : public ProcessGroupComm {
 public:
  /// A graph can capture the collectives; see CapturedStep. Calls that wait on the host cannot be captured.
  static constexpr bool capturable = true;

  /// Performs the rendezvous with the other ranks and connects NCCL on the GPU of this rank, which becomes
  /// the current device of the calling thread. Collective. Blocks. Throws UsageError if this rank has no GPU
  /// or this program was compiled with another NCCL's header than LibTorch, and MismatchError if some ranks compute on
  /// CPUs and others do not.
  explicit NcclComm(const World& world, NcclOptions options = {})
      : NcclComm(detail::world_group("the constructor of NcclComm", world,
                                     detail::nccl_backend(world, options))) {}

  /// See ProcessGroupComm::new_group.
  [[nodiscard]] std::optional<NcclComm> new_group(const std::vector<int>& ranks) {
    if (auto group = split_group(ranks)) return NcclComm(std::move(group));
    return std::nullopt;
  }

  /// See Labelled.
  void label(std::shared_ptr<const std::string> text) { group()->label(std::move(text)); }

  /// Calls `replay()`, which replays a graph with collectives of this communicator, as one collective with
  /// the timeout of the options. Throws the communicator's first error instead if there is one.
  template <class Replay>
  void watch_replay(Replay&& replay) {
    const detail::Call call = group()->begin("replay");
    std::forward<Replay>(replay)();
    group()->hold(call, c10::make_intrusive<detail::StreamWork>(tensor_device()));
  }

 private:
  explicit NcclComm(std::shared_ptr<detail::BackendGroup> group) : ProcessGroupComm(std::move(group)) {}
};

static_assert(Communicator<NcclComm> && PointToPoint<NcclComm> && Splittable<NcclComm> &&
              DeviceCommunicator<NcclComm> && Labelled<NcclComm>);

}  // namespace lockstep::inline v0_1
