#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/backend_bytes.hpp"
#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

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
