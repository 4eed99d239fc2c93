#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>

#include "lockstep/error.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {

/// The value of `--name VALUE` or `--name=VALUE` in a command line, which stays as it is; of several the last
/// counts, and none behind `--` does.
inline std::optional<std::string> argument_value(int argc, char** argv, std::string_view name) {
  std::optional<std::string> value;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--") break;
    if (argument == name) {
      if (++i == argc) throw UsageError(fmt::format("{} needs a value after it", name));
      value = argv[i];
    } else if (argument.starts_with(name) && argument.size() > name.size() && argument[name.size()] == '=') {
      value = argument.substr(name.size() + 1);
    }
  }
  return value;
}

/// `--nproc N`, at least 1.
inline std::optional<int> nproc_argument(int argc, char** argv) {
  const auto text = argument_value(argc, argv, "--nproc");
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (!value || *value < 1)
    throw UsageError(
        fmt::format("--nproc {} is not a number of processes: it must be a whole number, 1 or more", *text));
  return value;
}

/// `--timeout SECONDS`, at least 1.
inline std::optional<int> timeout_argument(int argc, char** argv) {
  const auto text = argument_value(argc, argv, "--timeout");
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (!value || *value < 1)
    throw UsageError(
        fmt::format("--timeout {} is not a number of seconds: it must be a whole number, 1 or more", *text));
  return value;
}

/// `--prefix auto|always|never`.
inline std::optional<Prefix> prefix_argument(int argc, char** argv) {
  const auto text = argument_value(argc, argv, "--prefix");
  if (!text) return std::nullopt;
  if (*text == "auto") return Prefix::automatic;
  if (*text == "always") return Prefix::always;
  if (*text == "never") return Prefix::never;
  throw UsageError(fmt::format("--prefix {} is unknown: it must be auto, always or never", *text));
}

}  // namespace lockstep::detail
