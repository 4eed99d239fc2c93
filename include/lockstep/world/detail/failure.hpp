#pragma once

#include <cxxabi.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::inline v0_1::detail {

inline std::int64_t monotonic_nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Returns the plain text of an exception type that another part knows (LibTorch's, with their stack traces),
/// empty for other types. Set by that part.
LOCKSTEP_PROCESS_WIDE inline std::string (*known_exception_text)(const std::exception&) = nullptr;

/// Returns the name of an exception's type, without detail::CollectiveError around it.
inline std::string type_name(const std::type_info& type) {
  constexpr std::string_view collective = "lockstep::detail::CollectiveError<";
  int status = 0;
  char* name = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string text = status == 0 ? name : type.name();
  std::free(name);
  constexpr std::string_view version = "v0_1::";
  for (auto at = text.find(version); at != std::string::npos; at = text.find(version))
    text.erase(at, version.size());
  if (!text.starts_with(collective)) return text;
  return text.substr(collective.size(), text.size() - collective.size() - 1);
}

/// Returns the failure of this process by an exception. Null means that std::terminate was called without
/// one. The message of an exception that is not lockstep's begins with its type.
inline Failure failure_of(const std::exception_ptr& exception) {
  Failure failure{.rank = process_rank.load()};
  try {
    if (!exception)
      failure.message = "std::terminate was called";
    else
      std::rethrow_exception(exception);
  } catch (const Error& error) {
    failure = error.failure();
    failure.type = type_name(typeid(error));
    if (failure.kind == FailureKind::error || failure.kind == FailureKind::consequence)
      failure.message = printable(failure.message);  // it may quote other ranks
    if (failure.kind == FailureKind::usage) failure.code = 2;
    if (failure.kind == FailureKind::stopped) failure.code = stopped_exit_code;
  } catch (const std::exception& error) {
    const std::string known = known_exception_text ? known_exception_text(error) : std::string();
    failure.message =
        formatted("{}: {}", type_name(typeid(error)), known.empty() ? error.what() : known.c_str());
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    failure.message = formatted("an exception of type {}", type ? type_name(*type) : "unknown");
  }
  failure.pid = getpid();
  failure.time = monotonic_nanoseconds();
  return failure;
}

template <>
inline constexpr auto fields_of<FailedCall> =
    std::tuple{&FailedCall::operation, &FailedCall::sequence, &FailedCall::peer, &FailedCall::tag,
               &FailedCall::label,     &FailedCall::served,   &FailedCall::part};
template <>
inline constexpr FailureKind last_of<FailureKind> = FailureKind::mismatch;
template <>
inline constexpr auto fields_of<Failure> = std::tuple{
    &Failure::kind, &Failure::cause_kind, &Failure::rank, &Failure::pid,  &Failure::cause,  &Failure::code,
    &Failure::time, &Failure::host,       &Failure::type, &Failure::call, &Failure::message};

/// The first byte of an encoded failure. Any other begins the text of a process without memory to encode one.
inline constexpr char failure_format = 1;

/// Encodes a failure for the pipe to the launcher, with its message last: more text may follow it, or its end
/// may be cut off.
inline std::string report_of(Failure failure) {
  const std::string message = std::exchange(failure.message, {});
  return failure_format + encoded(failure) + message;
}
/// Decodes report_of's bytes. Those of another format are the message of an error.
inline Failure decode_report(std::string_view bytes) {
  if (!bytes.starts_with(failure_format)) return {.message = printable(bytes)};
  FrameReader in(bytes.substr(1));
  auto failure = in.value<Failure>();
  failure.message = printable(in.rest());
  return failure;
}

}  // namespace lockstep::inline v0_1::detail
