#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/world/world.hpp"

namespace lockstep {

/// The handle of an asynchronous collective. Move-only.
///
/// 1. A Work owns the tensors of its collective until it is destroyed or `wait()` returns.
/// 2. `wait()` makes the results visible to all later work of the caller. On a CPU it blocks until the
///    collective completes, at most the communicator's timeout. On a GPU it is stream-ordered: the current
///    stream waits, the host does not.
/// 3. `synchronize()` blocks the calling thread until the collective completes; `synchronize(d)` blocks at
///    most `d`. Both, and a `wait()` that blocks, throw TimeoutError, which names the collective and the late
///    ranks, and PeerError if another rank failed.
/// 4. `error()` never blocks. It returns null while the collective is in flight and after it succeeded.
/// 5. The destructor neither blocks nor throws. A collective without its Work still runs to completion.
///
/// Counterpart: torch.distributed.Work.
template <class W>
concept AsyncWork = std::movable<W> && !std::copyable<W> &&
                    requires(W work, const W done, std::chrono::milliseconds timeout) {
  work.wait();
  work.synchronize();
  work.synchronize(timeout);
  { done.error() } -> std::same_as<std::exception_ptr>;
};

/// The element-wise reduction of all_reduce, reduce and reduce_scatter.
/// Counterpart: torch.distributed.ReduceOp.
enum class ReduceOp { sum, avg, min, max, product };

/// A process group: a fixed set of ranks that call collectives together.
///
/// 1. `rank()` and `size()` are relative to the group. `world()` is the World that the group was made from.
/// 2. Every rank of the group calls the same collectives in the same order. Inside a rank-zero scope each
///    collective throws CommunicationError at once.
/// 3. `barrier()` blocks until every rank has called it. When the timeout expires it throws TimeoutError,
///    which names the missing ranks. The Work of `barrier_async()` does the same.
/// 4. `abort(reason)` never waits for another rank. It fails the collectives in flight on this rank and
///    publishes `reason` to the other ranks, which takes at most 1 s. Errors are sticky: every later call
///    rethrows the first one.
/// 5. `shutdown()` leaves the group after its collectives completed. The destructor calls it; during stack
///    unwinding the destructor aborts instead, so that it never waits for a timeout.
template <class C>
concept Communicator = std::movable<C> && AsyncWork<typename C::Work> &&
    requires(C& comm, const C& group, const std::string& reason) {
  { group.rank() } -> std::same_as<int>;
  { group.size() } -> std::same_as<int>;
  { group.world() } -> std::same_as<const World&>;
  comm.barrier();
  { comm.barrier_async() } -> std::same_as<typename C::Work>;
  comm.abort(reason);
  comm.shutdown();
};

/// A communicator with reductions and broadcasts. Tensors are dense, contiguous and of equal shape and dtype
/// on every rank. all_reduce, broadcast and, on `root`, reduce write the result to their tensor;
/// reduce_scatter writes an output [...] from an input [size, ...]. A list is one coalesced operation, in the
/// order of the list. A list of outputs is as long as the list of inputs.
template <class C>
concept Reducing = Communicator<C> &&
    requires(C& comm, at::Tensor tensor, std::vector<at::Tensor> list, ReduceOp op, int root) {
  { comm.all_reduce(tensor, op) } -> std::same_as<typename C::Work>;
  { comm.all_reduce(list, op) } -> std::same_as<typename C::Work>;
  { comm.reduce(tensor, root, op) } -> std::same_as<typename C::Work>;
  { comm.reduce(list, root, op) } -> std::same_as<typename C::Work>;
  { comm.broadcast(tensor, root) } -> std::same_as<typename C::Work>;
  { comm.broadcast(list, root) } -> std::same_as<typename C::Work>;
  { comm.reduce_scatter(tensor, tensor, op) } -> std::same_as<typename C::Work>;
  { comm.reduce_scatter(list, list, op) } -> std::same_as<typename C::Work>;
};

/// A communicator that gathers tensors and bytes. all_gather writes an output [size, ...] from inputs [...];
/// input and output of all_to_all are both [size, ...]. Lists follow the rules of Reducing. Bytes may differ
/// in length on each rank. The plain byte calls block and return the result. The `_async` byte calls write
/// the result to the caller's object, where it is valid once their Work has been waited for.
/// Counterparts of the byte calls: torch.distributed.all_gather_object and broadcast_object_list.
template <class C>
concept Gathering = Communicator<C> && requires(C& comm, at::Tensor tensor, std::vector<at::Tensor> list,
                                                std::string bytes, std::vector<std::string> all, int root) {
  { comm.all_gather(tensor, tensor) } -> std::same_as<typename C::Work>;
  { comm.all_gather(list, list) } -> std::same_as<typename C::Work>;
  { comm.all_to_all(tensor, tensor) } -> std::same_as<typename C::Work>;
  { comm.all_to_all(list, list) } -> std::same_as<typename C::Work>;
  { comm.all_gather_bytes(bytes) } -> std::same_as<std::vector<std::string>>;
  { comm.all_gather_bytes_async(all, bytes) } -> std::same_as<typename C::Work>;
  { comm.broadcast_bytes(bytes, root) } -> std::same_as<std::string>;
  { comm.broadcast_bytes_async(bytes, root) } -> std::same_as<typename C::Work>;
};

/// A communicator with point-to-point messages. Messages between two ranks with equal tags arrive in order. A
/// list that is sent as one message is received as one list.
/// Counterpart: torch.distributed.isend and irecv.
template <class C>
concept PointToPoint = Communicator<C> &&
    requires(C& comm, at::Tensor tensor, std::vector<at::Tensor> list, int peer, int tag) {
  { comm.send(tensor, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.send(list, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.recv(tensor, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.recv(list, peer, tag) } -> std::same_as<typename C::Work>;
};

/// A communicator that creates sub-groups. `new_group(ranks)` is collective over the whole group: every rank
/// passes the same list, ranks of this group in ascending order. It returns std::nullopt on ranks outside the
/// list.
/// Counterpart: torch.distributed.new_group.
template <class C>
concept Splittable = Communicator<C> && requires(C& comm, std::vector<int> ranks) {
  { comm.new_group(ranks) } -> std::same_as<std::optional<C>>;
};

/// A communicator that names its collectives in asynchronous errors. `label(text)` names all later
/// collectives, such as "bucket 2 of 5, with parameter 3 'fc.weight'", until the next call. A null pointer
/// removes the label.
template <class C>
concept Labelled = Communicator<C> && requires(C& comm, std::shared_ptr<const std::string> text) {
  comm.label(text);
};

}  // namespace lockstep

namespace lockstep::detail {
/// Maps ranks of a group to the ranks that errors name: ranks of the world if the communicator has
/// `world_rank(rank)`, ranks of the group otherwise.
class RankNames {
 public:
  RankNames() = default;
  template <class C>
  explicit RankNames(const C& group) {
    if constexpr (requires { group.world_rank(0); })
      for (int rank = 0; rank < group.size(); ++rank) names_.push_back(group.world_rank(rank));
  }
  int operator()(std::size_t rank) const { return names_.empty() ? static_cast<int>(rank) : names_.at(rank); }

 private:
  std::vector<int> names_;
};
}  // namespace lockstep::detail

namespace lockstep {

/// A communicator whose tensors are on one device, one GPU per rank. `tensor_device()` returns the device,
/// which never changes. The constructor makes it the current device of the calling thread.
template <class C>
concept DeviceCommunicator = Communicator<C> && requires(const C& comm) {
  { comm.tensor_device() } -> std::convertible_to<at::Device>;
};

/// Returns the device of the communicator's tensors: `tensor_device()` of a DeviceCommunicator, the CPU
/// otherwise.
template <class C>
at::Device comm_device([[maybe_unused]] const C& comm) {
  if constexpr (DeviceCommunicator<C>)
    return comm.tensor_device();
  else
    return at::kCPU;
}

}  // namespace lockstep
