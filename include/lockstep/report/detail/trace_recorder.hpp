#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"

namespace lockstep::detail {

/// The difference of a rank's steady clock to rank 0's, in nanoseconds. The true difference is within `error`
/// of `offset`.
struct ClockOffset {
  std::int64_t offset = 0, error = 0;
};

/// The times of the rounds of an all-gather on one rank, by its steady clock in nanoseconds: just before its
/// call, and when it returned.
struct GatherTimes {
  std::vector<std::int64_t> called, returned;
};

/// Returns the offset of `own` to `first`, the times of rank 0 in the same rounds. A rank's call of a round
/// precedes the return on every rank, so each round bounds the difference on both sides.
ClockOffset clock_offset(const GatherTimes& first, const GatherTimes& own);

std::string serialize(const GatherTimes& times);
GatherTimes deserialize_gather_times(const std::string& bytes);

/// Returns the name of this process's steady clock: the id of this boot of the host, and the time namespace.
/// Empty if unknown.
std::string clock_name();

inline std::int64_t steady_nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// Returns the offset of this rank's steady clock to rank 0's: an estimate from 16 small collectives, whose
/// error is at most the mean of how long one of them takes on the two ranks. Exactly 0 where `name`, of this
/// rank's clock, is rank 0's and the estimate does not contradict it: copies of a virtual machine have one
/// boot id. `now` reads the clock. Collective and blocking.
template <Gathering C, class Now = decltype(&std::chrono::steady_clock::now)>
ClockOffset align_clock(C& comm, const std::string& name = clock_name(),
                        Now now = &std::chrono::steady_clock::now) {
  GatherTimes times;
  for (int round = 0; round < 16; ++round) {
    times.called.push_back(steady_nanoseconds(now()));
    static_cast<void>(comm.all_gather_bytes("round"));
    times.returned.push_back(steady_nanoseconds(now()));
  }
  const std::string first = comm.broadcast_bytes(serialize(times), 0);
  const bool same_name = comm.broadcast_bytes(std::string(name), 0) == name && !name.empty();
  const ClockOffset measured = clock_offset(deserialize_gather_times(first), times);
  if (comm.rank() == 0 || (same_name && std::abs(measured.offset) <= measured.error)) return {};
  return measured;
}

/// One step of a trace, with the steady clock of its rank.
struct TracedStep {
  std::int64_t epoch = 0, step = 0;
  double samples = 0;
  std::vector<PhaseSpan> spans;
  std::chrono::steady_clock::time_point began;  // of the backward that reduced
  std::vector<BucketReport> buckets;
};

TracedStep traced(const StepReport& report, const StepProfile& profile);

/// The steps that a rank has traced so far.
class TraceRecorder {
 public:
  void add(const StepReport& report, const StepProfile& profile) {
    steps_.push_back(traced(report, profile));
  }
  [[nodiscard]] bool empty() const { return steps_.empty(); }
  [[nodiscard]] std::size_t size() const { return steps_.size(); }

  /// Returns the begin of the first step in nanoseconds, 0 without a step.
  [[nodiscard]] std::int64_t origin() const;

  /// Returns this rank's events as the elements of a JSON array, without its brackets. `origin`, by rank 0's
  /// clock, is the time 0 of the trace.
  [[nodiscard]] std::string events(int rank, const ClockOffset& clock, std::int64_t origin) const;

 private:
  std::vector<TracedStep> steps_;
};

/// Returns the trace file of all ranks' events. Ranks without an event have an empty text.
std::string trace_file(const std::vector<std::string>& events);

/// Returns a lane for each bucket, such that buckets in flight at one time have different lanes.
std::vector<int> bucket_lanes(const std::vector<BucketReport>& buckets);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/trace_recorder-inl.hpp"
#endif
