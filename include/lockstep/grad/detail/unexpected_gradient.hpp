#pragma once

#include <string>

#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// A parameter whose gradient fired more often in a backward than expected.
struct UnexpectedGradient {
  std::size_t parameter = 0;
  std::string name;
  int expected = 0;  ///< gradients expected in a backward
  int fired = 0;     ///< gradients that fired in this backward before
  bool taken = false, searches = false, never_used = false;
};

/// Returns the error text: the cause and a remedy.
inline std::string text_of(const UnexpectedGradient& it) {
  const std::string name = detail::formatted("parameter {} '{}'", it.parameter, it.name);
  if (it.never_used)
    return name +
           " took no part in the first backward and does in this one, while static_graph promises that every "
           "backward takes the way of the first; leave it out";
  if (it.taken && it.fired == 0)
    return name +
           " was taken for unused, since the loss reaches it through a re-entrant backward (a checkpoint) "
           "alone; turn find_unused_parameters off, or use static_graph";
  if (it.searches)
    return name +
           " got more than one gradient in this backward, which find_unused_parameters cannot foresee in a "
           "re-entrant backward (a checkpoint); turn it off, or use static_graph";
  return detail::formatted(
      "{} got {} gradients in this backward and {} in the first, after which its bucket is reduced; keep the "
      "number of uses in re-entrant backwards (checkpoints) fixed",
      name, it.fired + 1, it.expected);
}

}  // namespace lockstep::detail
