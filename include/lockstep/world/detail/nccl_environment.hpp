#pragma once

#include <stdlib.h>

#include <string>

#include "lockstep/detail/format.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

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

/// Returns what a program that uses NCCL should know of its environment: the variables that neither it nor
/// `launch` has set, and the user's values with which LibTorch ends the process. Empty if there is nothing.
inline std::string nccl_environment_warning(const Variables& variables = process_variable) {
  std::string unset, ending;
  for (const NcclVariable& variable : nccl_variables) {
    const auto value = variables(variable.name);
    if (!value)
      unset += detail::formatted("{}{}={}", unset.empty() ? "" : " ", variable.name, variable.value);
    else if (!value->empty() && std::string(variable.ends_process).find((*value)[0]) != std::string::npos)
      ending += detail::formatted("{}{}={}", ending.empty() ? "" : " ", variable.name, *value);
  }
  std::string warning;
  if (!ending.empty())
    warning = detail::formatted(
        "with {}, LibTorch ends the process when a collective of NCCL fails or times out, before lockstep "
        "can name the rank: unset it",
        ending);
  if (!unset.empty())
    warning += detail::formatted(
        "{}this program was started without lockstep::launch, and LibTorch may end it when a collective of "
        "NCCL fails: set {} before the program starts",
        warning.empty() ? "" : "; ", unset);
  return warning;
}

}  // namespace lockstep::detail
