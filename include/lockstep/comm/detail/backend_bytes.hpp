#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// The header of an exchange of bytes, one row of int64 numbers for each rank: the length of the bytes, and
/// the name of the public call that the exchange serves. Bytes of another call would be read as something
/// else.
struct BytesHeader {
  static constexpr std::int64_t numbers = 1 + sizeof(SentName) / sizeof(std::int64_t);

  /// Returns the header [numbers] of this rank.
  static at::Tensor of(std::size_t length, const ServedCall& call) {
    auto row = at::empty({numbers}, at::kLong);
    auto* data = row.mutable_data_ptr<std::int64_t>();
    data[0] = static_cast<std::int64_t>(length);
    const SentName name = sent_name(call);
    std::memcpy(data + 1, name.data(), name.size());
    return row;
  }
  /// Returns the lengths in headers [ranks, numbers].
  static std::vector<std::int64_t> lengths(const at::Tensor& rows) {
    const auto* data = const_data<std::int64_t>(rows);
    std::vector<std::int64_t> lengths;
    for (std::int64_t at = 0; at < rows.numel(); at += numbers) lengths.push_back(data[at]);
    return lengths;
  }
  /// Returns the text of different_calls() of headers [ranks, numbers], empty if the names fit each other.
  static std::string different_calls(const at::Tensor& rows, const std::vector<int>& ranks) {
    const auto* data = const_data<std::int64_t>(rows);
    const auto name = [&](std::int64_t row) {
      return reinterpret_cast<const char*>(data + row * numbers + 1);
    };
    bool equal = true;
    for (std::int64_t row = 1; row * numbers < rows.numel(); ++row)
      equal = equal && std::strcmp(name(row), name(0)) == 0;
    if (equal) return {};
    std::vector<std::string> names;
    for (std::int64_t row = 0; row * numbers < rows.numel(); ++row) names.emplace_back(name(row));
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

/// Fails the group with a MismatchError unless `calls`, a text of different_calls(), is empty.
inline void require_one_call(BackendGroup& group, const std::string& calls) {
  if (!calls.empty()) group.state().fail(std::make_exception_ptr(MismatchError(calls)), true);
}

/// Exchanges bytes through the store, after the name of the public call: returns those of the ranks `from`,
/// which are all ranks or one. Blocks.
inline std::vector<std::string> exchanged_in_store(BackendGroup& group, const Call& call,
                                                   const std::vector<int>& from, const std::string& own) {
  const SentName name = sent_name(call.served);
  const auto work = group.exchange_in_store(call, from, std::string(name.begin(), name.end()) + own);
  group.await(call, *work, call.start + group.timeout(), true);
  std::vector<std::string> all = std::move(work->bytes()), names;
  for (std::string& bytes : all) {
    names.emplace_back(bytes.c_str());
    bytes.erase(0, name.size());
  }
  std::vector<int> ranks = group.state().world_ranks(from);
  if (std::find(from.begin(), from.end(), group.state().rank()) == from.end()) {
    names.emplace_back(name.data());
    ranks.push_back(group.state().ranks().at(static_cast<std::size_t>(group.state().rank())));
  }
  require_one_call(group, different_calls(names, ranks));
  return all;
}

/// Starts an operation of an exchange of bytes and blocks until it completes.
template <class Start>
void run_and_wait(BackendGroup& group, const Call& call, Start&& start) {
  const BackendWork work = group.launch(call.name, std::forward<Start>(start));
  group.await(call, *work, call.start + group.timeout());
}

/// Returns every rank's bytes, by rank: the ranks send headers first, then the bytes. Blocks.
inline std::vector<std::string> gather_bytes(BackendGroup& group, const Call& call, const std::string& own) {
  const int size = group.state().size();
  if (!group.on_host()) return exchanged_in_store(group, call, all_ranks(size), own);
  const auto headers = at::empty({size, BytesHeader::numbers}, at::kLong);
  run_and_wait(group, call, [&](c10d::Backend& backend) {
    return start_all_gather(backend, headers, BytesHeader::of(own.size(), call.served));
  });
  require_one_call(group, BytesHeader::different_calls(headers, group.state().ranks()));
  const std::vector<std::int64_t> lengths = BytesHeader::lengths(headers);
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> all(lengths.size());
  if (longest == 0) return all;
  std::vector<at::Tensor> pieces;
  if (longest * size <= std::max<std::int64_t>(2 * total, 1 << 16)) {
    const auto rows = at::empty({size, longest}, at::kByte);
    run_and_wait(group, call, [&](c10d::Backend& backend) {
      return start_all_gather(backend, rows, bytes_tensor(own, longest));
    });
    pieces = rows.unbind(0);
  } else {
    // Padding unequal lengths to the longest would multiply the traffic.
    std::vector<BackendWork> works;
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t length = lengths[static_cast<std::size_t>(rank)];
      pieces.push_back(rank == group.state().rank() ? bytes_tensor(own, length)
                                                    : at::empty({length}, at::kByte));
      if (length > 0)
        works.push_back(group.launch(call.name, [&](c10d::Backend& backend) {
          return start_broadcast(backend, pieces.back(), rank);
        }));
    }
    for (const BackendWork& work : works) group.await(call, *work, call.start + group.timeout());
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) all[rank] = bytes_in(pieces[rank], lengths[rank]);
  return all;
}

/// Returns the bytes of `root`. Blocks. Only the other ranks compare the names of the calls: the root
/// receives nothing.
inline std::string broadcast_bytes(BackendGroup& group, const Call& call, const std::string& bytes,
                                   int root) {
  const int rank = group.state().rank();
  const std::string own = rank == root ? bytes : std::string();
  if (!group.on_host()) return exchanged_in_store(group, call, {root}, own)[0];
  const at::Tensor header = BytesHeader::of(own.size(), call.served);
  run_and_wait(group, call, [&](c10d::Backend& backend) { return start_broadcast(backend, header, root); });
  if (rank != root) {
    const std::vector<int>& ranks = group.state().ranks();
    require_one_call(group, BytesHeader::different_calls(at::stack({header, BytesHeader::of(0, call.served)}),
                                                         {ranks.at(static_cast<std::size_t>(root)),
                                                          ranks.at(static_cast<std::size_t>(rank))}));
  }
  const std::int64_t length = BytesHeader::lengths(header)[0];
  if (length == 0) return {};
  const at::Tensor content = rank == root ? bytes_tensor(own, length) : at::empty({length}, at::kByte);
  run_and_wait(group, call, [&](c10d::Backend& backend) { return start_broadcast(backend, content, root); });
  return bytes_in(content, length);
}

/// Returns the text that must be equal on every rank of a call: a line for the operation and one per tensor.
inline std::string signature(const std::string& operation, at::TensorList tensors) {
  std::string text = operation;
  for (const at::Tensor& tensor : tensors) text.append("\n").append(describe(tensor));
  return text;
}

/// Returns the first line of a signature, such as "all_reduce of sum with root 2".
inline std::string operation_text(const char* name, std::optional<ReduceOp> op, std::optional<int> root) {
  static constexpr const char* ops[] = {"sum", "avg", "min", "max", "product"};
  std::string text = name;
  if (op) text += detail::formatted(" of {}", ops[static_cast<int>(*op)]);
  if (root) text += detail::formatted(" with root {}", *root);
  return text;
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// Returns the text of the MismatchError that every rank throws: the first line that differs, by rank.
inline std::string mismatch_text(const Call& call, const std::vector<std::string>& signatures,
                                 const std::vector<int>& ranks) {
  std::vector<std::vector<std::string>> lines;
  for (const std::string& signature : signatures) lines.push_back(lines_of(signature));
  const auto line = [&](std::size_t rank, std::size_t i) {
    return i < lines[rank].size() ? lines[rank][i] : std::string("nothing");
  };
  std::size_t differs = 0;
  const auto equal = [&](std::size_t i) {
    for (std::size_t rank = 1; rank < lines.size(); ++rank)
      if (line(rank, i) != line(0, i)) return false;
    return true;
  };
  while (equal(differs)) ++differs;
  std::string text = differs == 0 ? detail::formatted("collective #{}:", call.sequence) : call.text() + ":";
  bool list = false;
  for (const auto& own : lines) list = list || own.size() > 2;
  if (differs > 0 && list) text += detail::formatted(" tensor {}:", differs - 1);
  for (std::size_t rank = 0; rank < lines.size(); ++rank)
    text += detail::formatted("{} rank {} {}", rank == 0 ? "" : ",", ranks[rank], line(rank, differs));
  return text;
}

/// Gathers the signature `own` of every rank. Returns nothing if all are equal. Throws MismatchError if
/// `call` serves another public call on another rank. Blocks.
inline std::vector<std::string> differing_signatures(BackendGroup& group, const Call& call,
                                                     const std::string& own) {
  const auto until = call.start + group.timeout();
  std::vector<std::string> signatures;
  if (!group.on_host()) {
    signatures = exchanged_in_store(group, call, all_ranks(group.state().size()), own);
    const bool equal = std::all_of(signatures.begin(), signatures.end(),
                                   [&](const std::string& other) { return other == own; });
    return equal ? std::vector<std::string>() : signatures;
  }
  const auto gather = [&](const at::Tensor& row) {
    auto rows = at::empty({group.state().size(), row.numel()}, row.options());
    const auto work = start_all_gather(group.backend(), rows, row);
    group.await(call, *work, until);
    return rows;
  };
  const auto hash = at::full({1}, static_cast<std::int64_t>(fnv1a(own)), at::kLong);
  const auto heads = gather(at::cat({hash, BytesHeader::of(own.size(), call.served)}));
  const auto headers = heads.narrow(1, 1, BytesHeader::numbers).contiguous();
  if (const std::string calls = BytesHeader::different_calls(headers, group.state().ranks()); !calls.empty())
    throw MismatchError(calls);
  const auto lengths = BytesHeader::lengths(headers);
  if (heads.select(1, 0).eq(hash).all().item<bool>() &&
      std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t length) { return length == lengths[0]; }))
    return {};
  const auto texts = gather(bytes_tensor(own, *std::max_element(lengths.begin(), lengths.end())));
  for (int rank = 0; rank < group.state().size(); ++rank)
    signatures.push_back(bytes_in(texts[rank], lengths[static_cast<std::size_t>(rank)]));
  return signatures;
}

/// Compares the signature `own` over the ranks before the collective sends anything. Throws the same
/// MismatchError on every rank.
inline void compare_over_ranks(BackendGroup& group, const Call& call, const std::string& own) {
  const auto signatures = differing_signatures(group, call, own);
  if (!signatures.empty()) throw MismatchError(mismatch_text(call, signatures, group.state().ranks()));
}

}  // namespace lockstep::detail
