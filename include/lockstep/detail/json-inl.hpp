#pragma once

#include <cmath>
#include <cstddef>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the length of the UTF-8 sequence at the start of `text`, which is not empty; 0 if there is none.
inline std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  const std::size_t length = first < 0x80   ? 1
                             : first < 0xc2 ? 0
                             : first < 0xe0 ? 2
                             : first < 0xf0 ? 3
                             : first < 0xf5 ? 4
                                            : 0;
  if (length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  if (length < 3) return length;
  const unsigned second = byte(1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool surrogate = first == 0xed && second > 0x9f;
  const bool too_large = first == 0xf4 && second > 0x8f;
  return overlong || surrogate || too_large ? 0 : length;
}

LOCKSTEP_INLINE std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    valid += length == 0 ? std::string_view("\xef\xbf\xbd") : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

LOCKSTEP_INLINE std::string json_string(std::string_view text) {
  std::string json = "\"";
  for (const char character : valid_utf8(text)) {
    if (character == '"' || character == '\\')
      json += {'\\', character};
    else if (static_cast<unsigned char>(character) < 0x20 || character == '<' || character == 0x7f)
      json += formatted("\\u{:04x}", static_cast<unsigned>(character));
    else
      json += character;
  }
  return json + '"';
}

LOCKSTEP_INLINE std::string json_number(double value) {
  if (std::isnan(value)) return "\"NaN\"";
  if (std::isinf(value)) return value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
  return formatted("{}", value);
}

}  // namespace lockstep::inline v0_1::detail
