#pragma once

#include <concepts>
#include <tuple>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

template <class T, class... Types>
inline constexpr bool one_of = (std::same_as<T, Types> || ...);

// Moves out the argument of type T among `given`, or returns `fallback(std::type_identity<T>)`, which is
// compiled only if there is no such argument.
template <class T, class Fallback, class... Given>
T pick(Fallback&& fallback, Given&... given) {
  if constexpr (one_of<T, Given...>)
    return std::move(std::get<T&>(std::tie(given...)));
  else
    return fallback(std::type_identity<T>{});
}

// A fallback for `pick` that default-constructs a policy.
struct MakeDefault {
  template <class T>
  T operator()(std::type_identity<T>) const {
    static_assert(
        std::default_initializable<T>,
        "lockstep: this policy of a Trainer has no default constructor: pass a value of it after the "
        "options");
    return T();
  }
};

}  // namespace lockstep::detail
