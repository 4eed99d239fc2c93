#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// The result of an NCCL call, with NCCL's own numbers.
enum class NcclResult : int {
  success = 0,
  cuda_error = 1,  // a CUDA call inside NCCL failed, for example out of memory
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,  // a peer or its network is gone
  in_progress = 7,
};

/// The CUDA and NCCL interface that BasicNcclComm uses: a GPU of this process, as a cheap value. CudaDevice
/// models it for real hardware. Another model, such as a test's, needs no CUDA.
///
/// Handles. `Comm`, `Stream` and `Event` are cheap to copy, and null when value-initialised. An Event must
/// not be destroyed while a stream still waits for it.
///
/// Device. `D::open(world, index)` chooses the GPU of this rank (`index`, or by the local rank if it is
/// unset), makes it the current device before any other use of CUDA, and throws UsageError if there is
/// none. `enter_thread()` makes it the current device of a thread that the communicator starts. `name()` is
/// for messages. `identity()` is a text without blanks, unique to the device within a job. `shares_devices()`
/// returns whether the user allows two ranks on one device. `version()` is NCCL's version in NCCL's encoding
/// (22706 is 2.27.6).
///
/// Errors. A function that returns no NcclResult throws CUDA errors as a std::exception, whose text states
/// what failed and why. The exception knows neither ranks nor collectives and is not a lockstep::Error.
///
/// Order. The work on one stream runs in the order of the calls, and never before its call. Only `record` and
/// `wait` order work across streams: work issued to `stream` after `wait(stream, event)` runs after all work
/// that was on the stream of the latest `record(event, stream)`. Neither blocks the host. `done(event)` never
/// blocks: it returns whether all work before the latest record has completed, and throws if the device has
/// failed. `current_stream()` is the stream on which this thread's tensor operators run.
///
/// Captures. `capturing(stream)` returns whether a graph capture is active on the stream. Work on a capturing
/// stream is recorded and does not run. A stream that waits for an event of the capture joins the capture,
/// and memory allocated for it from then on belongs to the graph. `done` must not be called on a captured
/// event, which may be recorded again afterwards. Synchronizing, uploading and downloading are not allowed in
/// a capture.
///
/// Memory. `holds(tensor)` returns whether the tensor lives on this device. Once the last reference to a
/// tensor is gone, later work on the stream that it was allocated for (`allocate(stream, ...)`, or the
/// current stream for operators) may reuse its memory at once, and no other work may. A caller that issues
/// work on another stream either keeps the tensor until that work has completed, or orders the work before
/// later work on the tensor's own stream. `copy(stream, to, from)` issues a copy. `upload` and `download`
/// move small tensors from and to the host: the result of `upload` is visible to the current stream, and
/// `download` is ordered after all prior work on the current stream.
///
/// Buffers. `has_buffers()` returns whether this NCCL supports the rest of this paragraph.
/// `allocate_buffer(bytes)` allocates memory with NCCL, and throws if none is left. `free_buffer` frees it at
/// once: it must not be in use, nor registered with a communicator. `register_buffer(comm, memory, bytes,
/// registration)` lets the communicator send and receive in that memory without internal copies, until
/// `deregister_buffer(comm, registration)`. Both return at once. A collective uses registered memory on every
/// rank or on none, and no collective in flight may use memory that is deregistered. `destroy` requires that
/// nothing is registered; `abort` ends the registrations, after the collectives in flight.
///
/// NCCL. Communicators are non-blocking: `init`, `split`, `finalize`, `group_end` and the collectives may
/// return in_progress. Until `state` then returns success, only `state` and `abort` may be called on the
/// communicator, and the issued work is not on the stream yet. `last_error` is NCCL's description of the last
/// failure. Every rank calls the collectives in the same order, between `group_start` and `group_end`.
/// `abort` ends all work in flight immediately, and destroys the handle; `destroy` destroys it once
/// `finalize` has succeeded. One thread at a time calls on a communicator, except for `abort`. `init` and
/// `split` may write to `made` later, from a thread of NCCL's, until `state` of the communicator they were
/// called on returns success or its abort has returned. `made` must live until then, so it must not be a
/// local variable of a function that can throw. `split` requires that no work is outstanding: all issued work
/// has completed.
template <class D>
concept NcclDevice = std::copyable<D> && std::regular<typename D::Comm> && std::regular<typename D::Stream> &&
    std::regular<typename D::Event> &&
    requires(const D device, const World& world, typename D::Comm comm, typename D::Comm& made,
             typename D::Stream stream, typename D::Event event, const at::Tensor& tensor,
             at::IntArrayRef sizes, const std::string& text, const void* from, void* to, std::size_t count,
             at::ScalarType type, ReduceOp op, int number, void*& registration) {
  { D::open(world, number) } -> std::same_as<D>;
  device.enter_thread();
  { device.name() } -> std::same_as<std::string>;
  { device.identity() } -> std::same_as<std::string>;
  { device.version() } -> std::same_as<int>;
  { device.shares_devices() } -> std::same_as<bool>;

  { device.make_stream() } -> std::same_as<typename D::Stream>;
  device.destroy_stream(stream);
  { device.current_stream() } -> std::same_as<typename D::Stream>;
  { device.capturing(stream) } -> std::same_as<bool>;
  { device.make_event() } -> std::same_as<typename D::Event>;
  device.destroy_event(event);
  device.record(event, stream);
  device.wait(stream, event);
  { device.done(event) } -> std::same_as<bool>;

  { device.holds(tensor) } -> std::same_as<bool>;
  { device.allocate(stream, sizes, type) } -> std::same_as<at::Tensor>;
  device.copy(stream, tensor, tensor);
  { device.upload(tensor) } -> std::same_as<at::Tensor>;
  { device.download(tensor) } -> std::same_as<at::Tensor>;

  { device.has_buffers() } -> std::same_as<bool>;
  { device.allocate_buffer(count) } -> std::same_as<void*>;
  device.free_buffer(to);
  { device.register_buffer(comm, to, count, registration) } -> std::same_as<NcclResult>;
  { device.deregister_buffer(comm, to) } -> std::same_as<NcclResult>;

  { device.make_id() } -> std::same_as<std::string>;
  { device.init(made, number, text, number) } -> std::same_as<NcclResult>;   // size, id, rank
  { device.split(made, comm, number, number) } -> std::same_as<NcclResult>;  // colour, key
  { device.state(comm) } -> std::same_as<NcclResult>;
  { device.last_error(comm) } -> std::same_as<std::string>;
  { device.finalize(comm) } -> std::same_as<NcclResult>;
  device.destroy(comm);
  device.abort(comm);
  { device.group_start() } -> std::same_as<NcclResult>;
  { device.group_end() } -> std::same_as<NcclResult>;
  // The dtype is_reducible() and not bool. `count` is the number of elements that this rank sends, or that it
  // receives for reduce_scatter. The last number is the root or the peer.
  { device.all_reduce(comm, stream, from, to, count, type, op) } -> std::same_as<NcclResult>;
  { device.reduce(comm, stream, from, to, count, type, op, number) } -> std::same_as<NcclResult>;
  { device.reduce_scatter(comm, stream, from, to, count, type, op) } -> std::same_as<NcclResult>;
  { device.broadcast(comm, stream, from, to, count, type, number) } -> std::same_as<NcclResult>;
  { device.all_gather(comm, stream, from, to, count, type) } -> std::same_as<NcclResult>;
  { device.send(comm, stream, from, count, type, number) } -> std::same_as<NcclResult>;
  { device.recv(comm, stream, to, count, type, number) } -> std::same_as<NcclResult>;
};

