#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <string_view>
#include <vector>

#include "lockstep/world/launch_options.hpp"

namespace lockstep::detail {

/// A flag that `launch` reads if `LaunchOptions` says so, and its help.
struct LaunchFlag {
  std::string_view usage;
  bool LaunchOptions::*is_read;
  std::string_view help;

  [[nodiscard]] std::string_view name() const { return usage.substr(0, usage.find(' ')); }
};
inline constexpr LaunchFlag launch_flags[] = {
    {"--nproc N", &LaunchOptions::nproc_flag, "processes to start on this host"},
    {"--prefix WHEN", &LaunchOptions::prefix_flag,
     "put the rank in front of output lines: auto, always or never"},
    {"--timeout SECONDS", &LaunchOptions::timeout_flag, "timeout of collectives (1800, or 600 on GPUs)"},
    {"--threads N", &LaunchOptions::threads_flag, "threads of each rank (its share of the cores)"}};

/// The flags of `launch` in a command line, and the program's own arguments.
struct CommandLine {
  std::map<std::string_view, std::string_view> values;  ///< by LaunchFlag::name(); the last occurrence counts
  std::string_view without_value;                       ///< a flag at the end, empty if there is none
  std::vector<char*> rest;                              ///< with a final null pointer as in main's argv
};

/// Reads `--flag VALUE` and `--flag=VALUE` up to `--`.
inline CommandLine parse_command_line(int argc, const char* const* argv, const LaunchOptions& options) {
  CommandLine line;
  bool over = false;  // after `--`
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i], name = argument.substr(0, argument.find('='));
    over = over || argument == "--";
    const auto* flag = std::find_if(std::begin(launch_flags), std::end(launch_flags), [&](const auto& known) {
      return options.*known.is_read && known.name() == (name == "--nproc-per-node" ? "--nproc" : name);
    });
    if (i == 0 || over || flag == std::end(launch_flags))
      line.rest.push_back(const_cast<char*>(argv[i]));  // argv of main, which a program may change
    else if (name.size() < argument.size())
      line.values[flag->name()] = argument.substr(name.size() + 1);
    else if (++i < argc)
      line.values[flag->name()] = argv[i];
    else
      line.without_value = name;
  }
  line.rest.push_back(nullptr);
  return line;
}

}  // namespace lockstep::detail
