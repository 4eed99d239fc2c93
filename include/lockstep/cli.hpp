#pragma once

#include <CLI/CLI.hpp>
#include <iostream>
#include <optional>
#include <string>

#include "lockstep/detail/format.hpp"
#include "lockstep/world/launch.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the first flag whose value is empty (`--out ""`, or `--out=` as `--out=$UNSET` expands), or
/// std::nullopt. An empty argument that follows no flag is called "argument N".
inline std::optional<std::string> flag_without_value(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.empty()) return argv[i - 1][0] == '-' ? argv[i - 1] : formatted("argument {}", i);
    if (text == "--") break;
    if (text.starts_with("--") && text.find('=') == text.size() - 1) return text;
  }
  return std::nullopt;
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

/// The LaunchOptions to parse with in a program that does not call `launch`: it reads no flag.
inline const LaunchOptions no_launch_flags{.nproc_flag = false,
                                           .prefix_flag = false,
                                           .timeout_flag = false,
                                           .threads_flag = false,
                                           .max_restarts_flag = false};

/// A CLI::App whose help tells the defaults, and whose options take the last value where they are given twice.
struct CommandLine : CLI::App {
  explicit CommandLine(const std::string& description) : CLI::App(description) {
    option_defaults()->always_capture_default()->take_last();
  }
};

/// Parses the command line of a program that calls `launch` afterwards. Returns std::nullopt if the program
/// goes on, otherwise its exit code: 0 after `--help`; 2 after a wrong argument, with the line `error: ...;
/// see --help` on stderr.
///
///   if (const auto code = lockstep::parse(app, argc, argv)) return *code;
///
/// `app` does not see the flags that `launch` reads with these `options`, and its footer ends with their help.
/// A flag with an empty value is refused, for which CLI11 takes an empty text or the next argument. What
/// `app.callback` throws as CLI::ParseError is refused alike: the place of checks of several options.
inline std::optional<int> parse(CLI::App& app, int argc, const char* const* argv,
                                const LaunchOptions& options = {}) {
  app.footer(app.get_footer() + launch_help(options));
  const auto arguments = program_arguments(argc, argv, options);
  try {
    if (const auto flag = detail::flag_without_value(argc, argv))
      throw CLI::ValidationError(*flag, "the value is empty");
    app.parse(static_cast<int>(arguments.size()) - 1, arguments.data());
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    // One write: under torchrun the ranks share stderr.
    std::cerr << detail::formatted("error: {}; see --help\n", error.what());
    return 2;
  }
  return std::nullopt;
}

}  // namespace lockstep::inline v0_1
