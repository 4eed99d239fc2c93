#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#ifdef LOCKSTEP_CHECK_FORMATS
#include <utility>

#include <fmt/format.h>
#endif

namespace lockstep::inline v0_1::detail {

// One argument of `formatted`. A tagged union, since fmt's templates and std::variant would be instantiated
// in every file that includes this header.
class FormatArgument {
 public:
  enum class Kind { none, boolean, character, signed_integer, unsigned_integer, single, real, text };
  struct Text {
    const char* data;
    std::size_t size;
  };

  FormatArgument() : kind(Kind::none), boolean(false) {}
  FormatArgument(bool value) : kind(Kind::boolean), boolean(value) {}
  FormatArgument(char value) : kind(Kind::character), character(value) {}
  FormatArgument(int value) : kind(Kind::signed_integer), signed_integer(value) {}
  FormatArgument(long value) : kind(Kind::signed_integer), signed_integer(value) {}
  FormatArgument(long long value) : kind(Kind::signed_integer), signed_integer(value) {}
  FormatArgument(unsigned value) : kind(Kind::unsigned_integer), unsigned_integer(value) {}
  FormatArgument(unsigned long value) : kind(Kind::unsigned_integer), unsigned_integer(value) {}
  FormatArgument(unsigned long long value) : kind(Kind::unsigned_integer), unsigned_integer(value) {}
  FormatArgument(float value) : kind(Kind::single), single(value) {}
  FormatArgument(double value) : kind(Kind::real), real(value) {}
  FormatArgument(const char* value) : FormatArgument(std::string_view(value)) {}
  FormatArgument(const std::string& value) : kind(Kind::text), text{value.data(), value.size()} {}
  FormatArgument(std::string_view value) : kind(Kind::text), text{value.data(), value.size()} {}

  Kind kind;
  union {
    bool boolean;
    char character;
    long long signed_integer;
    unsigned long long unsigned_integer;
    float single;
    double real;
    Text text;
  };
};

#ifdef LOCKSTEP_CHECK_FORMATS
// The test that compiles the headers defines this macro, so that fmt checks each text against the types of
// its arguments.
template <class... Args>
std::string formatted(fmt::format_string<Args...> text, Args&&... args) {
  return fmt::format(text, std::forward<Args>(args)...);
}
#else
// Formats a message in fmt's syntax, with at most ten arguments.
std::string formatted(std::string_view text, FormatArgument a = {}, FormatArgument b = {},
                      FormatArgument c = {}, FormatArgument d = {}, FormatArgument e = {},
                      FormatArgument f = {}, FormatArgument g = {}, FormatArgument h = {},
                      FormatArgument i = {}, FormatArgument j = {});
#endif

}  // namespace lockstep::inline v0_1::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/detail/format-inl.hpp"
#endif
