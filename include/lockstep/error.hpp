#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {
// The global rank of this process, -1 until a World exists. Errors thrown from parts that know no World
// (samplers, readers) still say where they happened.
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> process_rank{-1};
}  // namespace lockstep::detail

namespace lockstep {

/// The root of every exception that lockstep throws. `what()` is one plain sentence that says what was wrong,
/// where, and what to do; `rank()` is the global rank that threw it, -1 where no World existed yet.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, int rank = detail::process_rank.load())
      : std::runtime_error(what), rank_(rank) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// Bad input on the command line, in the environment or in an option: found before training starts; `launch`
/// turns it into one line on stderr and exit code 2.
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

/// A timeout passed; the message names who was waited for.
struct TimeoutError : CommunicationError {
  using CommunicationError::CommunicationError;
};

/// Another rank failed first: this error is a consequence, never the cause.
struct PeerError : CommunicationError {
  using CommunicationError::CommunicationError;
};

/// Ranks disagree on something that must be equal (a model, a dataset, a tensor): same text on every rank.
struct MismatchError : Error {
  using Error::Error;
};

/// A dataset or its files are not what they should be; the message names file, offset and expectation.
struct DataError : Error {
  using Error::Error;
};

/// A gradient is missing, arrives where it must not, or cannot be reduced; the message names the parameter.
struct GradientError : Error {
  using Error::Error;
};

/// A model or checkpoint could not be written or read.
struct CheckpointError : Error {
  using Error::Error;
};

/// A process that `spawn` started has failed: which rank and how. `exit_code()` is its exit code, or 128 +
/// signal.
class ProcessError : public Error {
 public:
  ProcessError(const std::string& what, int exit_code) : Error(what), exit_code_(exit_code) {}
  [[nodiscard]] int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

}  // namespace lockstep
