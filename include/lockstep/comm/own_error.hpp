#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <utility>

#include "lockstep/comm/same_errors.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// The first line of what an exception says, without LibTorch's stack trace.
inline std::string first_line(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  const std::string text = known ? known->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}
inline std::string first_line(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return first_line(e);
  } catch (...) {
    return "an exception of unknown type";
  }
}

/// Runs `part`, for which the other ranks may come to wait. Where it throws what they cannot know of,
/// `tell()` is called while that is handled, and the exception goes on.
template <class Part, class Tell>
decltype(auto) telling_own_error(Part&& part, Tell&& tell) {
  try {
    return std::forward<Part>(part)();
  } catch (const CommunicationError&) {
    throw;  // they know, or cannot be told
  } catch (const ThrownByAll&) {
    throw;
  } catch (...) {
    tell();
    throw;
  }
}

/// Tells the others of the exception that is being handled, by an abort.
template <class C>
void abort_for_others(C& comm, const std::string& where = "") {
  if (comm.size() > 1) comm.abort(where + first_line(std::current_exception()));
}

/// Runs `part`, and where it throws on this rank alone tells the others by an abort: they may wait for this
/// rank in any collective.
template <class C, class Part>
decltype(auto) aborting(C& comm, Part&& part) {
  return telling_own_error(std::forward<Part>(part), [&] { abort_for_others(comm); });
}

}  // namespace lockstep::detail
