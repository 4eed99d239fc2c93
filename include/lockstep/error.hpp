#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {
// The global rank of this process, -1 until a World exists. Code without a World, such as samplers and
// readers, also throws errors that carry this rank.
LOCKSTEP_PROCESS_WIDE inline std::atomic<int> process_rank{-1};
/// The operation of a FailedCall that is a rendezvous, of all ranks or of the communicator in its label.
inline constexpr const char* rendezvous = "rendezvous";
}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

/// What has happened to a rank.
enum class FailureKind : std::uint8_t {
  error,        ///< an error of its own
  usage,        ///< bad input, which every rank may report
  consequence,  ///< of the failure of another rank, `Failure::cause`
  died,         ///< its process has ended: by a signal, by an exit code, or unseen
  left_early,   ///< it has left a group, or ended with exit code 0, while another rank called a collective
  stopped,      ///< it was asked to stop, and is to be resumed
  timed_out,    ///< a timeout has expired; `Failure::cause` is the late rank if there is one alone
  mismatch,     ///< this rank and `Failure::cause` have made different calls, and every rank throws it
};

/// The call in which a rank has failed or waits.
struct FailedCall {
  std::string operation = {};  ///< "all_reduce", "recv" or "rendezvous"; empty if there is none
  std::uint64_t sequence = 0;  ///< its number in its communicator, from 1; 0 if it has none
  int peer = -1;               ///< of send and recv: the other rank in the communicator
  int tag = 0;                 ///< of send and recv
  std::string label = {};      ///< such as a bucket with its parameters; in a rendezvous, the communicator
  std::string served = {};     ///< the outermost public call of lockstep, such as "Trainer::fit"
  std::string part = {};       ///< the innermost public call inside it
};

/// The failure of a rank. Every exception of lockstep carries one.
struct Failure {
  FailureKind kind = FailureKind::error;  ///< what has happened to the rank
  int rank = -1;                          ///< the rank that has failed; -1 if it is unknown
  std::string host = {};
  int pid = 0;                                  ///< of its process on `host`; 0 if it is unknown
  int cause = -1;                               ///< the rank to blame; -1 if there is none, or several
  FailureKind cause_kind = FailureKind::error;  ///< what has happened to `cause`
  int code = 1;  ///< the exit code of the process, 128 + its signal if that ended it
  FailedCall call = {};
  std::string type = {};  ///< of the exception
  std::string message = {};
  std::int64_t time = 0;  ///< nanoseconds on the monotonic clock of its host
};

/// The root of every exception that lockstep throws. `what()` states the failure, its place and a remedy.
/// `rank()` is the global rank that threw it, -1 if no World existed yet; `failure()` has all facts as values.
class Error : public std::runtime_error {
 public:
  /// `rank` defaults to this process's rank.
  explicit Error(const std::string& what, int rank = detail::process_rank.load())
      : Error(Failure{.rank = rank, .message = what}) {}
  /// `failure.message` is the text.
  explicit Error(Failure failure)
      : std::runtime_error(failure.message), failure_(std::make_shared<const Failure>(std::move(failure))) {}
  [[nodiscard]] int rank() const noexcept { return failure_->rank; }
  [[nodiscard]] const Failure& failure() const noexcept { return *failure_; }

 private:
  std::shared_ptr<const Failure> failure_;  // an exception's copies must not throw
};

namespace detail {
/// An error whose failures are of one kind.
template <class Base, FailureKind kind>
struct ErrorOfKind : Base {
  explicit ErrorOfKind(const std::string& what, int rank = process_rank.load())
      : Base(Failure{.kind = kind, .rank = rank, .message = what}) {}
  explicit ErrorOfKind(Failure failure) : Base(std::move(failure)) {}
};
}  // namespace detail

/// Invalid input on the command line, in the environment, in an option or in an argument of a call. If
/// `launch` catches it, the process prints one line to stderr and exits with code 2.
struct UsageError : detail::ErrorOfKind<Error, FailureKind::usage> {
  using ErrorOfKind::ErrorOfKind;
};

/// The rendezvous failed: no store, a wrong address, or ranks that contradict each other.
struct RendezvousError : Error {
  explicit RendezvousError(const std::string& what, int rank = detail::process_rank.load())
      : Error(Failure{.rank = rank, .call = {.operation = detail::rendezvous}, .message = what}) {}
  explicit RendezvousError(Failure failure) : Error(std::move(failure)) {}
};

/// A collective failed or was called where it must not be.
struct CommunicationError : Error {
  using Error::Error;
};

/// A timeout expired; the message names the ranks that were late.
struct TimeoutError : detail::ErrorOfKind<CommunicationError, FailureKind::timed_out> {
  using ErrorOfKind::ErrorOfKind;
};

/// Another rank failed first, or left the group before this rank's call. This error is a consequence, never
/// the cause; the message contains the cause, and `failure().cause` is its rank.
struct PeerError : detail::ErrorOfKind<CommunicationError, FailureKind::consequence> {
  using ErrorOfKind::ErrorOfKind;
};

/// Ranks differ in what must be equal on all of them, such as a model, a dataset, a call or the shape of a
/// tensor. The message names the values and the ranks. Of calls that differ, every rank throws it for the first.
struct MismatchError : Error {
  using Error::Error;
};

/// A dataset, its files or a batch are invalid. For a file the message names the file, the offset and the expectation.
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
struct Stopped : detail::ErrorOfKind<Error, FailureKind::stopped> {
  using ErrorOfKind::ErrorOfKind;
};

}  // namespace lockstep::inline v0_1
