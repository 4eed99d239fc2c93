#pragma once

#if !__has_include(<nccl.h>) || !__has_include(<cuda_runtime_api.h>) || \
    !__has_include(<c10/cuda/CUDAStream.h>)
#error \
    "lockstep: NcclComm needs the headers of CUDA, of NCCL and of a LibTorch for CUDA: link lockstep::cuda, \
or leave this header out"
#endif

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/nccl_backend.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

/// Collectives of CUDA tensors over LibTorch's own NCCL backend: a ProcessGroupComm that creates its
/// ProcessGroupNCCL, and one for each sub-group. Not part of lockstep.hpp, so that CPU-only programs need no
/// CUDA headers.
///
/// Tensors may be on any GPU of this rank: ProcessGroupNCCL opens one NCCL communicator for each device, so
/// that a model on several GPUs needs one NcclComm. The tensors of one list are on one device. With
/// NcclEngine::nccl2 a tensor on another GPU than `tensor_device()` throws CommunicationError.
///
/// A thread watches the operations in flight: when another rank has failed, or the timeout has passed, it
/// calls c10d::Backend::abort(), so that a host that waits for the GPU continues; the next call or wait
/// throws the error. Results of an aborted operation are undefined.
/// Counterpart: torch.distributed.ProcessGroupNCCL.
class NcclComm : public ProcessGroupComm {
 public:
  /// A graph can capture the collectives; see CapturedStep. Calls that wait on the host cannot be captured.
  static constexpr bool capturable = true;

  /// Performs the rendezvous with the other ranks and connects NCCL on the GPU of this rank, which becomes
  /// the current device of the calling thread. Collective. Blocks. Throws UsageError if this rank has no GPU
  /// or this program was compiled with another NCCL's header than LibTorch, CommunicationError if NCCL cannot
  /// connect, and TimeoutError that names the missing ranks when the timeout expires.
  explicit NcclComm(const World& world, NcclOptions options = {})
      : NcclComm([&] {
          const detail::CallScope scope("the constructor of NcclComm");
          options = detail::checked(options);
          return std::make_shared<detail::BackendGroup>(
              world, detail::all_ranks(world.size()),
              detail::Membership::next_name(world, "comm", options.timeout),
              detail::nccl_backend(world, options));
        }()) {}

  /// See ProcessGroupComm::new_group.
  [[nodiscard]] std::optional<NcclComm> new_group(const std::vector<int>& ranks) {
    if (auto group = split_group(ranks)) return NcclComm(std::move(group));
    return std::nullopt;
  }

  /// Labels later collectives in errors, such as "bucket 2 of 5, with fc.weight", until the next call. Null
  /// removes the label.
  void label(std::shared_ptr<const std::string> text) { group().state().label(std::move(text)); }

  /// Throws UsageError for options whose collectives a graph cannot capture.
  void check_capturable() const {
    if (group().options().check_shapes)
      throw UsageError(
          "NcclComm: NcclOptions::check_shapes compares the ranks on the host, which a graph cannot capture: "
          "leave it at false");
  }
  /// Calls `replay()`, which replays a graph with collectives of this communicator, as one collective with
  /// the timeout of the options. Throws the communicator's first error instead if there is one.
  template <class Replay>
  void watch_replay(Replay&& replay) {
    const detail::Call call = group().state().begin("replay");
    std::forward<Replay>(replay)();
    group().watch(call, c10::make_intrusive<detail::StreamWork>(tensor_device()));
  }

 private:
  explicit NcclComm(std::shared_ptr<detail::BackendGroup> group) : ProcessGroupComm(std::move(group)) {}
};

static_assert(Communicator<NcclComm> && PointToPoint<NcclComm> && Splittable<NcclComm> &&
              DeviceCommunicator<NcclComm> && Labelled<NcclComm>);

}  // namespace lockstep
