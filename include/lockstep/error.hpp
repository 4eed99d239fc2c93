#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {
// The global rank of this process, -1 until a World exists. Code without a World, such as samplers and
// readers, also throws errors that carry this rank.
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> process_rank{-1};
}  // namespace lockstep::detail

namespace lockstep {

/// The root of every exception that lockstep throws. `what()` states the failure, its place and a remedy.
/// `rank()` is the global rank that threw it, -1 if no World existed yet.
class Error : public std::runtime_error {
 public:
  /// `rank` defaults to this process's rank.
  explicit Error(const std::string& what, int rank = detail::process_rank.load())
      : std::runtime_error(what), rank_(rank) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// Invalid input on the command line, in the environment, in an option or in an argument of a call. If
/// `launch` catches it, the process prints one line to stderr and exits with code 2.
struct UsageError : Error {
  using Error::Error;
};

/// The rendezvous failed: no store, a wrong address, or ranks that contradict each other.
struct RendezvousError : Error {
  using Error::Error;
};

/// A collective failed or was called where it must not be.
struct CommunicationError : Error {
  using Error::Error;
};

/// A timeout expired; the message names the ranks that were late.
struct TimeoutError : CommunicationError {
  using CommunicationError::CommunicationError;
};

/// Another rank failed first, or left the group before this rank's call. This error is a consequence, never
/// the cause; the message contains the cause.
struct PeerError : CommunicationError {
  using CommunicationError::CommunicationError;
};

/// Ranks differ in what must be equal on all of them, such as a model, a dataset, a call or the shape of a
/// tensor. The message names the values and the ranks.
struct MismatchError : Error {
  using Error::Error;
};

/// A dataset, its files or a batch are invalid. For a file the message names the file, the offset and the
/// expectation.
struct DataError : Error {
  using Error::Error;
};

/// A gradient is missing, is unexpected or cannot be reduced; the message names the parameter.
struct GradientError : Error {
  using Error::Error;
};

/// A model or checkpoint could not be written or read.
struct CheckpointError : Error {
  using Error::Error;
};

/// The exit code of a run that was asked to stop and is to be resumed: EX_TEMPFAIL of sysexits.h.
inline constexpr int stopped_exit_code = 75;

/// A signal has asked the run to stop, and every rank has saved its state after the same step; see
/// StopOnSignal. `launch` turns it into one line on stderr and the exit code 75.
struct Stopped : Error {
  using Error::Error;
};

/// A process that `spawn` started has failed. The message names its rank and the failure. `exit_code()` is
/// the exit code of the process, or 128 + the signal that ended it.
class ProcessError : public Error {
 public:
  /// `exit_code` is that of the process, or 128 + the signal that ended it.
  ProcessError(const std::string& what, int exit_code) : Error(what), exit_code_(exit_code) {}
  [[nodiscard]] int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

}  // namespace lockstep
