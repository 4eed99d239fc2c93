#pragma once

#include <fmt/args.h>
#include <fmt/format.h>

#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string format_list(std::string_view text,
                                        std::initializer_list<FormatArgument> arguments) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const auto& argument : arguments) {
    const auto& value = argument.value;
    switch (value.index()) {
      case 0:
        store.push_back(std::get<0>(value));
        break;
      case 1:
        store.push_back(std::get<1>(value));
        break;
      case 2:
        store.push_back(std::get<2>(value));
        break;
      case 3:
        store.push_back(std::get<3>(value));
        break;
      case 4:
        store.push_back(std::get<4>(value));
        break;
      case 5:
        store.push_back(std::get<5>(value));
        break;
      default:
        store.push_back(fmt::string_view(std::get<6>(value).data(), std::get<6>(value).size()));
    }
  }
  return fmt::vformat(fmt::string_view(text.data(), text.size()), store);
}

}  // namespace lockstep::detail
