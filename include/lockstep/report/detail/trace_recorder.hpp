#pragma once

#include <chrono>
#include <cstdint>
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

/// Returns the id of this boot of this host, whose processes share one steady clock. Empty if unknown.
std::string boot_id();

inline std::int64_t steady_nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// Returns the offset of this rank's steady clock to rank 0's: 0 on rank 0's host, otherwise an estimate from
/// 16 small collectives, whose error is at most the mean of how long one of them takes on the two ranks.
/// `boot` identifies this rank's host. Collective and blocking.
template <Gathering C>
ClockOffset align_clock(C& comm, const std::string& boot = boot_id()) {
  const std::vector<std::string> boots = comm.all_gather_bytes(boot);
  bool one_host = true;
  for (const std::string& there : boots) one_host = one_host && !there.empty() && there == boots[0];
  if (one_host) return {};
  GatherTimes times;
  for (int round = 0; round < 16; ++round) {
    times.called.push_back(steady_nanoseconds(std::chrono::steady_clock::now()));
    static_cast<void>(comm.all_gather_bytes("round"));
    times.returned.push_back(steady_nanoseconds(std::chrono::steady_clock::now()));
  }
  const std::string first = comm.broadcast_bytes(serialize(times), 0);
  if (const auto rank = static_cast<std::size_t>(comm.rank()); boots[rank] == boots[0] && !boots[0].empty())
    return {};
  return clock_offset(deserialize_gather_times(first), times);
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
