#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/comm/detail/tensor_check.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the tensor itself, or a view of its bytes if a backend may not know its dtype.
inline at::Tensor movable(const at::Tensor& contiguous) {
  if (is_reducible(contiguous.scalar_type())) return contiguous;
  return contiguous.detach().view({-1}).view(at::kByte);
}

/// Returns the backend's operation for `op`. Unless the group `averages()`, avg is a sum that the caller divides:
/// Gloo has averages only since 2.13, and MPI has none.
inline c10d::ReduceOp native(const BackendGroup& group, ReduceOp op, const at::Tensor& tensor) {
  using Native = c10d::ReduceOp;
  static constexpr Native::RedOpType ops[] = {Native::SUM, Native::AVG, Native::MIN, Native::MAX,
                                              Native::PRODUCT};
  // Backends add bools as bytes, and a bool must not become 2.
  if (op == ReduceOp::sum && tensor.scalar_type() == at::kBool) return Native::MAX;
  return op == ReduceOp::avg && !group.averages() ? Native::SUM : ops[static_cast<int>(op)];
}

inline auto start_all_reduce(c10d::Backend& backend, const at::Tensor& buffer, const c10d::ReduceOp& op) {
  std::vector<at::Tensor> buffers{buffer};
  return backend.allreduce(buffers, {.reduceOp = op});
}

/// The tensors of one dtype in a list, and the buffer [rows, ...] that is sent for them. Row r of the buffer
/// holds row r of each tensor, concatenated.
struct TensorBundle {
  c10::SmallVector<at::Tensor, 1> tensors;
  std::int64_t rows = 1;
  at::Tensor buffer = {};    // the tensor itself if there is only one and it is contiguous
  at::Tensor received = {};  // where defined, the reduced rows of all ranks, of which one goes to the buffer

  [[nodiscard]] bool in_place() const { return buffer.is_same(tensors[0]); }

  void pack() {
    at::NoGradGuard no_grad;
    if (buffer.defined()) return;
    std::vector<at::Tensor> flat;
    flat.reserve(tensors.size());
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape({rows, -1}));
    buffer = flat.size() == 1 ? flat[0].clone(at::MemoryFormat::Contiguous) : at::cat(flat, 1);
  }

  void allocate() {
    if (buffer.defined()) return;
    std::int64_t length = 0;
    for (const at::Tensor& tensor : tensors) length += tensor.numel();
    buffer = at::empty({rows, length / rows}, tensors[0].options().requires_grad(false));
  }

  void take_row(std::int64_t rank) const {
    buffer.detach().copy_(received.view({-1, buffer.numel()})[rank].view(buffer.sizes()));
  }

  void unpack() const {
    if (in_place()) return;
    at::NoGradGuard no_grad;
    const at::Tensor whole = buffer.view({rows, -1});
    std::int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      const std::int64_t length = tensor.numel() / rows;
      tensor.detach().copy_(whole.narrow(1, offset, length).reshape(tensor.sizes()));
      offset += length;
    }
  }
};

/// Groups a list into one bundle per dtype, in the order of each dtype's first appearance, without empty
/// tensors. `rows` divides the number of elements of each tensor.
inline c10::SmallVector<TensorBundle, 1> bundles_of(at::TensorList tensors, std::int64_t rows = 1) {
  c10::SmallVector<TensorBundle, 1> bundles;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    auto* home = std::find_if(bundles.begin(), bundles.end(), [&](const TensorBundle& bundle) {
      return bundle.tensors[0].scalar_type() == tensor.scalar_type();
    });
    if (home == bundles.end()) home = &bundles.emplace_back(TensorBundle{.tensors = {}, .rows = rows});
    home->tensors.push_back(tensor);
  }
  for (TensorBundle& bundle : bundles)
    if (bundle.tensors.size() == 1 && bundle.tensors[0].is_contiguous()) bundle.buffer = bundle.tensors[0];
  return bundles;
}

// Each of these starts an operation on contiguous tensors of any dtype.

inline BackendWork start_broadcast(c10d::Backend& backend, const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{movable(tensor)};
  return backend.broadcast(tensors, {.rootRank = root});
}

/// Starts an all-gather of `row` into the rows of `rows`: one tensor for a device's backend, which then copies no row.
inline BackendWork start_all_gather(c10d::Backend& backend, const at::Tensor& rows, const at::Tensor& row) {
  at::Tensor to = movable(rows).detach().view({-1}), from = movable(row).detach().view({-1});
  if (!row.is_cpu()) return all_gather_single(backend, to, from);
  std::vector<std::vector<at::Tensor>> outputs{to.view({backend.getSize(), -1}).unbind(0)};
  std::vector<at::Tensor> inputs{from};
  return backend.allgather(outputs, inputs);
}

/// Starts an all-to-all: sends row r of `input` [size, ...] to rank r; row s of `rows` comes from rank s.
inline BackendWork start_all_to_all(c10d::Backend& backend, const at::Tensor& rows, const at::Tensor& input) {
  const auto view = [&](const at::Tensor& tensor) {
    return movable(tensor).detach().view({backend.getSize(), -1});
  };
  auto to = view(rows), from = view(input);
  return all_to_all_single(backend, to, from);
}

/// What each rank sends before bytes are exchanged. Bytes of another call would be read as something else,
/// and may be what a checkpoint or a result is made of.
struct BytesHeader {
  std::int64_t length;
  std::uint64_t sequence, hash;  // of the communicator's collectives so far
  SentName name;                 // of the public call that the exchange serves
};

