#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"

namespace lockstep::inline v0_1::detail {

/// One step of a trace, with the steady clock of its rank.
struct TracedStep {
  std::int64_t epoch = 0, step = 0;
  double samples = 0;
  std::vector<PhaseSpan> spans;
  std::chrono::steady_clock::time_point began;  // of the backward that reduced
  std::vector<BucketReport> buckets;
};

TracedStep traced(const StepReport& report, const StepProfile& profile);

/// The steps that a rank has traced so far. Times are nanoseconds of the wall clock.
class TraceRecorder {
 public:
  void add(const StepReport& report, const StepProfile& profile) {
    steps_.push_back(traced(report, profile));
  }
  [[nodiscard]] bool empty() const { return steps_.empty(); }
  [[nodiscard]] std::size_t size() const { return steps_.size(); }

  /// Returns the begin of the first step, 0 without a step.
  [[nodiscard]] std::int64_t origin() const;

  /// Returns this rank's events as the elements of a JSON array, without its brackets. `origin` is the time 0
  /// of the trace.
  [[nodiscard]] std::string events(int rank, std::int64_t origin) const;

 private:
  std::vector<TracedStep> steps_;
};

/// Returns the trace file of all ranks' events. Ranks without an event have an empty text.
std::string trace_file(const std::vector<std::string>& events);

/// Returns a lane for each bucket, such that buckets in flight at one time have different lanes.
std::vector<int> bucket_lanes(const std::vector<BucketReport>& buckets);

}  // namespace lockstep::inline v0_1::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/trace_recorder-inl.hpp"
#endif
