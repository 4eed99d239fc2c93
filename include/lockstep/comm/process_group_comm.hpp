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
#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/world/world.hpp"

namespace c10d {
class Backend;
}
namespace lockstep::detail {

class BackendGroup;
struct TensorBundle;
struct TensorCheck;

/// The Work of ProcessGroupComm and GlooComm. On a CPU wait() and synchronize() are equivalent. On another
/// device wait() is the wait of c10d's Work, which orders the current stream after the operation. The results
/// of an exchange of bytes are on the host: its wait() is synchronize(). Not thread-safe.
class [[nodiscard]] ProcessGroupWork {
 public:
  /// Constructs a Work that is complete.
  ProcessGroupWork();
  ProcessGroupWork(std::shared_ptr<BackendGroup> group, Call call);

  ProcessGroupWork(ProcessGroupWork&&) noexcept;
  ProcessGroupWork& operator=(ProcessGroupWork&& other) noexcept;
  ~ProcessGroupWork();

  void wait();
  void synchronize();
  void synchronize(std::chrono::milliseconds timeout);

  [[nodiscard]] std::exception_ptr error() const noexcept;

  /// Adds a c10d work. This Work is complete only when all added works are.
  void add(c10::intrusive_ptr<c10d::Work> part);
  /// Adds a function that the first wait() or synchronize() runs once the Work is complete, after those that
  /// were added before it. It never runs if neither is called.
  void at_end(std::function<void()> work);
  /// Calls `function` on the backend's thread when the work that was added has completed or failed. A no-op
  /// unless exactly one was added, and for a backend whose works have no future.
  void at_completion(std::function<void()> function);
  /// States that the parts complete only when they are asked, and on the host.
  void poll_on_host() { polled_on_host_ = true; }

 private:
  [[nodiscard]] std::chrono::milliseconds timeout() const;

  void wait_until(std::chrono::steady_clock::time_point until);
  void order_stream();
  void finish();

  // Gloo drops a message whose work is destroyed, so the group keeps it.
  void keep_messages() noexcept;

  std::shared_ptr<BackendGroup> group_;
  Call call_;
  c10::SmallVector<c10::intrusive_ptr<c10d::Work>, 1> parts_;
  std::function<void()> at_end_;
  std::exception_ptr error_;
  bool polled_on_host_ = false;
};

static_assert(AsyncWork<ProcessGroupWork>);

}  // namespace lockstep::detail

namespace lockstep {

/// Collectives over a c10d::Backend of the program: ProcessGroupGloo, ProcessGroupNCCL, ProcessGroupMPI,
/// ProcessGroupUCC, or one of its own.
///
/// The program may share the backend with other code; every rank then issues the collectives of both users
/// in the same order. If the communicator holds the last reference to the backend, shutdown() destroys the
/// backend after its operations have completed. A communicator on a device calls c10d::Backend::abort() once,
/// on a thread of its own, when it is aborted, when another rank fails or when an operation times out: the
/// kernels in flight would never end. It does not use the backend afterwards.
///
/// Every rank constructs its communicators in the same order and calls the same collectives on each of them
/// in the same order. Tensors are on the device of the options and may have any strides; a non-contiguous
/// tensor is copied. Shape and dtype must be equal on all ranks. Many backends end the process or return
/// wrong values if they differ; ProcessGroupOptions::check_shapes throws a MismatchError on every rank
/// instead. Empty tensors and empty lists are allowed. A list may mix dtypes; each dtype is one buffer.
///
/// The class models every concept that the interface of c10d::Backend can serve. A backend that lacks an
/// operation throws from it, and the call throws CommunicationError that names the backend and the operation;
/// can_split() tells whether new_group() works. ProcessGroupNCCL ignores the tags of messages, so a tag other
/// than 0 throws. Bytes travel through the backend on a CPU and through the store on other devices.
/// ReduceOp::avg on a CPU is the backend's sum, divided by the number of ranks; on other devices the backend
/// computes the average.
///
/// Each call throws CommunicationError inside a rank-zero scope, after shutdown(), or for a tensor that
/// the backend does not support, and PeerError after another rank has failed. Waiting for a Work throws
/// TimeoutError, which names the late ranks, when the timeout expires. The first failure of the group is
/// sticky: later calls rethrow it. A `synchronize(d)` that times out before the group's timeout is not such
/// a failure. During stack unwinding the destructor aborts and never waits for other ranks.
///
/// Thread safety: one thread at a time may launch collectives, since their order must match the other ranks'.
/// Other threads may wait for Works. Any thread may call abort().
/// Counterpart: torch.distributed.ProcessGroup.
class ProcessGroupComm {
 public:
  using Work = detail::ProcessGroupWork;

