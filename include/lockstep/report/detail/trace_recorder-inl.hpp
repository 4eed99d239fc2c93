#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>
#include <string_view>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/report/detail/trace_recorder.hpp"
#include "lockstep/world/detail/socket.hpp"

namespace lockstep::inline v0_1::detail {

/// Returns the wall-clock time of `time` in nanoseconds. One offset for the process, so that a step of the
/// wall clock does not reorder events.
LOCKSTEP_INLINE std::int64_t wall_nanoseconds(std::chrono::steady_clock::time_point time) {
  using std::chrono::nanoseconds;
  static const nanoseconds offset =
      std::chrono::duration_cast<nanoseconds>(std::chrono::system_clock::now().time_since_epoch() -
                                              std::chrono::steady_clock::now().time_since_epoch());
  return (std::chrono::duration_cast<nanoseconds>(time.time_since_epoch()) + offset).count();
}

LOCKSTEP_INLINE TracedStep traced(const StepReport& report, const StepProfile& profile) {
  return {report.epoch,
          report.step,
          profile.samples,
          {profile.spans.begin(), profile.spans.end()},
          profile.reduction.began,
          profile.reduction.buckets};
}

LOCKSTEP_INLINE std::int64_t TraceRecorder::origin() const {
  return steps_.empty() ? 0 : wall_nanoseconds(steps_.front().spans.front().begin);
}

LOCKSTEP_INLINE std::vector<int> bucket_lanes(const std::vector<BucketReport>& buckets) {
  std::vector<int> lanes(buckets.size(), 0);
  std::vector<double> free;  // by lane: when its last bucket completes
  std::vector<std::size_t> order(buckets.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return buckets[a].launched < buckets[b].launched; });
  for (const std::size_t b : order) {
    const auto lane =
        std::find_if(free.begin(), free.end(), [&](double until) { return until <= buckets[b].launched; });
    lanes[b] = static_cast<int>(lane - free.begin());
    if (lane == free.end())
      free.push_back(buckets[b].completed);
    else
      *lane = buckets[b].completed;
  }
  return lanes;
}

LOCKSTEP_INLINE std::string TraceRecorder::events(int rank, std::int64_t origin) const {
  constexpr int step_lane = 0, phase_lane = 1, first_bucket_lane = 2;
  constexpr std::array<std::string_view, step_phases> names{"data", "forward", "backward", "communication",
                                                            "optimizer"};
  // Perfetto takes thread 0 for the process's main thread, and the thread of the process's number as well:
  // lanes of those numbers would be drawn in one track.
  const auto thread = [&](int lane) { return std::int64_t{1000} * (rank + 1) + lane; };
  std::string text;
  const auto meta = [&](std::string_view what, int lane, std::string_view key, const std::string& value) {
    text += formatted("{}{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"args\":{{\"{}\":{}}}}}",
                      text.empty() ? "" : ",\n", rank, thread(lane), what, key, value);
  };
  const auto complete = [&](std::string_view name, int lane, std::int64_t begin, std::int64_t end,
                            const std::string& arguments) {
    text += formatted(
        ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"ts\":{:.3f},\"dur\":{:.3f},\"args\":{{{}}}"
        "}}",
        rank, thread(lane), name, static_cast<double>(begin - origin) / 1e3,
        static_cast<double>(end - begin) / 1e3, arguments);
  };
  meta("process_name", step_lane, "name", json_string(formatted("rank {} ({})", rank, host_name())));
  meta("process_sort_index", step_lane, "sort_index", formatted("{}", rank));
  meta("thread_name", step_lane, "name", "\"step\"");
  meta("thread_name", phase_lane, "name", "\"phases\"");
  int lanes = 1;
  for (const TracedStep& step : steps_)
    for (const int lane : bucket_lanes(step.buckets)) lanes = std::max(lanes, lane + 1);
  for (int lane = 0; lane < lanes; ++lane)
    meta("thread_name", first_bucket_lane + lane, "name",
         lane == 0 ? "\"all-reduce buckets\"" : formatted("\"all-reduce buckets ({})\"", lane + 1));
  for (int lane = 0; lane < first_bucket_lane + lanes; ++lane)
    meta("thread_sort_index", lane, "sort_index", formatted("{}", lane));

  for (const TracedStep& step : steps_) {
    if (step.spans.empty()) continue;
    complete(formatted("step {}", step.step), step_lane, wall_nanoseconds(step.spans.front().begin),
             wall_nanoseconds(step.spans.back().end),
             formatted("\"epoch\":{},\"step\":{},\"samples\":{}", step.epoch, step.step, step.samples));
    for (const PhaseSpan& span : step.spans)
      if (span.end - span.begin >= std::chrono::microseconds(1))  // the empty ones would only be in the way
        complete(names[static_cast<std::size_t>(span.phase)], phase_lane, wall_nanoseconds(span.begin),
                 wall_nanoseconds(span.end), formatted("\"step\":{}", step.step));
    const auto lane_of = bucket_lanes(step.buckets);
    const std::int64_t began = wall_nanoseconds(step.began);
    for (std::size_t b = 0; b < step.buckets.size(); ++b) {
      const BucketReport& bucket = step.buckets[b];
      if (bucket.completed <= bucket.launched) continue;  // its times are not known
      const auto at = [&](double seconds) { return began + static_cast<std::int64_t>(seconds * 1e9); };
      complete(formatted("bucket {} of {}", b + 1, step.buckets.size()), first_bucket_lane + lane_of[b],
               at(bucket.launched), at(bucket.completed),
               formatted("\"step\":{},\"bytes\":{},\"parameters\":{},\"sparse\":{}", step.step, bucket.bytes,
                         bucket.parameters.size(), bucket.sparse));
    }
  }
  return text;
}

LOCKSTEP_INLINE std::string trace_file(const std::vector<std::string>& events) {
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  bool first = true;
  for (const std::string& of_rank : events) {
    if (of_rank.empty()) continue;
    if (!first) text += ",\n";
    first = false;
    text += of_rank;
  }
  return text + "\n]}\n";
}

}  // namespace lockstep::inline v0_1::detail
