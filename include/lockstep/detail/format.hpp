#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "lockstep/detail/linkage.hpp"

#ifdef LOCKSTEP_CHECK_FORMATS
#include <fmt/format.h>
#endif

namespace lockstep::detail {

// One argument of `formatted`. fmt::format instantiates a dozen templates for each list of argument types, in
// every file that includes the header; lockstep's messages need only these types.
class FormatArgument {
 public:
  using Value = std::variant<bool, char, long long, unsigned long long, float, double, std::string_view>;

  FormatArgument(bool value) : value(value) {}
  FormatArgument(char value) : value(value) {}
  FormatArgument(int value) : value(static_cast<long long>(value)) {}
  FormatArgument(long value) : value(static_cast<long long>(value)) {}
  FormatArgument(long long value) : value(value) {}
  FormatArgument(unsigned value) : value(static_cast<unsigned long long>(value)) {}
  FormatArgument(unsigned long value) : value(static_cast<unsigned long long>(value)) {}
  FormatArgument(unsigned long long value) : value(value) {}
  FormatArgument(float value) : value(value) {}
  FormatArgument(double value) : value(value) {}
  FormatArgument(const char* value) : value(std::string_view(value)) {}
  FormatArgument(const std::string& value) : value(std::string_view(value)) {}
  FormatArgument(std::string_view value) : value(value) {}

  Value value;
};

std::string format_list(std::string_view text, std::initializer_list<FormatArgument> arguments);

#ifdef LOCKSTEP_CHECK_FORMATS
// For the test that compiles the headers: fmt checks each text against the types of its arguments.
template <class... Args>
std::string formatted(fmt::format_string<Args...> text, Args&&... args) {
  return fmt::format(text, std::forward<Args>(args)...);
}
#else
// Formats a message in fmt's syntax.
template <class... Args>
std::string formatted(std::string_view text, const Args&... args) {
  return format_list(text, {FormatArgument(args)...});
}
#endif

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/detail/format-inl.hpp"
#endif
