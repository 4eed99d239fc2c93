#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Returns the text that must be equal on every rank of a call: a line for the operation and one per tensor.
inline std::string signature(const std::string& operation, const std::vector<at::Tensor>& tensors) {
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

}  // namespace lockstep::detail
