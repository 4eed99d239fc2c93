#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/launch_options.hpp"
#include "lockstep/world/environment.hpp"

namespace lockstep::detail {

/// Returns the spellings of a flag of one name: none if the name is empty, which disables the flag.
inline std::vector<std::string> flag_spellings(const std::string& flag) {
  if (flag.empty()) return {};
  return {flag};
}

/// Returns the spellings of the flag for the number of processes.
inline std::vector<std::string> nproc_flags(const LaunchOptions& options) {
  if (options.nproc_flag == LaunchOptions().nproc_flag) return {"--nproc", "--nproc-per-node"};
  return flag_spellings(options.nproc_flag);
}

/// Returns 1 for `--flag`, 2 for `--flag=VALUE`, 0 for any other argument.
inline int matches_flag(std::string_view argument, std::string_view flag) {
  if (!argument.starts_with(flag)) return 0;
  return argument.size() == flag.size() ? 1 : argument[flag.size()] == '=' ? 2 : 0;
}

/// Returns the value of `--flag VALUE` or `--flag=VALUE` in a command line. The last occurrence before `--`
/// counts. Throws UsageError for a flag without a value.
inline std::optional<std::string> argument_value(int argc, const char* const* argv,
                                                 const std::vector<std::string>& flags) {
  std::optional<std::string> value;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--") break;
    for (const std::string& flag : flags) {
      const int match = matches_flag(argument, flag);
      if (match == 1 && ++i == argc) throw UsageError(detail::formatted("{} needs a value after it", flag));
      if (match == 1) value = argv[i];
      if (match == 2) value = argument.substr(flag.size() + 1);
      if (match != 0) break;
    }
  }
  return value;
}

/// Returns the command line without the flags that `launch` reads and their values, for the program's own
/// parser. The last element is a null pointer.
inline std::vector<char*> program_arguments(int argc, const char* const* argv, const LaunchOptions& options) {
  auto flags = nproc_flags(options);
  for (const std::string& flag : {options.prefix_flag, options.timeout_flag})
    if (!flag.empty()) flags.push_back(flag);
  std::vector<char*> kept;
  bool over = false;  // after `--`
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i];
    over = over || argument == "--";
    int match = 0;
    for (std::size_t f = 0; f < flags.size() && i > 0 && !over && match == 0; ++f)
      match = matches_flag(argument, flags[f]);
    if (match == 0) kept.push_back(const_cast<char*>(argv[i]));  // argv of main, which a program may change
    if (match == 1) ++i;
  }
  kept.push_back(nullptr);
  return kept;
}

/// Returns the value of `--nproc N`. Throws UsageError unless it is a whole number of at least 1.
inline std::optional<int> nproc_argument(int argc, const char* const* argv,
                                         const LaunchOptions& options = {}) {
  const auto text = argument_value(argc, argv, nproc_flags(options));
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (!value || *value < 1)
    throw UsageError(
        detail::formatted("{} {} is not a number of processes: it must be a whole number, 1 or more",
                          options.nproc_flag, *text));
  return value;
}

/// Returns the value of `--timeout SECONDS`. Throws UsageError unless it is a whole number of at least 1.
inline std::optional<int> timeout_argument(int argc, const char* const* argv,
                                           const LaunchOptions& options = {}) {
  const auto text = argument_value(argc, argv, flag_spellings(options.timeout_flag));
  if (!text) return std::nullopt;
  const auto value = whole_number(*text);
  if (!value || *value < 1)
    throw UsageError(
        detail::formatted("{} {} is not a number of seconds: it must be a whole number, 1 or more",
                          options.timeout_flag, *text));
  return value;
}

/// Returns the value of `--prefix auto|always|never`. Throws UsageError for any other value.
inline std::optional<Prefix> prefix_argument(int argc, const char* const* argv,
                                             const LaunchOptions& options = {}) {
  const auto text = argument_value(argc, argv, flag_spellings(options.prefix_flag));
  if (!text) return std::nullopt;
  if (*text == "auto") return Prefix::automatic;
  if (*text == "always") return Prefix::always;
  if (*text == "never") return Prefix::never;
  throw UsageError(
      detail::formatted("{} {} is unknown: it must be auto, always or never", options.prefix_flag, *text));
}

/// Returns the help text of the flags that `launch` reads, one line each.
inline std::string launch_help(const LaunchOptions& options) {
  std::string help;
  const auto add = [&](const std::string& flag, const std::string& value, const std::string& text) {
    if (!flag.empty()) help += detail::formatted("  {:<22} {}\n", flag + " " + value, text);
  };
  const auto nproc = options.nproc > 0 ? std::to_string(options.nproc) : "one per GPU, or 2 without GPUs";
  add(options.nproc_flag, "N", "processes to start on this host (" + nproc + ")");
  add(options.prefix_flag, "WHEN", "put the rank in front of output lines: auto, always or never");
  add(options.timeout_flag, "SECONDS", "timeout of collectives (1800, or 600 on GPUs)");
  return help;
}

}  // namespace lockstep::detail
