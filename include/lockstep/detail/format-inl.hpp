#pragma once

#include <fmt/args.h>
#include <fmt/format.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"

#ifndef LOCKSTEP_CHECK_FORMATS
namespace lockstep::inline v0_1::detail {

LOCKSTEP_INLINE std::string formatted(std::string_view text, FormatArgument a, FormatArgument b,
                                      FormatArgument c, FormatArgument d, FormatArgument e, FormatArgument f,
                                      FormatArgument g, FormatArgument h, FormatArgument i,
                                      FormatArgument j) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const FormatArgument* argument : {&a, &b, &c, &d, &e, &f, &g, &h, &i, &j}) {
    using Kind = FormatArgument::Kind;
    const Kind kind = argument->kind;
    if (kind == Kind::boolean) store.push_back(argument->boolean);
    if (kind == Kind::character) store.push_back(argument->character);
    if (kind == Kind::signed_integer) store.push_back(argument->signed_integer);
    if (kind == Kind::unsigned_integer) store.push_back(argument->unsigned_integer);
    if (kind == Kind::single) store.push_back(argument->single);
    if (kind == Kind::real) store.push_back(argument->real);
    if (kind == Kind::text) store.push_back(fmt::string_view(argument->text.data, argument->text.size));
  }
  return fmt::vformat(fmt::string_view(text.data(), text.size()), store);
}

}  // namespace lockstep::inline v0_1::detail
#endif
