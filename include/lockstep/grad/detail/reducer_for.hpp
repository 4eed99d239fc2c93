#pragma once

#include <concepts>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/detail/no_reducer.hpp"
#include "lockstep/grad/detail/reducer.hpp"

namespace lockstep::detail {

/// A communicator of one process, known as such when compiling: no hook, no copy, no check is left.
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
