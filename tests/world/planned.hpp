#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/world/detail/host_share.hpp"
#include "lockstep/world/detail/place.hpp"
#include "support/refuses.hpp"

/// What launch and a rank make of a command line and of the environment.
namespace lockstep_test {

using Values = std::map<std::string, std::string>;

inline lockstep::detail::Variables variables(Values values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

/// With one value changed, or removed where it is empty.
inline Values changed(Values values, const std::string& name, const std::string& value) {
  if (value.empty())
    values.erase(name);
  else
    values[name] = value;
  return values;
}

inline lockstep::detail::Environment read(Values values) {
  return lockstep::detail::read_environment(variables(std::move(values)));
}

inline lockstep::detail::Place plan(std::vector<std::string> arguments, Values values,
                                    const lockstep::LaunchOptions& options = {}) {
  arguments.insert(arguments.begin(), "program");
  std::vector<const char*> argv;
  for (const auto& argument : arguments) argv.push_back(argument.c_str());
  return lockstep::detail::resolve(static_cast<int>(argv.size()), argv.data(), options,
                                   variables(std::move(values)));
}

/// The device that a rank takes of the `visible` ones.
inline int gpu_of_rank(const lockstep::detail::Environment& rank, int visible, std::optional<int> wanted,
                       Values values) {
  return lockstep::detail::gpu_of_rank(rank, visible, wanted, variables(std::move(values)));
}

inline void refused(Values values, const std::string& words) {
  refuses<lockstep::UsageError>([&] { read(std::move(values)); }, words);
}

inline void refused(std::vector<std::string> arguments, Values values, const std::string& words) {
  refuses<lockstep::UsageError>([&] { plan(std::move(arguments), std::move(values)); }, words);
}

}  // namespace lockstep_test
