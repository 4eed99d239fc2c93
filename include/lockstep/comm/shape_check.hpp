#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/gloo_bytes.hpp"
#include "lockstep/comm/gloo_group.hpp"
#include "lockstep/comm/tensor_lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// What must be equal over the ranks of one call: a line for the operation, and one for each tensor.
inline std::string signature(const std::string& operation, const std::vector<at::Tensor>& tensors) {
  std::string text = operation;
  for (const at::Tensor& tensor : tensors) text += "\n" + describe(tensor);
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

/// The error that every rank throws when the signatures differ: the first line in which they do, by rank.
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
  std::string text = differs == 0 ? fmt::format("collective #{}:", call.sequence) : call.text() + ":";
  bool list = false;
  for (const auto& own : lines) list = list || own.size() > 2;
  if (differs > 0 && list) text += fmt::format(" tensor {}:", differs - 1);
  for (std::size_t rank = 0; rank < lines.size(); ++rank)
    text += fmt::format("{} rank {} {}", rank == 0 ? "" : ",", ranks[rank], line(rank, differs));
  return text;
}

/// Compares `own` over the ranks before anything else is sent. Throws the same MismatchError on every rank.
inline void compare_over_ranks(GlooGroup& group, const Call& call, const std::string& own) {
  const auto gather = [&](const at::Tensor& row) {
    auto rows = at::empty({group.size(), row.numel()}, row.options());
    const auto work = start_all_gather(group.process_group(), rows, row);
    group.await(call, *work, call.start + group.deadline());
    return rows;
  };
  const auto length = static_cast<std::int64_t>(own.size());
  auto head = at::empty({2}, at::kLong);
  head.data_ptr<std::int64_t>()[0] = length;
  head.data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(std::hash<std::string>{}(own));
  const auto heads = gather(head);
  if (heads.eq(head).all().item<bool>()) return;
  const auto longest = heads.select(1, 0).max().item<std::int64_t>();
  const auto texts = gather(bytes_tensor(own, longest));
  std::vector<std::string> signatures;
  for (int rank = 0; rank < group.size(); ++rank)
    signatures.push_back(bytes_in(texts[rank], heads[rank][0].item<std::int64_t>()));
  throw MismatchError(mismatch_text(call, signatures, group.ranks()));
}

}  // namespace lockstep::detail