  /// Performs the rendezvous with the other ranks. `backend` has the ranks of `world`. On a device, makes
  /// it the current device of the calling thread. Collective. Blocks. Throws UsageError for a null backend,
  /// or one whose rank or size is not the world's, and TimeoutError that names the missing ranks when the
  /// timeout expires.
  ProcessGroupComm(const World& world, c10::intrusive_ptr<c10d::Backend> backend,
                   ProcessGroupOptions options = {});

  ProcessGroupComm(ProcessGroupComm&&) noexcept;
  ProcessGroupComm& operator=(ProcessGroupComm&& other) noexcept;
  ~ProcessGroupComm();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// Returns the world rank of the group's rank `rank`; errors name ranks by it.
  [[nodiscard]] int world_rank(int rank) const;
  [[nodiscard]] const World& world() const;
  /// Returns the device of the tensors.
  [[nodiscard]] at::Device tensor_device() const;
  /// Returns whether new_group() works: the backend splits, or the options create backends.
  [[nodiscard]] bool can_split() const;

  /// Reduces `tensor` over the ranks, in place on every rank. `avg` needs a floating-point dtype. For bool,
  /// `sum` is a logical or and `product` a logical and.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum);
  /// Reduces each tensor of a list.
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum);

  /// Reduces `tensor` over the ranks, in place on `root`. Its content is undefined on the other ranks.
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum);
  /// Reduces each tensor of a list.
  Work reduce(const std::vector<at::Tensor>& list, int root = 0, ReduceOp op = ReduceOp::sum);

  /// Broadcasts `root`'s `tensor` in place. Any dtype.
  Work broadcast(const at::Tensor& tensor, int root = 0);
  /// Broadcasts each tensor of a list.
  Work broadcast(const std::vector<at::Tensor>& list, int root = 0);

  /// Gathers every rank's `input` [...] into `output` [size, ...], ordered by rank. Any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input);
  /// Gathers each tensor of a list. `outputs` and `inputs` have equal lengths.
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

  /// Reduces every rank's `input` [size, ...] and writes row r to the `output` [...] of rank r.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum);
  /// Reduces and scatters each tensor of a list. `outputs` and `inputs` have equal lengths.
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum);

  /// Sends row r of `input` [size, ...] to rank r. Row s of `output` [size, ...] comes from rank s. Any
  /// dtype.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input);
  /// Exchanges each tensor of a list. `outputs` and `inputs` have equal lengths.
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

  /// Sends `tensor` to rank `peer`, which must call recv with the same tag, shape and dtype. Once the Work is
  /// complete the tensor may be modified. A message whose Work is destroyed is still sent; its tensor is kept
  /// until shutdown. Throws CommunicationError for this rank itself or a negative tag.
  Work send(const at::Tensor& tensor, int peer, int tag = 0);
  /// Sends a list, which recv must receive as a list. One message per dtype.
  Work send(const std::vector<at::Tensor>& list, int peer, int tag = 0);
  /// Receives into `tensor`, which holds the message once the Work has been waited for.
  Work recv(const at::Tensor& tensor, int peer, int tag = 0);
  /// Receives a list that was sent as a list of the same shapes and dtypes.
  Work recv(const std::vector<at::Tensor>& list, int peer, int tag = 0);

  /// Returns every rank's bytes, ordered by rank. Collective. Blocks.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes);
  /// Gathers every rank's bytes into `all` without blocking. `all` holds them once the Work has been waited
  /// for, and must outlive that wait.
  Work all_gather_bytes_async(std::vector<std::string>& all, std::string bytes);

  /// Returns `root`'s bytes. Collective. Blocks.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0);
  /// Broadcasts `root`'s `bytes` in place without blocking. `bytes` is valid once the Work has been waited
  /// for, and must outlive that wait.
  Work broadcast_bytes_async(std::string& bytes, int root = 0);

  /// Blocks until every rank has called it. Throws TimeoutError that names the missing ranks when the timeout
  /// expires.
  void barrier();
  /// Launches a barrier without blocking. The Work completes when every rank has called it.
  Work barrier_async();

  /// Creates a group of some of this group's ranks, in ascending order. Collective over this group: every
  /// rank passes the same list. Returns std::nullopt on ranks outside the list. Throws CommunicationError for
  /// a list that does not ascend or names a rank outside the group, and unless can_split().
  /// Counterpart: torch.distributed.new_group.
  [[nodiscard]] std::optional<ProcessGroupComm> new_group(const std::vector<int>& ranks);

  /// Throws the first error of the group that this rank knows of, if there is one. Never blocks.
  void check_error();

  /// Aborts the group: every wait of the other ranks ends with a PeerError that contains `reason`, and every
  /// later call on this rank throws. Does not wait for other ranks; takes at most 1 s. Thread-safe.
  void abort(const std::string& reason);

  /// Leaves the group after the Works in flight have completed. Blocks. Throws TimeoutError when the timeout
  /// expires. A no-op after a failure.
  void shutdown();

 protected:
  /// For a derived communicator, which makes the group.
  explicit ProcessGroupComm(std::shared_ptr<detail::BackendGroup> group);

  /// Returns the group of a sub-communicator, null on ranks outside the list. See new_group.
  [[nodiscard]] std::shared_ptr<detail::BackendGroup> split_group(const std::vector<int>& ranks);

  /// Returns the group. Throws UsageError if this communicator was moved from.
  [[nodiscard]] detail::BackendGroup& group() const;

 private:
  [[nodiscard]] const detail::TensorCheck& check() const;

  template <class Tensors>
  Work begin(const char* name, std::optional<ReduceOp> op, std::optional<int> root, const Tensors& tensors);

  Work begin_message(const char* name, const std::vector<at::Tensor>& list, int peer, int tag);

  // Adds a part to the Work. If the result is `wanted`, divides it and copies it from the bundle's buffer to
  // its tensors.
  void add(Work& work, c10::intrusive_ptr<c10d::Work> part, detail::TensorBundle bundle, bool wanted = true,
           int divisor = 1);
  // Adds a part to the Work, and a function that completes its results.
  template <class Finish>
  void add_with(Work& work, c10::intrusive_ptr<c10d::Work> part, Finish finish);
  void reduce_bundle(Work& work, detail::TensorBundle bundle, ReduceOp op);
  [[nodiscard]] int divisor(ReduceOp op) const;

  template <class Exchange>
  void prepare(const detail::Call& call, Exchange& exchange) const;
  template <class Exchange>
  void exchange_bytes_now(const detail::Call& call, Exchange& exchange);
  template <class Exchange, class Deliver>
  Work exchange_bytes(const detail::Call& call, const std::shared_ptr<Exchange>& exchange, Deliver deliver);
  Work exchange_in_store(const detail::Call& call, std::vector<int> from, const std::string& own,
                         std::function<void(std::vector<std::string>)> deliver);

  std::shared_ptr<detail::BackendGroup> group_;
  int exceptions_ = std::uncaught_exceptions();
};

static_assert(Reducing<ProcessGroupComm> && Gathering<ProcessGroupComm> && PointToPoint<ProcessGroupComm> &&
              Splittable<ProcessGroupComm> && DeviceCommunicator<ProcessGroupComm>);

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/process_group_comm-inl.hpp"
#endif
