#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// The header of an exchange of bytes, one row of int64 numbers for each rank: the length of the bytes, the number and the
/// hash of the communicator's collectives so far, and the name of the public call that the exchange serves. Bytes of
/// another call would be read as something else, and may be what a checkpoint or a result is made of.
struct BytesHeader {
  static constexpr std::int64_t names_at = 3, numbers = names_at + sizeof(SentName) / sizeof(std::int64_t);

  /// Returns the header [numbers] of this rank.
  static at::Tensor of(std::size_t length, const ServedCall& call, Membership& membership) {
    auto row = at::empty({numbers}, at::kLong);
    auto* data = row.mutable_data_ptr<std::int64_t>();
    data[0] = static_cast<std::int64_t>(length);
    const auto [sequence, hash] = membership.mark();
    data[1] = static_cast<std::int64_t>(sequence);
    data[2] = static_cast<std::int64_t>(hash);
    const SentName name = sent_name(call);
    std::memcpy(data + names_at, name.data(), name.size());
    return row;
  }
  /// Returns whether headers [ranks, numbers] are equal in the numbers [begin, end).
  static bool equal(const at::Tensor& rows, std::int64_t begin, std::int64_t end) {
    const auto* data = const_data<std::int64_t>(rows);
    for (std::int64_t at = numbers; at < rows.numel(); at += numbers)
      if (!std::equal(data + begin, data + end, data + at + begin)) return false;
    return true;
  }
  /// Returns whether the collectives so far are equal in headers [ranks, numbers].
  static bool same_calls(const at::Tensor& rows) { return equal(rows, 1, names_at); }
  /// Returns the lengths in headers [ranks, numbers].
  static std::vector<std::int64_t> lengths(const at::Tensor& rows) {
    const auto* data = const_data<std::int64_t>(rows);
    std::vector<std::int64_t> lengths;
    for (std::int64_t at = 0; at < rows.numel(); at += numbers) lengths.push_back(data[at]);
    return lengths;
  }
  /// Returns the text of different_calls() of headers [ranks, numbers], empty if the names fit each other.
  static std::string different_calls(const at::Tensor& rows, const std::vector<int>& ranks) {
    if (equal(rows, names_at, numbers)) return {};
    const auto* data = const_data<std::int64_t>(rows);
    std::vector<std::string> names;
    for (std::int64_t at = names_at; at < rows.numel(); at += numbers)
      names.emplace_back(reinterpret_cast<const char*>(data + at));
    return detail::different_calls(names, ranks);
  }
};

/// Copies a string into a new tensor [length], padded with zeros.
inline at::Tensor bytes_tensor(const std::string& bytes, std::int64_t length) {
  auto tensor = at::zeros({length}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.data_ptr()));
  return tensor;
}
inline std::string bytes_in(const at::Tensor& tensor, std::int64_t length) {
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<std::size_t>(length)};
}

/// Fails the group with a MismatchError if the headers [ranks, numbers] of `ranks` are of different calls, or if other
/// collectives have gone before.
inline void require_one_call(BackendGroup& group, const Call& call, const at::Tensor& headers,
                             const std::vector<int>& ranks) {
  if (const auto calls = BytesHeader::different_calls(headers, ranks); !calls.empty())
    group.state().fail(std::make_exception_ptr(MismatchError(calls)), true);
  if (!BytesHeader::same_calls(headers)) group.state().fail(group.state().membership().mismatch(call), true);
}

/// Starts an operation of an exchange of bytes and blocks until it completes.
template <class Start>
void run_and_wait(BackendGroup& group, const Call& call, Start&& start) {
  const BackendWork work = group.launch(call.name, std::forward<Start>(start));
  group.await(call, *work, call.start + group.timeout());
}

/// Gathers a tensor [n] of each rank, on the host. Returns them [ranks, n], on the host.
inline at::Tensor gather_rows(BackendGroup& group, const Call& call, const at::Tensor& own) {
  const at::Device device = group.options().device;
  const at::Tensor row = own.to(device), rows = at::empty({group.state().size(), own.numel()}, row.options());
  run_and_wait(group, call, [&](c10d::Backend& backend) {
    return group.on_host() ? start_all_gather(backend, rows, row)
                           : start_all_gather_single(backend, rows, row);
  });
  return rows.cpu();
}
/// Broadcasts a tensor that is on the host of each rank, in place.
inline void broadcast_row(BackendGroup& group, const Call& call, at::Tensor tensor, int root) {
  const at::Tensor moved = tensor.to(group.options().device);
  run_and_wait(group, call, [&](c10d::Backend& backend) { return start_broadcast(backend, moved, root); });
  if (!group.on_host()) tensor.copy_(moved);
}
/// The most bytes of a rank that are sent at once: they take memory of the device.
inline constexpr std::int64_t most_bytes_at_once = 64 << 20;

/// Broadcasts `length` bytes of `root`.
inline std::string broadcast_pieces(BackendGroup& group, const Call& call, const std::string& bytes,
                                    std::int64_t length, int root) {
  std::string all;
  for (std::int64_t begin = 0; begin < length; begin += most_bytes_at_once) {
    const std::int64_t size = std::min(most_bytes_at_once, length - begin);
    // Owned by the operation, too: it may outlast an error here.
    const auto piece =
        group.state().rank() == root
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
  const int size = group.state().size();
  if (size == 1) return {own};
  const at::Tensor headers =
      gather_rows(group, call, BytesHeader::of(own.size(), call.served, group.state().membership()));
  require_one_call(group, call, headers, group.state().ranks());
  const std::vector<std::int64_t> lengths = BytesHeader::lengths(headers);
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> all(lengths.size());
  if (longest == 0) return all;
  // Padding unequal lengths to the longest would multiply the traffic.
  const bool padded =
      longest * size <= most_bytes_at_once && longest * size <= std::max<std::int64_t>(2 * total, 1 << 16);
  const auto rows =
      padded ? gather_rows(group, call, bytes_tensor(own, longest)).unbind(0) : std::vector<at::Tensor>();
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    all[rank] = padded ? bytes_in(rows[rank], lengths[rank])
                       : broadcast_pieces(group, call, own, lengths[rank], static_cast<int>(rank));
  return all;
}

/// Returns the bytes of `root`. Blocks. Only the other ranks compare the names of the calls: the root receives nothing.
inline std::string broadcast_bytes(BackendGroup& group, const Call& call, const std::string& bytes,
                                   int root) {
  const int rank = group.state().rank();
  if (group.state().size() == 1) return bytes;
  Membership& membership = group.state().membership();
  const at::Tensor header = BytesHeader::of(rank == root ? bytes.size() : 0, call.served, membership);
  broadcast_row(group, call, header, root);
  if (rank != root) {
    const std::vector<int>& ranks = group.state().ranks();
    require_one_call(group, call, at::stack({header, BytesHeader::of(0, call.served, membership)}),
                     {ranks.at(static_cast<std::size_t>(root)), ranks.at(static_cast<std::size_t>(rank))});
  }
  return broadcast_pieces(group, call, bytes, BytesHeader::lengths(header)[0], root);
}

}  // namespace lockstep::detail
