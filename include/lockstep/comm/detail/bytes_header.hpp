#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/served_call.hpp"

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

}  // namespace lockstep::detail
