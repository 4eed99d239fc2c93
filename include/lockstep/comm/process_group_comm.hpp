#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

class BackendGroup;

/// The Work of ProcessGroupComm and GlooComm. On a CPU wait() and synchronize() are equivalent. On another device
/// wait() is the wait of c10d's Work, which orders the current stream after the operation. Not thread-safe.
class [[nodiscard]] ProcessGroupWork {
 public:
  ProcessGroupWork() = default;
  ProcessGroupWork(std::shared_ptr<BackendGroup> group, Call call)
      : group_(std::move(group)), call_(std::move(call)) {}
  ProcessGroupWork(ProcessGroupWork&&) noexcept = default;
  ProcessGroupWork& operator=(ProcessGroupWork&&) noexcept = default;

  void wait();
  void synchronize(std::chrono::milliseconds timeout = std::chrono::milliseconds::max());

  [[nodiscard]] std::exception_ptr error() const noexcept {
    if (error_) return error_;
    for (const auto& part : parts_)
      if (auto error = part->exception()) return error;
    return nullptr;
  }

  void add(c10::intrusive_ptr<c10d::Work> part);
  /// Adds a function that the first wait() or synchronize() runs once the Work is complete, after those that
  /// were added before it. It never runs if neither is called.
  void at_end(std::function<void()> work) { at_end_.push_back(std::move(work)); }
  /// Calls `function` on the backend's thread when the work that was added has completed or failed. A no-op
  /// unless exactly one was added, and for a backend whose works have no future.
  void at_completion(std::function<void()> function);

 private:
  void finish() {
    for (const auto& work : std::exchange(at_end_, {})) work();
  }

  std::shared_ptr<BackendGroup> group_;
  Call call_;
  c10::SmallVector<c10::intrusive_ptr<c10d::Work>, 1> parts_;
  c10::SmallVector<std::function<void()>, 1> at_end_;
  std::exception_ptr error_;
};

static_assert(AsyncWork<ProcessGroupWork>);

}  // namespace detail

/// Collectives over a c10d::Backend of the program: ProcessGroupGloo, ProcessGroupNCCL, ProcessGroupMPI,
/// ProcessGroupUCC, or one of its own.
///
/// The program may share the backend with other code; every rank then issues the collectives of both users
/// in the same order. If the communicator holds the last reference to the backend, shutdown() destroys the
/// backend after its operations have completed. The destructor leaves that to a thread, for which it waits at most 0.5 s:
/// without `launch`, which awaits such threads, wait for what is in flight, or call shutdown(), before the process ends. A communicator on a device calls c10d::Backend::abort() once,
/// on a separate thread, when it is aborted, when another rank fails or when an operation times out: the
/// kernels in flight would never end. On a CPU it calls abort() only on backends that `make_backend` has made, where
/// they have one. It does not use the backend afterwards.
///
/// Tensors are on the device of the options and may have any strides; a non-contiguous tensor is copied. If
/// the calls of the ranks differ, in their shapes or dtypes for instance, each throws MismatchError within
/// 2 s or 64 collectives, whichever is later; until then the backend may return wrong values. Empty tensors
/// and empty lists are allowed. A list may mix dtypes; each dtype is one buffer.
///
/// A backend that lacks an operation throws from it, and the call throws CommunicationError that names the
/// backend and the operation. ProcessGroupNCCL ignores the tags of messages, so a tag other than 0 throws.
/// Bytes travel through the backend, on a device in pieces of its memory. ReduceOp::avg on a CPU is the
/// backend's sum, divided by the number of ranks; on other devices the backend computes the average.
///
/// Each call throws CommunicationError inside a rank-zero scope, after shutdown(), or for a tensor that the
/// backend does not support, and PeerError after another rank has failed. The first failure of the group is
/// sticky; a `synchronize(d)` that times out before the group's timeout is not such a failure.
///
/// Thread safety: one thread at a time may launch collectives, since their order must match the other ranks'.
/// Other threads may wait for Works. Any thread may call abort().
/// Counterpart: torch.distributed.ProcessGroup.
class ProcessGroupComm {
 public:
  using Work = detail::ProcessGroupWork;

  /// Performs the rendezvous with the other ranks. On a device, makes it the current device of the calling
  /// thread. Collective. Blocks. Throws UsageError for a null backend, or one whose rank or size is not the world's,
  /// MismatchError if some ranks compute on CPUs and others do not, and TimeoutError that names the missing ranks.
  ProcessGroupComm(const World& world, c10::intrusive_ptr<c10d::Backend> backend,
                   ProcessGroupOptions options = {});

