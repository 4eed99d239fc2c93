#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/world/detail/environment.hpp"
#include "lockstep/world/detail/host_share.hpp"

namespace lockstep::detail {

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

}  // namespace lockstep::detail
