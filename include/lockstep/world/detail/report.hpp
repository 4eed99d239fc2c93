#pragma once

#include <cxxabi.h>
#include <time.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <typeinfo>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/printable.hpp"

namespace lockstep::detail {

/// How a rank's failure ranks in the search for the first failure.
enum class FailureKind {
  usage,  ///< bad input: every rank may report it
  error,  ///< a cause
  peer    ///< a consequence of another rank's failure
};

/// The report of a failing rank to its supervisor and to the other ranks.
struct FailureReport {
  FailureKind kind = FailureKind::error;
  std::int64_t when = 0;  ///< nanoseconds on this host's monotonic clock
  int code = 1;           ///< the exit code of the failing process
  std::string text;
  /// The type of an exception whose text does not name it, for torchrun's error file. Never encoded.
  std::string type = {};
};

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

/// Returns the report of an exception. Null means that std::terminate was called without an exception.
inline FailureReport describe(const std::exception_ptr& exception) {
  FailureReport report;
  report.when = monotonic_nanoseconds();
  if (!exception) {
    report.text = "std::terminate was called";
    return report;
  }
  try {
    std::rethrow_exception(exception);
  } catch (const UsageError& error) {
    report.kind = FailureKind::usage;
    report.code = 2;
    report.text = error.what();
    report.type = error_type_name(error);
  } catch (const PeerError& error) {
    report.kind = FailureKind::peer;
    report.text = printable(error.what());
    report.type = error_type_name(error);
  } catch (const Stopped& error) {
    report.code = stopped_exit_code;
    report.text = error.what();
  } catch (const ProcessError& error) {
    report.code = error.exit_code();
    report.kind = error.exit_code() == 2 ? FailureKind::usage : FailureKind::error;
    report.text = error.what();
  } catch (const Error& error) {
    report.text = printable(error.what());  // it may quote other ranks
    report.type = error_type_name(error);
  } catch (const std::exception& error) {
    const std::string known = known_exception_text ? known_exception_text(error) : std::string();
    report.text =
        detail::formatted("{}: {}", type_name(typeid(error)), known.empty() ? error.what() : known.c_str());
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    report.text = detail::formatted("an exception of type {}", type ? type_name(*type) : "unknown");
  }
  return report;
}

/// Returns the rank that a consequence names as its cause ("rank 3 failed first: ..."), -1 if it names none.
inline int cause_of(std::string_view text) {
  constexpr std::string_view begin = "rank ";
  int rank = -1;
  if (text.starts_with(begin)) std::from_chars(text.data() + begin.size(), text.data() + text.size(), rank);
  return rank;
}

/// The parts of a text that says which rank has left a group before the others: "rank 1 has left after
/// all_reduce #7 while rank 0 waits in all_reduce #8; every rank must ...".
inline constexpr std::string_view has_left = "has left";
inline constexpr std::string_view same_calls = "every rank must make the same calls, and equally many";
inline std::string waiting_text(int rank, const std::string& call) {
  return detail::formatted("while rank {} waits in {}", rank, call);
}

/// Returns whether a consequence names a rank that has left a group before the others: `rank` is its cause.
inline bool names_departure(std::string_view text, int rank) {
  return rank >= 0 && text.starts_with(detail::formatted("rank {} {} ", rank, has_left));
}

/// Returns the cause that other ranks report for a rank that ended too early with exit code 0. `text`, the
/// report of a rank that noticed it, may hold a waiting_text.
inline std::string early_end_text(int rank, std::string_view text) {
  std::string waiting = "while other ranks still communicated with it";
  if (const auto at = text.find("while rank "); at != std::string_view::npos) waiting = text.substr(at);
  if (waiting.find(same_calls) == std::string::npos) waiting += detail::formatted("; {}", same_calls);
  return detail::formatted("rank {} has ended with exit code 0 {}", rank, waiting);
}

/// Returns the headline of a failure that `reporter` ("rank 3") reports. A consequence's headline begins with
/// its cause.
inline std::string headline(const FailureReport& report, std::string_view reporter) {
  if (report.kind == FailureKind::usage) return report.text;
  if (report.kind == FailureKind::peer) return detail::formatted("{}; noticed by {}", report.text, reporter);
  const bool ended = report.text.starts_with("died") || report.text.starts_with("ended");
  return detail::formatted("{}{}{}", reporter, ended ? " " : " failed: ", report.text);
}

/// Encodes a report for a pipe: kind, time and code on a line each, then the text.
inline std::string encode(const FailureReport& report) {
  const char* kind = report.kind == FailureKind::usage  ? "usage"
                     : report.kind == FailureKind::peer ? "peer"
                                                        : "error";
  return detail::formatted("{}\n{}\n{}\n{}", kind, report.when, report.code, report.text);
}

inline FailureReport decode(std::string_view bytes) {
  FailureReport report;
  const auto line = [&] {
    const auto end = std::min(bytes.find('\n'), bytes.size());
    const auto first = bytes.substr(0, end);
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
    return first;
  };
  const auto kind = line();
  report.kind = kind == "usage"  ? FailureKind::usage
                : kind == "peer" ? FailureKind::peer
                                 : FailureKind::error;
  const auto when = line();
  std::from_chars(when.data(), when.data() + when.size(), report.when);
  const auto code = line();
  std::from_chars(code.data(), code.data() + code.size(), report.code);
  report.text = bytes;
  return report;
}

}  // namespace lockstep::detail