  ProcessGroupComm(ProcessGroupComm&&) noexcept = default;
  ProcessGroupComm& operator=(ProcessGroupComm&& other) noexcept {
    ProcessGroupComm taken(std::move(other));  // leaves the group that this one had
    std::swap(group_, taken.group_);
    std::swap(exceptions_, taken.exceptions_);
    return *this;
  }
  ~ProcessGroupComm() { leave(); }

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] int world_rank(int rank) const;
  [[nodiscard]] const World& world() const;
  [[nodiscard]] at::Device tensor_device() const;
  /// Returns whether new_group() works: the backend splits, or the options create backends.
  [[nodiscard]] bool can_split() const;

  // Each call takes one tensor or a list. Lists of outputs and of inputs have equal lengths.

  /// Reduces each tensor over the ranks, in place on every rank. `avg` needs a floating-point dtype. For
  /// bool, `sum` is a logical or and `product` a logical and.
  Work all_reduce(at::TensorList tensors, ReduceOp op = ReduceOp::sum);

  /// Reduces each tensor over the ranks, in place on `root`. Its content is undefined on the other ranks.
  Work reduce(at::TensorList tensors, int root = 0, ReduceOp op = ReduceOp::sum);

  /// Broadcasts `root`'s tensors in place. Any dtype.
  Work broadcast(at::TensorList tensors, int root = 0);

  /// Gathers every rank's input [...] into the output [size, ...], ordered by rank. Any dtype.
  Work all_gather(at::TensorList outputs, at::TensorList inputs);

  /// Reduces every rank's input [size, ...] and writes row r to the output [...] of rank r.
  Work reduce_scatter(at::TensorList outputs, at::TensorList inputs, ReduceOp op = ReduceOp::sum);

  /// Sends row r of the input [size, ...] to rank r. Row s of the output [size, ...] comes from rank s. Any dtype.
  Work all_to_all(at::TensorList outputs, at::TensorList inputs);

  /// Sends the tensors to rank `peer`, which must call recv with the same tag, shapes and dtypes. Once the
  /// Work is complete the tensors may be modified. A message whose Work is destroyed is still sent; its
  /// tensors are kept until shutdown. Throws CommunicationError for this rank itself or a negative tag.
  Work send(at::TensorList tensors, int peer, int tag = 0) { return message(true, tensors, peer, tag); }
  /// Receives into the tensors, which hold the message once the Work has been waited for.
  Work recv(at::TensorList tensors, int peer, int tag = 0) { return message(false, tensors, peer, tag); }

  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes);
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0);
  /// Blocks until every rank has called it.
  void barrier() { barrier_async().synchronize(); }
  Work barrier_async();

  /// See Splittable. Throws CommunicationError for a list that does not ascend or names a rank outside the
  /// group, and unless can_split().
  [[nodiscard]] std::optional<ProcessGroupComm> new_group(const std::vector<int>& ranks) {
    if (auto group = split_group(ranks)) return ProcessGroupComm(std::move(group));
    return std::nullopt;
  }

  void check_error();

  /// See Communicator. Thread-safe.
  void abort(const std::string& reason);

  /// See Communicator. Where this process hosts the store, blocks until every rank has left the group or ended, and throws
  /// MismatchError if their calls have differed. Throws TimeoutError when the timeout expires. A no-op after a failure.
  void shutdown();

 protected:
  explicit ProcessGroupComm(std::shared_ptr<detail::BackendGroup> group) : group_(std::move(group)) {}

  /// Returns the group of a sub-communicator, null on ranks outside the list.
  [[nodiscard]] std::shared_ptr<detail::BackendGroup> split_group(const std::vector<int>& ranks);

  /// Returns the group. Throws UsageError if this communicator was moved from.
  [[nodiscard]] const std::shared_ptr<detail::BackendGroup>& group() const;

 private:
  // Ends the use of the group, if there is one, without waiting for another rank: aborts it if it has failed, or during the
  // unwinding of an exception that was thrown after the construction.
  void leave() noexcept;

  Work message(bool sends, at::TensorList tensors, int peer, int tag);

  std::shared_ptr<detail::BackendGroup> group_;
  int exceptions_ = std::uncaught_exceptions();
};

static_assert(PointToPoint<ProcessGroupComm> && Splittable<ProcessGroupComm> &&
              DeviceCommunicator<ProcessGroupComm>);

namespace detail {

/// The base of `Comm`, a ProcessGroupComm on the host that makes its backends itself.
template <class Comm>
class HostComm : public ProcessGroupComm {
 public:
  /// See ProcessGroupComm::new_group.
  [[nodiscard]] std::optional<Comm> new_group(const std::vector<int>& ranks) {
    if (auto group = split_group(ranks)) return Comm(std::move(group));
    return std::nullopt;
  }

  // Not a DeviceCommunicator: its tensors are on the host.
  [[nodiscard]] at::Device tensor_device() const = delete;

 protected:
  explicit HostComm(std::shared_ptr<BackendGroup> group) : ProcessGroupComm(std::move(group)) {}
};

}  // namespace detail

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#endif
