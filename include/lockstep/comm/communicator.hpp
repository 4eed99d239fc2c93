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

/// The handle of an asynchronous collective, as a communicator returns it.
///
/// 1. It is move-only and owns the tensors that take part until it is destroyed or waited for.
/// 2. `wait()` makes the results visible to whatever the caller issues next here: on a CPU it blocks
///    until they are there (under the communicator's timeout), on a GPU it makes the current stream wait,
///    without blocking the host.
/// 3. `synchronize()` blocks this thread until the collective is complete, `synchronize(d)` at most `d`. It
///    throws TimeoutError naming the collective and the ranks that are late, PeerError where another rank
///    failed.
/// 4. `error()` never blocks: null while it runs or where it succeeded.
/// 5. Destroying it without waiting neither blocks nor throws; the collective goes on.
template <class W>
concept AsyncWork = std::movable<W> && !std::copyable<W> &&
                    requires(W work, const W done, std::chrono::milliseconds timeout) {
  work.wait();
  work.synchronize();
  work.synchronize(timeout);
  { done.error() } -> std::same_as<std::exception_ptr>;
};

/// How all_reduce, reduce and reduce_scatter combine the ranks' values, element by element.
enum class ReduceOp { sum, average, min, max, product };

/// A group of ranks that can meet.
///
/// 1. `rank()` and `size()` are those of the group; `world()` is the World it was made from.
/// 2. Every rank of the group calls the same collectives in the same order. Inside a rank-zero scope each of
///    them throws CommunicationError at once.
/// 3. `barrier()` blocks until every rank has come, and names those that have not when the timeout expires;
///    of `barrier_async()` the Work does.
/// 4. `abort(reason)` never blocks: what is in flight ends with an error here, and the peers are told the
///    reason. Errors are sticky: every later call rethrows the first.
/// 5. `shutdown()` ends the group in good order; the destructor calls it unless an exception is in flight,
///    and then aborts instead, so that no destructor waits for a timeout.
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

/// A communicator that reduces. Tensors are dense, contiguous and of equal shape and dtype on every rank;
/// results replace the input. A list is one operation (coalesced), in the list's order; where outputs stand
/// beside inputs, there are as many of them.
template <class C>
concept Reducing = Communicator<C> &&
    requires(C& comm, at::Tensor tensor, std::vector<at::Tensor> list, ReduceOp op, int root) {
  { comm.all_reduce(tensor, op) } -> std::same_as<typename C::Work>;
  { comm.all_reduce(list, op) } -> std::same_as<typename C::Work>;
  { comm.reduce(tensor, root, op) } -> std::same_as<typename C::Work>;
  { comm.reduce(list, root, op) } -> std::same_as<typename C::Work>;
  { comm.broadcast(tensor, root) } -> std::same_as<typename C::Work>;
  { comm.broadcast(list, root) } -> std::same_as<typename C::Work>;
  // output: [...], input: [size, ...]
  { comm.reduce_scatter(tensor, tensor, op) } -> std::same_as<typename C::Work>;
  { comm.reduce_scatter(list, list, op) } -> std::same_as<typename C::Work>;
};

/// A communicator that gathers: tensors (output [size, ...] of input [...], or both [size, ...] for
/// all_to_all; lists as in Reducing) and objects, which are bytes of any length, different on each rank. The
/// plain calls for objects block and return them; those that end in `_async` put them, when their Work has
/// been waited for, where the caller says.
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

/// A communicator that sends from one rank to another. Messages between two ranks with one tag arrive in
/// order; a list that was sent is received as a list.
template <class C>
concept PointToPoint = Communicator<C> &&
    requires(C& comm, at::Tensor tensor, std::vector<at::Tensor> list, int peer, int tag) {
  { comm.send(tensor, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.send(list, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.recv(tensor, peer, tag) } -> std::same_as<typename C::Work>;
  { comm.recv(list, peer, tag) } -> std::same_as<typename C::Work>;
};

/// A communicator that forms sub-groups. `new_group(ranks)` is collective over the whole group: every rank
/// calls it with the same list (ranks of this group, ascending); those outside the list get nothing.
template <class C>
concept Splittable = Communicator<C> && requires(C& comm, std::vector<int> ranks) {
  { comm.new_group(ranks) } -> std::same_as<std::optional<C>>;
};

/// A communicator whose errors come later than its calls, and that can be told what it sends, such as
/// "bucket 2 of 5, with parameter 3 'fc.weight'": `label(text)` names the collectives that follow, until it
/// is changed; null for nothing.
template <class C>
concept Labelled = Communicator<C> && requires(C& comm, std::shared_ptr<const std::string> text) {
  comm.label(text);
};

/// A communicator that has memory from which its collectives go faster: `empty_buffer(length, like)` gives a
/// tensor [length], uninitialised, with the dtype and the device of `like`. It may outlive the communicator.
/// What one rank sends from such a buffer, every rank does, at the same place in its own.
template <class C>
concept Buffered = Communicator<C> && requires(C& comm, std::int64_t length, const at::Tensor& like) {
  { comm.empty_buffer(length, like) } -> std::same_as<at::Tensor>;
};

}  // namespace lockstep

namespace lockstep::detail {
/// How errors call the ranks of a group: by their ranks in the world, where the communicator has a
/// `world_rank(rank)`, else as they are.
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
