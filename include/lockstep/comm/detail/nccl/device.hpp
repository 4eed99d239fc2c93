#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <string>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// What an NCCL call answered. The numbers are NCCL's own.
enum class NcclResult : int {
  success = 0,
  cuda_error = 1,  // a CUDA call inside NCCL failed: out of memory among others
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,  // a peer has gone, or its network
  in_progress = 7,
};

/// All that BasicNcclComm uses of CUDA and NCCL: a GPU of this process, as a cheap value. CudaDevice is the
/// real one; whatever else models this can take its place, and then nothing of CUDA is needed.
///
/// Handles. `Comm`, `Stream` and `Event` are cheap to copy, and null when value-initialised. An Event must
/// not be destroyed while a stream still waits for it.
///
/// The device. `D::open(world, index)` chooses the GPU of this rank (`index`, or by the local rank where it
/// is negative), makes it the current one before anything touches CUDA, and throws UsageError where there is
/// none. `enter_thread()` does the same for a thread that the communicator starts. `name()` is for messages;
/// `identity()` is text without blanks that no two devices of a job share, `shares_devices()` says whether
/// the user lets two ranks use one all the same, and `version()` is the NCCL's, as NCCL counts them (22706 is
/// 2.27.6).
///
/// Failure. What CUDA cannot do, each function that answers no NcclResult throws as a std::exception whose
/// text says what failed and why; it knows neither ranks nor collectives, and is no lockstep::Error.
///
/// Order. What is issued to one stream happens in the order of the calls, and never before its call; nothing
/// else is ordered but by `record` and `wait`: what is issued to `stream` after `wait(stream, event)` happens
/// after all that was in the stream which `record(event, stream)` named last. Neither blocks the host.
/// `done(event)` never blocks: whether all before its last record has happened; throws when the device itself
/// has failed. `current_stream()` is the one to which operators on tensors go on this thread.
///
/// Captures. `capturing(stream)`: whether a graph is being captured there. What a captured stream is given is
/// recorded and does not happen; a stream that waits for an event of the capture belongs to it from there on,
/// and the memory that is allocated for it then is the graph's. Of a captured event nobody asks whether it is
/// done; it may be recorded anew afterwards. Nobody waits on the host, uploads or downloads there.
///
/// Memory. `holds(tensor)` says whether the tensor lives on this device. Where the last reference to a tensor
/// goes, its memory may be used again at once by what is issued later to the stream it was allocated for
/// (`allocate(stream, ...)`, or the current stream for the operators'), and by nothing else before: whoever
/// issues work on another stream keeps the tensor until that has happened, or is ordered before what follows
/// on its own. `copy(stream, to, from)` issues a copy. `upload` and `download` move small tensors from and to
/// the host: visible to the current stream, and after all that the current stream holds.
///
/// Buffers. `has_buffers()` says whether this NCCL has what follows. `allocate_buffer(bytes)` gives memory of
/// NCCL's own, and throws where there is none left; `free_buffer` gives it back at once: nothing may still
/// use it, and no communicator have it registered. `register_buffer(comm, memory, bytes, registration)` lets
/// the communicator move what is in that memory without copies of its own, until `deregister_buffer(comm,
/// registration)`; both answer at once. A collective uses registered memory on every rank or on none, and
/// none that is in flight may use what is deregistered. `destroy` wants nothing registered; `abort` ends
/// the registrations, after what is in flight.
///
/// NCCL. Communicators are non-blocking: `init`, `split`, `finalize`, `group_end` and the collectives may
/// answer in_progress, and then nothing else may be called on the communicator but `state` and `abort`, until
/// `state` answers success; before that what was issued is not in the stream yet. `last_error` is NCCL's
/// account of the last failure. Collectives are called between `group_start` and `group_end`, by every rank
/// in the same order. `abort` ends all that is in flight, there and then, and the handle with it; `destroy`
/// ends it once `finalize` has succeeded. One thread at a time calls on a communicator, except `abort`.
/// `init` and `split` may write to `made` later, from a thread of NCCL's, until `state` of the communicator
/// that was called on answers success, or its abort has returned: `made` lives until then, which no frame of
/// a function that can throw does. `split` wants nothing outstanding: what was issued has happened.
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
  // The type is one of nccl_type(); `count` is of elements of what this rank sends, of a reduce_scatter
  // of what it receives; the last number is the root or the peer.
  { device.all_reduce(comm, stream, from, to, count, type, op) } -> std::same_as<NcclResult>;
  { device.reduce(comm, stream, from, to, count, type, op, number) } -> std::same_as<NcclResult>;
  { device.reduce_scatter(comm, stream, from, to, count, type, op) } -> std::same_as<NcclResult>;
  { device.broadcast(comm, stream, from, to, count, type, number) } -> std::same_as<NcclResult>;
  { device.all_gather(comm, stream, from, to, count, type) } -> std::same_as<NcclResult>;
  { device.send(comm, stream, from, count, type, number) } -> std::same_as<NcclResult>;
  { device.recv(comm, stream, to, count, type, number) } -> std::same_as<NcclResult>;
};

/// The colour of a rank that a split leaves out.
inline constexpr int no_colour = -1;

/// True for the types of elements that every NCCL since 2.18 can reduce.
inline bool nccl_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

}  // namespace lockstep::detail
