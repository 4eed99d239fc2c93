#pragma once

#include <string>
#include <string_view>

namespace lockstep::inline v0_1::detail {

/// Returns `text` as valid UTF-8: each byte that is none becomes U+FFFD.
std::string valid_utf8(std::string_view text);

/// Returns a JSON string with its quotes. Escapes "<" too, so that the text may stand inside a script of an HTML page.
std::string json_string(std::string_view text);

/// Returns the shortest JSON number that reads back as `value`; "NaN", "Infinity" and "-Infinity", with their
/// quotes, for the values that JSON does not have.
std::string json_number(double value);

}  // namespace lockstep::inline v0_1::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/detail/json-inl.hpp"
#endif