/// Returns a new tensor [length] of the bytes, padded with zeros.
inline at::Tensor bytes_tensor(std::string_view bytes, std::int64_t length) {
  auto tensor = at::zeros({length}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.data_ptr()));
  return tensor;
}
inline std::string bytes_in(const at::Tensor& tensor, std::int64_t length) {
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<std::size_t>(length)};
}

/// Returns the BytesHeader of this rank, which sends `length` bytes.
inline at::Tensor own_header(BackendGroup& group, const Call& call, std::size_t length) {
  const auto [sequence, hash] = group.status().mark();
  const BytesHeader own{static_cast<std::int64_t>(length), sequence, hash, sent_name(call.served)};
  return bytes_tensor({reinterpret_cast<const char*>(&own), sizeof own}, sizeof own);
}

/// Returns the headers in `rows` [ranks, sizeof(BytesHeader)]. Fails the group with a MismatchError if they
/// are of different calls, or if other collectives have gone before.
inline std::vector<BytesHeader> one_call(BackendGroup& group, const Call& call, const at::Tensor& rows,
                                         const std::vector<int>& ranks) {
  std::vector<BytesHeader> headers(ranks.size());
  std::memcpy(headers.data(), rows.const_data_ptr(), rows.nbytes());
  std::vector<std::string> names;
  for (const BytesHeader& header : headers)  // other bytes need not end in a zero
    names.emplace_back(header.name.data(), strnlen(header.name.data(), header.name.size()));
  if (const auto calls = different_calls(names, ranks); !calls.empty())
    group.fail(std::make_exception_ptr(MismatchError(calls)), true);
  for (const BytesHeader& header : headers) {
    if (header.sequence != headers[0].sequence || header.hash != headers[0].hash) group.throw_mismatch(call);
  }
  return headers;
}

/// Gathers a tensor [n] of each rank, on the host. Returns them [ranks, n], on the host.
inline at::Tensor gather_rows(BackendGroup& group, const Call& call, const at::Tensor& own) {
  const at::Tensor row = own.to(group.options().device),
                   rows = at::empty({group.size(), own.numel()}, row.options());
  group.run(call, [&](c10d::Backend& backend) { return start_all_gather(backend, rows, row); });
  return rows.cpu();
}
/// Broadcasts a tensor that is on the host of each rank, in place.
inline void broadcast_row(BackendGroup& group, const Call& call, at::Tensor tensor, int root) {
  const at::Tensor moved = tensor.to(group.options().device);
  group.run(call, [&](c10d::Backend& backend) { return start_broadcast(backend, moved, root); });
  if (!group.on_host()) tensor.copy_(moved);
}
/// The most bytes of a rank that are sent at once: they take memory of the device.
inline constexpr std::int64_t most_bytes_at_once = 64 << 20;

/// Broadcasts `length` bytes of `root`.
inline std::string broadcast_pieces(BackendGroup& group, const Call& call, std::string_view bytes,
                                    std::int64_t length, int root) {
  std::string all;
  for (std::int64_t begin = 0; begin < length; begin += most_bytes_at_once) {
    const std::int64_t size = std::min(most_bytes_at_once, length - begin);
    // Owned by the operation, too: it may outlast an error here.
    const auto piece =
        group.rank() == root
            ? bytes_tensor(bytes.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
                           size)
            : at::empty({size}, at::kByte);
    broadcast_row(group, call, piece, root);
    all += bytes_in(piece, size);
  }
  return all;
}

/// Returns every rank's bytes, by rank: the ranks send headers first, then the bytes. Blocks.
inline std::vector<std::string> gather_bytes(BackendGroup& group, const Call& call, const std::string& own) {
  const int size = group.size();
  if (size == 1) return {own};
  const auto headers =
      one_call(group, call, gather_rows(group, call, own_header(group, call, own.size())), group.ranks());
  std::int64_t total = 0, longest = 0;
  for (const BytesHeader& header : headers) {
    total += header.length;
    longest = std::max(longest, header.length);
  }
  std::vector<std::string> all(headers.size());
  if (longest == 0) return all;
  // Padding unequal lengths to the longest would multiply the traffic.
  const bool padded =
      longest * size <= most_bytes_at_once && longest * size <= std::max<std::int64_t>(2 * total, 1 << 16);
  const auto rows =
      padded ? gather_rows(group, call, bytes_tensor(own, longest)).unbind(0) : std::vector<at::Tensor>();
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    all[rank] = padded ? bytes_in(rows[rank], headers[rank].length)
                       : broadcast_pieces(group, call, own, headers[rank].length, static_cast<int>(rank));
  return all;
}

/// Returns the bytes of `root`. Blocks. Only the other ranks compare the names of the calls: the root receives nothing.
inline std::string broadcast_bytes(BackendGroup& group, const Call& call, const std::string& bytes,
                                   int root) {
  if (group.size() == 1) return bytes;
  const at::Tensor own = own_header(group, call, bytes.size()), row = own.clone();
  broadcast_row(group, call, row, root);
  if (group.rank() == root) return broadcast_pieces(group, call, bytes, std::ssize(bytes), root);
  const auto headers = one_call(group, call, at::stack({row, own}),
                                {group.ranks()[static_cast<std::size_t>(root)], group.world().rank()});
  return broadcast_pieces(group, call, bytes, headers[0].length, root);
}

}  // namespace lockstep::inline v0_1::detail
