#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

/// What the examples do with their command lines: checks, since the flag parser's own take a number that is
/// too large for the largest there is and an empty name for one, and the way in which bad input is told.
namespace flags {

/// Reads `text` whole into `value`; what is wrong with it otherwise, where `kind` is what it should have
/// been.
template <class Number>
std::string read(const std::string& text, Number& value, Number least, const std::string& kind) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size();
  if (whole && error == std::errc::result_out_of_range && text[0] != '-')
    return fmt::format("'{}' is too large{}", text, std::integral<Number> ? "" : " or too close to 0");
  if (whole && error == std::errc() && value >= least && std::isfinite(static_cast<double>(value))) return "";
  return fmt::format("'{}' is not {}, {} or more", text, kind, least);
}

/// A whole number that is at least `least` and that a Number can hold.
template <std::integral Number>
CLI::Validator whole_number(Number least) {
  return CLI::Validator(
      [least](std::string& text) {
        Number value{};
        const std::string wrong = read(text, value, least, "a whole number");
        if (wrong.empty()) text = std::to_string(value);  // 010 is ten, not octal
        return wrong;
      },
      "");
}

/// A number that is 0 or more, and neither infinite nor NaN.
inline CLI::Validator not_negative() {
  return CLI::Validator(
      [](std::string& text) {
        double value = 0;
        return read(text, value, 0.0, "a number");
      },
      "");
}

/// Some text: an empty one is most often a variable of the shell that was not set.
inline CLI::Validator not_empty() {
  return CLI::Validator([](std::string& text) { return text.empty() ? "it is empty" : std::string(); }, "");
}

/// Parses the command line, of which the last of equal options counts. Where the program should end, its exit
/// code: 0 after --help, 2 after bad input, which is told on one line.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  // launch reads these itself; they are here for --help, and so that they are known.
  const auto ignore = [](const std::string&) {};
  app.add_option_function<std::string>("--nproc", ignore,
                                       "processes to start on this host; without it one a GPU, or 2");
  app.add_option_function<std::string>("--prefix", ignore,
                                       "put the rank in front of lines: auto, always or never");
  app.add_option_function<std::string>(
      "--timeout", ignore, "seconds that a collective may take; without it 1800, and 600 on GPUs");
  for (CLI::Option* option : app.get_options()) option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  try {
    // The parser would take the next argument for the value.
    for (const std::string_view argument : std::vector<std::string_view>(argv + 1, argv + argc))
      if (argument.starts_with("--") && argument.ends_with('='))
        throw CLI::ValidationError(std::string(argument.substr(0, argument.size() - 1)), "it is empty");
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    // Every rank would say the same.
    const char* local_rank = std::getenv("LOCAL_RANK");
    if (!local_rank || std::string_view(local_rank) == "0")
      fmt::print(stderr, "error: {}; see --help\n", error.what());
    return 2;
  }
}

}  // namespace flags
