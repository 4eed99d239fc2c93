#pragma once

#include <string>
#include <string_view>

#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// Escapes every control character ("\n", "\x1b"), including those that UTF-8 encodes in two bytes. For text
/// from another process, which could otherwise control the terminal or forge lines.
inline std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if (byte == '\n') {
      result += "\\n";
    } else if (byte == '\t') {
      result += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      result += detail::formatted("\\x{:02x}", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      result += detail::formatted("\\x{:02x}", next);
      ++i;
    } else {
      result += text[i];
    }
  }
  return result;
}

}  // namespace lockstep::detail
