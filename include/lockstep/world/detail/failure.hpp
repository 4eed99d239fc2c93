#pragma once

#include <cxxabi.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

inline std::int64_t monotonic_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

/// Returns the plain text of an exception type that another part knows (LibTorch's, with their stack traces),
/// empty for other types. Set by that part.
LOCKSTEP_PROCESS_WIDE inline std::string (*known_exception_text)(const std::exception&) = nullptr;

inline std::string type_name(const std::type_info& type) {
  int status = 0;
  char* name = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string text = status == 0 ? name : type.name();
  std::free(name);
  return text;
}

/// Returns the name of an error's type in error.hpp, without detail::CollectiveError around it.
inline std::string error_type_name(const Error& error) {
  constexpr std::string_view collective = "lockstep::detail::CollectiveError<";
  auto name = type_name(typeid(error));
  if (name.starts_with(collective))
    name = name.substr(collective.size(), name.size() - collective.size() - 1);
  return name;
}

/// Returns the failure of this process by an exception. Null means that std::terminate was called without one.
/// The message of an exception that is not lockstep's begins with its type.
inline Failure failure_of(const std::exception_ptr& exception) {
  Failure failure{.rank = process_rank.load()};
  try {
    if (!exception)
      failure.message = "std::terminate was called";
    else
      std::rethrow_exception(exception);
  } catch (const Error& error) {
    failure = error.failure();
    failure.type = error_type_name(error);
    if (failure.kind == FailureKind::error || failure.kind == FailureKind::consequence)
      failure.message = printable(failure.message);  // it may quote other ranks
    if (failure.kind == FailureKind::usage) failure.code = 2;
    if (failure.kind == FailureKind::stopped) failure.code = stopped_exit_code;
    if (dynamic_cast<const ProcessError*>(&error) && failure.code == 2) failure.kind = FailureKind::usage;
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

inline void write_call(FrameWriter& out, const FailedCall& call) {
  out.integer(call.sequence);
  for (const int number : {call.peer, call.tag}) out.integer(static_cast<std::uint64_t>(number));
  for (const std::string* text : {&call.operation, &call.label, &call.served, &call.part}) out.text(*text);
}
/// Reads what write_call has written. Escapes control characters.
inline FailedCall read_call(FrameReader& in) {
  FailedCall call;
  call.sequence = in.integer();
  for (int* number : {&call.peer, &call.tag}) *number = static_cast<int>(in.integer());
  for (std::string* text : {&call.operation, &call.label, &call.served, &call.part})
    *text = printable(std::string(in.text()));
  return call;
}

/// The first byte of an encoded failure. Other bytes are the text of a process that had no memory to encode more.
inline constexpr char failure_format = 1;

/// Encodes a failure, for the pipe to the launcher and for the store. The message is last: more text may follow it, or its
/// end may be cut off.
inline std::string encode(const Failure& failure) {
  FrameWriter out;
  out.byte(failure_format);
  for (const FailureKind kind : {failure.kind, failure.cause_kind}) out.byte(static_cast<std::uint8_t>(kind));
  for (const int number : {failure.rank, failure.pid, failure.cause, failure.code})
    out.integer(static_cast<std::uint64_t>(number));
  out.integer(static_cast<std::uint64_t>(failure.time));
  for (const std::string* text : {&failure.host, &failure.type}) out.text(*text);
  write_call(out, failure.call);
  return std::string(out.raw(failure.message).payload());
}

/// Decodes a failure. Bytes of another format are the message of an error. Escapes control characters.
inline Failure decode_failure(std::string_view bytes) {
  Failure failure;
  FrameReader in(bytes);
  if (in.byte() != failure_format) return {.message = printable(std::string(bytes))};
  for (FailureKind* kind : {&failure.kind, &failure.cause_kind})
    if (const std::uint8_t value = in.byte(); value <= static_cast<std::uint8_t>(FailureKind::mismatch))
      *kind = static_cast<FailureKind>(value);
  for (int* number : {&failure.rank, &failure.pid, &failure.cause, &failure.code})
    *number = static_cast<int>(in.integer());
  failure.time = static_cast<std::int64_t>(in.integer());
  for (std::string* text : {&failure.host, &failure.type}) *text = printable(std::string(in.text()));
  failure.call = read_call(in);
  failure.message = printable(std::string(in.rest()));
  return failure;
}

}  // namespace lockstep::detail
