#pragma once

#include <string>
#include <string_view>

#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Formats NCCL's version code: "2.27.6".
inline std::string version_text(int version) {
  return detail::formatted("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

inline std::string_view result_name(NcclResult result) {
  switch (result) {
    case NcclResult::success:
      return "success";
    case NcclResult::cuda_error:
      return "unhandled CUDA error";
    case NcclResult::system_error:
      return "system error";
    case NcclResult::internal_error:
      return "internal error";
    case NcclResult::invalid_argument:
      return "invalid argument";
    case NcclResult::invalid_usage:
      return "invalid usage";
    case NcclResult::remote_error:
      return "a peer has gone, or its network";
    case NcclResult::in_progress:
      return "in progress";
  }
  return "unknown error";
}

/// Returns the text of an NCCL error: its kind, and NCCL's own description if there is one.
inline std::string nccl_error_text(NcclResult result, const std::string& last_error) {
  const auto begin = last_error.find_first_not_of(" \n\t");
  std::string words = begin == std::string::npos ? "" : last_error.substr(begin);
  words = words.substr(0, words.find('\n'));
  return detail::formatted("NCCL: {}{}{}", result_name(result), words.empty() ? "" : ": ", words);
}

/// Returns the error text for an NCCL that does not support NcclOptions::buffers.
inline std::string no_buffers_text(int version) {
  return detail::formatted(
      "NcclOptions::buffers wants memory that is registered with NCCL, which NCCL {} cannot do: install a "
      "torch with NCCL 2.19 or newer and build against it, or leave NcclBuffers::torch",
      version_text(version));
}

/// Returns "all_reduce #57 (bucket 2 of 5) failed on rank 1: NCCL: ..." and a remedy.
inline std::string failure_text(const std::string& what, int rank, const std::string& words) {
  std::string text = detail::formatted("{} failed on rank {}: {}", what, rank, words);
  if (text.find("out of memory") != std::string::npos)
    text +=
        detail::formatted(": rank {}'s GPU is full, so use a smaller batch or free what else is on it", rank);
  else if (text.find("NCCL: ") != std::string::npos)
    text += ": NCCL_DEBUG=INFO makes NCCL say more";
  else
    text += detail::formatted(
        ": whatever rank {}'s GPU was given before may be at fault, and CUDA_LAUNCH_BLOCKING=1 shows where",
        rank);
  return text;
}

}  // namespace lockstep::detail