/// The colour of a rank that does not join a split.
inline constexpr int no_colour = -1;

/// Formats NCCL's version code: "2.27.6".
inline std::string version_text(int version) {
  return detail::formatted("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

inline std::string_view result_name(NcclResult result) {
  switch (result) {
    case NcclResult::success:
      return "success";
    case NcclResult::cuda_error:
      return "unhandled CUDA error";
    case NcclResult::system_error:
      return "system error";
    case NcclResult::internal_error:
      return "internal error";
    case NcclResult::invalid_argument:
      return "invalid argument";
    case NcclResult::invalid_usage:
      return "invalid usage";
    case NcclResult::remote_error:
      return "a peer has gone, or its network";
    case NcclResult::in_progress:
      return "in progress";
  }
  return "unknown error";
}

/// Returns the text of an NCCL error: its kind, and NCCL's own description if there is one.
inline std::string nccl_error_text(NcclResult result, const std::string& last_error) {
  const auto begin = last_error.find_first_not_of(" \n\t");
  std::string description = begin == std::string::npos ? "" : last_error.substr(begin);
  description = description.substr(0, description.find('\n'));
  return detail::formatted("NCCL: {}{}{}", result_name(result), description.empty() ? "" : ": ", description);
}

/// Returns the error text for an NCCL that does not support NcclOptions::buffers.
inline std::string no_buffers_text(int version) {
  return detail::formatted(
      "NcclOptions::buffers wants memory that is registered with NCCL, which NCCL {} cannot do: install a "
      "torch with NCCL 2.19 or newer and build against it, or leave NcclBuffers::torch",
      version_text(version));
}

/// Returns "all_reduce #57 (bucket 2 of 5) failed on rank 1: NCCL: ..." and a remedy.
inline std::string failure_text(const std::string& what, int rank, const std::string& reason) {
  std::string text = detail::formatted("{} failed on rank {}: {}", what, rank, reason);
  if (text.find("out of memory") != std::string::npos)
    text +=
        detail::formatted(": rank {}'s GPU is full, so use a smaller batch or free what else is on it", rank);
  else if (text.find("NCCL: ") != std::string::npos)
    text += ": NCCL_DEBUG=INFO makes NCCL say more";
  else
    text += detail::formatted(
        ": whatever rank {}'s GPU was given before may be at fault, and CUDA_LAUNCH_BLOCKING=1 shows where",
        rank);
  return text;
}

}  // namespace lockstep::detail
