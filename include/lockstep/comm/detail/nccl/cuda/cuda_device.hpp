#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "lockstep/comm/detail/nccl/cuda/nccl_api.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/nccl_library_check.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/gpus.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// The NcclDevice of a real GPU: the CUDA runtime, LibTorch's streams and memory, and NCCL.
class CudaDevice {
 public:
  using Comm = ncclComm_t;
  using Stream = cudaStream_t;
  using Event = cudaEvent_t;

  /// Opens the GPU of this rank: `index`, or the local rank's among the visible GPUs. Throws UsageError if
  /// there is no GPU, if this host has fewer GPUs than ranks, or if another NCCL is loaded.
  static CudaDevice open(const World& world, std::optional<int> index) {
    check_nccl(world);
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      cudaGetLastError();
      throw UsageError(detail::formatted(
                           "rank {} sees no CUDA device{}: check CUDA_VISIBLE_DEVICES and the driver, or use "
                           "GlooComm",
                           world.rank(),
                           error == cudaSuccess ? "" : detail::formatted(" ({})", cudaGetErrorString(error))),
                       world.rank());
    }
    const CudaDevice device(gpu_of_rank(world.environment(), count, index));
    device.enter_thread();
    return device;
  }

  /// Returns the device of the tensors that it holds.
  [[nodiscard]] c10::Device tensor_device() const { return device(); }
  void enter_thread() const { check(cudaSetDevice(index_), "cudaSetDevice"); }
  [[nodiscard]] std::string name() const { return detail::formatted("cuda:{}", index_); }
  [[nodiscard]] std::string identity() const {
    char host[256] = {};
    gethostname(host, sizeof host - 1);
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index_), "cudaGetDeviceProperties");
    std::string identity = detail::formatted("{}/", host);
    for (const char byte : properties.uuid.bytes)
      identity += detail::formatted("{:02x}", static_cast<unsigned char>(byte));
    return identity;
  }
  [[nodiscard]] int version() const { return loaded_nccl_version(); }
  [[nodiscard]] bool shares_devices() const { return may_share_gpu(); }

  /// Creates a stream of the highest priority, whose blocks are scheduled before those of other streams.
  [[nodiscard]] Stream make_stream() const {
    const c10::cuda::CUDAGuard guard(device());
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    Stream stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
          "cudaStreamCreateWithPriority");
    return stream;
  }
  void destroy_stream(Stream stream) const { cudaStreamDestroy(stream); }
  [[nodiscard]] Stream current_stream() const { return c10::cuda::getCurrentCUDAStream(index_).stream(); }
  [[nodiscard]] bool capturing(Stream stream) const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  [[nodiscard]] Event make_event() const {
    const c10::cuda::CUDAGuard guard(device());
    Event event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    return event;
  }
  void destroy_event(Event event) const { cudaEventDestroy(event); }
  void record(Event event, Stream stream) const {
    const c10::cuda::CUDAGuard guard(device());
    check(cudaEventRecord(event, stream), "cudaEventRecord");
  }
  void wait(Stream stream, Event event) const {
    check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
  }
  [[nodiscard]] bool done(Event event) const {
    const cudaError_t state = cudaEventQuery(event);
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // clear the status, so that the next kernel launch does not report it
      return false;
    }
    check(state, "cudaEventQuery");
    return true;
  }

  [[nodiscard]] bool holds(const at::Tensor& tensor) const {
    return tensor.is_cuda() && tensor.device().index() == static_cast<c10::DeviceIndex>(index_);
  }
  [[nodiscard]] at::Tensor allocate(Stream stream, at::IntArrayRef sizes, at::ScalarType type) const {
    const c10::cuda::CUDAStreamGuard guard(of_torch(stream));
    return at::empty(sizes, at::TensorOptions(type).device(device()));
  }
  void copy(Stream stream, const at::Tensor& to, const at::Tensor& from) const {
    const c10::cuda::CUDAStreamGuard guard(of_torch(stream));
    const at::NoGradGuard no_grad;
    to.detach().copy_(from.detach(), /*non_blocking=*/true);
  }
  [[nodiscard]] at::Tensor upload(const at::Tensor& tensor) const { return tensor.to(device()); }
  [[nodiscard]] at::Tensor download(const at::Tensor& tensor) const { return tensor.cpu(); }

  [[nodiscard]] bool has_buffers() const { return nccl_has_buffers; }
  [[nodiscard]] void* allocate_buffer(std::size_t bytes) const {
    const c10::cuda::CUDAGuard guard(device());
    void* memory = nullptr;
    ncclResult_t result = nccl_allocate(&memory, bytes);
    if (result != ncclSuccess) {
      cudaGetLastError();
      c10::cuda::CUDACachingAllocator::emptyCache();  // frees LibTorch's cached memory
      result = nccl_allocate(&memory, bytes);
    }
    if (result == ncclSuccess) return memory;
    cudaGetLastError();
    const char* description = ncclGetLastError(nullptr);
    throw std::runtime_error(
        detail::formatted("ncclMemAlloc of {} bytes: {}", bytes,
                          nccl_error_text(result_of(result), description ? description : "")));
  }
  void free_buffer(void* memory) const {
    const c10::cuda::CUDAGuard guard(device());
    nccl_free(memory);
  }
  NcclResult register_buffer(Comm comm, void* memory, std::size_t bytes, void*& registration) const {
    const c10::cuda::CUDAGuard guard(device());
    return result_of(nccl_register(comm, memory, bytes, &registration));
  }
  NcclResult deregister_buffer(Comm comm, void* registration) const {
    return result_of(nccl_deregister(comm, registration));
  }

  [[nodiscard]] std::string make_id() const {
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess)
      throw std::runtime_error(
          detail::formatted("ncclGetUniqueId: {}", nccl_error_text(result_of(result), "")));
    return {id.internal, sizeof id.internal};
  }
  NcclResult init(Comm& made, int size, const std::string& text, int rank) const {
    const c10::cuda::CUDAGuard guard(device());
    ncclUniqueId id{};
    text.copy(id.internal, sizeof id.internal);
    ncclConfig_t config = nccl_config();
    return result_of(ncclCommInitRankConfig(&made, size, id, rank, &config));
  }
  NcclResult split(Comm& made, Comm comm, int colour, int key) const {
    const c10::cuda::CUDAGuard guard(device());
    ncclConfig_t config = nccl_config();
    return result_of(
        ncclCommSplit(comm, colour == no_colour ? NCCL_SPLIT_NOCOLOR : colour, key, &made, &config));
  }
  [[nodiscard]] NcclResult state(Comm comm) const {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    return result_of(asked == ncclSuccess ? state : asked);
  }
  [[nodiscard]] std::string last_error(Comm comm) const {
    const char* description = ncclGetLastError(comm);
    return description ? description : "";
  }
  NcclResult finalize(Comm comm) const {
    const c10::cuda::CUDAGuard guard(device());
    return result_of(ncclCommFinalize(comm));
  }
  void destroy(Comm comm) const { ncclCommDestroy(comm); }
  void abort(Comm comm) const { ncclCommAbort(comm); }

  NcclResult group_start() const { return result_of(ncclGroupStart()); }
  NcclResult group_end() const {
    const c10::cuda::CUDAGuard guard(device());
    return result_of(ncclGroupEnd());
  }
  NcclResult all_reduce(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                        at::ScalarType type, ReduceOp op) const {
    return result_of(ncclAllReduce(from, to, count, nccl_type_of(type), nccl_op_of(op), comm, stream));
  }
  NcclResult reduce(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                    at::ScalarType type, ReduceOp op, int root) const {
    return result_of(ncclReduce(from, to, count, nccl_type_of(type), nccl_op_of(op), root, comm, stream));
  }
  NcclResult reduce_scatter(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                            at::ScalarType type, ReduceOp op) const {
    return result_of(ncclReduceScatter(from, to, count, nccl_type_of(type), nccl_op_of(op), comm, stream));
  }
  NcclResult broadcast(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                       at::ScalarType type, int root) const {
    return result_of(ncclBroadcast(from, to, count, nccl_type_of(type), root, comm, stream));
  }
  NcclResult all_gather(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                        at::ScalarType type) const {
    return result_of(ncclAllGather(from, to, count, nccl_type_of(type), comm, stream));
  }
  NcclResult send(Comm comm, Stream stream, const void* from, std::size_t count, at::ScalarType type,
                  int peer) const {
    return result_of(ncclSend(from, count, nccl_type_of(type), peer, comm, stream));
  }
  NcclResult recv(Comm comm, Stream stream, void* to, std::size_t count, at::ScalarType type,
                  int peer) const {
    return result_of(ncclRecv(to, count, nccl_type_of(type), peer, comm, stream));
  }

 private:
  explicit CudaDevice(int index) : index_(index) {}

  [[nodiscard]] c10::Device device() const { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index_)}; }
  [[nodiscard]] c10::cuda::CUDAStream of_torch(Stream stream) const {
    return c10::cuda::getStreamFromExternal(stream, static_cast<c10::DeviceIndex>(index_));
  }

  static void check_nccl(const World& world) {
    const NcclsFound found{loaded_nccl_libraries(), file_of(reinterpret_cast<const void*>(&ncclGetVersion)),
                           nccl_of_torch(), loaded_nccl_version(), compiled_nccl_version};
    if (const auto conflict = nccl_conflict(found)) throw UsageError(*conflict, world.rank());
  }
  static void check(cudaError_t error, const char* call) {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    throw std::runtime_error(detail::formatted("{} failed: {}", call, cudaGetErrorString(error)));
  }

  int index_;
};

static_assert(NcclDevice<CudaDevice>);

}  // namespace lockstep::detail
