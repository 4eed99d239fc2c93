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

namespace lockstep::inline v0_1 {

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

/// A process group: a fixed set of ranks that call collectives together. The members are all that lockstep
/// asks of a communicator of your own.
///
/// 1. `rank()` and `size()` are relative to the group. `world()` is the World that the group was made from.
/// 2. Every rank of the group calls the same collectives in the same order. Inside a rank-zero scope each
///    collective throws CommunicationError at once.
/// 3. Tensors come as a list, which is one coalesced operation in the order of the list; a single tensor
///    converts to a list of one. The list is valid during the call only: a collective in flight keeps the
///    tensors. They are dense and of equal shape and dtype on every rank.
/// 4. `all_reduce` and `broadcast` write the result to their tensors. Only `sum` and `max` are required of
///    `all_reduce`. `all_gather` writes each output [size, ...] from the inputs [...] of all ranks, by rank;
///    the lists have equal lengths.
/// 5. `all_gather_bytes` returns every rank's bytes, by rank, and `broadcast_bytes` those of `root`. Both
///    block. Bytes may differ in length on each rank.
/// 6. `abort(reason)` never waits for another rank. It fails the collectives in flight on this rank and
///    publishes `reason` to the other ranks, which takes at most 1 s. Errors are sticky: every later call
///    rethrows the first one.
/// 7. `shutdown()` leaves the group after its collectives completed. The destructor leaves it, too, and waits for no
///    other rank; while an exception unwinds the stack it aborts.
/// 8. Optional: `world_rank(rank)` returns the rank that errors name, `rank` itself by default.
///    `check_error()` throws the first error of an operation that only a stream waits for.
///
/// Counterparts of the byte calls: torch.distributed.all_gather_object and broadcast_object_list.
template <class C>
concept Communicator = std::movable<C> && AsyncWork<typename C::Work> &&
    requires(C& comm, const C& group, at::TensorList tensors, ReduceOp op, int root,
             const std::string& text) {
  { group.rank() } -> std::same_as<int>;
  { group.size() } -> std::same_as<int>;
  { group.world() } -> std::same_as<const World&>;
  { comm.all_reduce(tensors, op) } -> std::same_as<typename C::Work>;
  { comm.broadcast(tensors, root) } -> std::same_as<typename C::Work>;
  { comm.all_gather(tensors, tensors) } -> std::same_as<typename C::Work>;
  { comm.all_gather_bytes(text) } -> std::same_as<std::vector<std::string>>;
  { comm.broadcast_bytes(text, root) } -> std::same_as<std::string>;
  comm.abort(text);
  comm.shutdown();
};

/// A communicator with point-to-point messages. Messages between two ranks with equal tags arrive in order.
/// What is sent as one list is received as one list.
/// Counterpart: torch.distributed.isend and irecv.
template <class C>
concept PointToPoint = Communicator<C> && requires(C& comm, at::TensorList tensors, int peer, int tag) {
  { comm.send(tensors, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.recv(tensors, peer, tag) } -> std::same_as<typename C::Work>;
};

/// A communicator that creates sub-groups. `new_group(ranks)` is collective over the whole group: every rank
/// passes the same ascending list. It returns std::nullopt on ranks outside the list.
/// Counterpart: torch.distributed.new_group.
template <class C>
concept Splittable = Communicator<C> && requires(C& comm, std::vector<int> ranks) {
  { comm.new_group(ranks) } -> std::same_as<std::optional<C>>;
};

/// A communicator that names its collectives in asynchronous errors. `label(text)` names all later ones, such
/// as "bucket 2 of 5, with parameter 3 'fc.weight'", until the next call; null removes the label. It is equal
/// on all ranks: calls with other labels are other calls.
template <class C>
concept Labelled = Communicator<C> && requires(C& comm, std::shared_ptr<const std::string> text) {
  comm.label(text);
};

namespace detail {
/// Maps ranks of a group to the ranks that errors name: ranks of the world if the communicator has
/// `world_rank(rank)`, ranks of the group otherwise.
struct RankNames {
  template <class C>
  explicit RankNames(const C& group) {
    for (int rank = 0; rank < group.size(); ++rank)
      if constexpr (requires { group.world_rank(0); })
        names.push_back(group.world_rank(rank));
      else
        names.push_back(rank);
  }
  int operator()(std::size_t rank) const { return names.at(rank); }

  std::vector<int> names;
};
}  // namespace detail

/// A communicator whose tensors are on one device, which never changes.
template <class C>
concept DeviceCommunicator = Communicator<C> && requires(const C& comm) {
  { comm.tensor_device() } -> std::convertible_to<at::Device>;
};

/// Returns `tensor_device()` of a DeviceCommunicator, the CPU otherwise.
template <class C>
at::Device comm_device([[maybe_unused]] const C& comm) {
  if constexpr (DeviceCommunicator<C>)
    return comm.tensor_device();
  else
    return at::kCPU;
}

}  // namespace lockstep::inline v0_1
