#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <string>
#include <system_error>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

/// Checks of what a user gives on the command line: the flag parser's own take a number that is too large for
/// the largest there is, and an empty name for one.
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

}  // namespace flags
