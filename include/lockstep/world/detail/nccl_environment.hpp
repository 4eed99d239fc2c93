#pragma once

#include <stdlib.h>

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/world/detail/environment.hpp"

namespace lockstep::inline v0_1::detail {

/// A variable that LibTorch's ProcessGroupNCCL reads once, in its constructor.
struct NcclVariable {
  const char* name;
  const char* value;         ///< with which no thread of LibTorch ends the process or delays an abort
  const char* ends_process;  ///< the values, one character each, with which a thread of LibTorch does end it
};

inline constexpr NcclVariable nccl_variables[] = {
    // 2: the watchdog aborts the communicators at an error or a timeout, and throws nothing.
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", "13"},
    // The heartbeat monitor ends the process if the watchdog is stuck for 8 minutes.
    {"TORCH_NCCL_ENABLE_MONITORING", "0", "1yYtT"},
    {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0", ""},
    // The watchdog sleeps four times as long before it aborts.
    {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0", ""},
};

/// Sets the variables of nccl_variables that are not set. Call it before the process has other threads.
inline void set_nccl_environment() {
  for (const NcclVariable& variable : nccl_variables) setenv(variable.name, variable.value, 0);
}

/// Returns the warning about the environment of a program that uses NCCL, in which LibTorch may end the process:
/// it names each variable that is unset or has one of the values of `ends_process`. Empty if there is none.
inline std::string nccl_environment_warning(const Variables& variables = process_variable) {
  std::vector<std::string> wanted;
  for (const NcclVariable& variable : nccl_variables) {
    const auto value = variables(variable.name);
    if (!value || std::string_view(variable.ends_process).find(value->front()) != std::string_view::npos)
      wanted.push_back(formatted("{}={}", variable.name, variable.value));
  }
  if (wanted.empty()) return {};
  return formatted(
      "LibTorch may end this process when a collective of NCCL fails or times out, before lockstep can "
      "name the rank: set {} before the program starts, as lockstep::launch sets those that are unset",
      joined(wanted, " "));
}

}  // namespace lockstep::inline v0_1::detail
