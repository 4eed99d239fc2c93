#pragma once

// Declarations that only some versions of LibTorch have. libtorch_required.hpp refuses versions before 2.6;
// packaging/torch_matrix.py builds and runs a program with each version.

#include "lockstep/detail/libtorch_required.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::inline v0_1::detail {

/// c10d::Store with `clone`, which LibTorch declares since 2.8: subclasses can write `override` for any
/// version.
class ClonableStore : public c10d::Store {
 public:
  virtual c10::intrusive_ptr<c10d::Store> clone() = 0;
};

/// Starts an all-gather into one tensor by the name that the backend's version has: `_allgather_base` before
/// it was renamed.
template <class Backend, class Tensor>
auto all_gather_single(Backend& backend, Tensor& to, Tensor& from) {
  if constexpr (requires { backend.all_gather_single(to, from); })
    return backend.all_gather_single(to, from);
  else
    return backend._allgather_base(to, from);
}

/// The same for a reduce-scatter, `_reduce_scatter_base` before it was renamed.
template <class Backend, class Tensor, class Options>
auto reduce_scatter_single(Backend& backend, Tensor& to, Tensor& from, const Options& options) {
  if constexpr (requires { backend.reduce_scatter_single(to, from, options); })
    return backend.reduce_scatter_single(to, from, options);
  else
    return backend._reduce_scatter_base(to, from, options);
}

/// The same for an all-to-all in even parts, `alltoall_base` before it was renamed.
template <class Backend, class Tensor>
auto all_to_all_single(Backend& backend, Tensor& to, Tensor& from) {
  std::vector<std::int64_t> even;
  if constexpr (requires { backend.all_to_all_single(to, from, even, even); })
    return backend.all_to_all_single(to, from, even, even);
  else
    return backend.alltoall_base(to, from, even, even);
}

/// Returns whether the backend can split off sub-groups by itself. False before LibTorch had
/// c10d::Backend::split.
template <class Backend>
bool splits(const Backend& backend) {
  if constexpr (requires { backend.supportsSplitting(); })
    return backend.supportsSplitting();
  else
    return false;
}

/// Splits off a group of `ranks`, which rendezvous through `store`. Every rank of the backend calls it. Null
/// on the other ranks, and before LibTorch had c10d::Backend::split.
template <class Backend, class Store>
c10::intrusive_ptr<Backend> split(Backend& backend, const Store& store, const std::vector<int>& ranks,
                                  const std::string& name) {
  if constexpr (requires { backend.split(store, ranks, backend.getBackendOptions()); }) {
    auto options = backend.getBackendOptions();
    // A backend writes into the options of its sub-group: they must not be its own.
    if constexpr (requires { options->clone(); }) options = options->clone();
    options->group_name = name;
    return backend.split(store, ranks, options);
  } else {
    return nullptr;
  }
}

/// A backend of lockstep's with `abort`, which c10d::Backend declares since 2.7.
class AbortableBackend {
 public:
  virtual void abort() = 0;

 protected:
  ~AbortableBackend() = default;
};

/// Ends the backend's operations in flight, if it has `abort`. May block.
template <class Backend>
void abort_operations(Backend& backend) {
  if constexpr (requires { backend.abort(); })
    backend.abort();
  else if (auto* own = dynamic_cast<AbortableBackend*>(&backend))
    own->abort();
}
/// Returns whether an operation of the backend has failed, or was aborted. False before c10d::Backend had
/// `getError`; throws c10::Error if the backend does not implement it.
template <class Backend>
bool has_failed(Backend& backend) {
  if constexpr (requires { backend.getError(); })
    return backend.getError() != decltype(backend.getError())::SUCCESS;
  else
    return false;
}
/// Completes the backend's operations and ends its threads, as ProcessGroupNCCL needs before its destruction.
/// A no-op before c10d::Backend had `shutdown`. May block.
template <class Backend>
void shut_down(Backend& backend) {
  if constexpr (requires { backend.shutdown(); }) backend.shutdown();
}

/// Returns whether the stream records into a graph; false before LibTorch's guards could tell.
template <class Guard, class Stream>
bool is_capturing(const Guard& guard, const Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); })
    return guard.isStreamCapturing(stream);
  else
    return false;
}

/// The dtypes float8_e8m0fnu and float4_e2m1fn_x2 (two values in a byte), which LibTorch has since 2.7 and
/// 2.8; Undefined before.
inline constexpr at::ScalarType float8_e8m0fnu = []<class Type>(Type none) {
  if constexpr (requires { Type::Float8_e8m0fnu; }) return Type::Float8_e8m0fnu;
  return none;
}(at::ScalarType::Undefined);
inline constexpr at::ScalarType float4_e2m1fn_x2 = []<class Type>(Type none) {
  if constexpr (requires { Type::Float4_e2m1fn_x2; }) return Type::Float4_e2m1fn_x2;
  return none;
}(at::ScalarType::Undefined);

/// Returns a tensor of the same bytes that LibTorch can copy: it has no kernel for float4.
inline at::Tensor copyable(const at::Tensor& tensor) {
  return tensor.scalar_type() == float4_e2m1fn_x2 ? tensor.view(at::kByte) : tensor;
}

}  // namespace lockstep::inline v0_1::detail
