#pragma once

#include <concepts>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/detail/no_reducer.hpp"
#include "lockstep/grad/detail/reducer.hpp"

namespace lockstep::detail {

/// Whether the communicator type has one rank at compile time. Hooks, copies and checks are then compiled
/// out.
template <class Comm>
inline constexpr bool alone = std::same_as<Comm, LocalComm>;
template <class Comm, class Hook>
struct ReducerFor {
  using type = Reducer<Comm, Hook>;
};
template <class Hook>
struct ReducerFor<LocalComm, Hook> {
  using type = NoReducer;
};

}  // namespace lockstep::detail
