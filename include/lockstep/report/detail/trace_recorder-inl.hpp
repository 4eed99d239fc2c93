#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string_view>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/json.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/report/detail/trace_recorder.hpp"
#include "lockstep/world/detail/socket.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE ClockOffset clock_offset(const GatherTimes& first, const GatherTimes& own) {
  std::int64_t low = std::numeric_limits<std::int64_t>::min(),
               high = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < std::min(first.called.size(), own.called.size()); ++i) {
    low = std::max(low, own.called[i] - first.returned[i]);
    high = std::min(high, own.returned[i] - first.called[i]);
  }
  if (high < low) std::swap(low, high);  // the clocks drifted apart by more than a round trip
  return {low + (high - low) / 2, (high - low + 1) / 2};
}

LOCKSTEP_INLINE std::string serialize(const GatherTimes& times) {
  std::string text;
  for (std::size_t i = 0; i < times.called.size(); ++i)
    text += formatted("{} {} ", times.called[i], times.returned[i]);
  return text;
}

LOCKSTEP_INLINE GatherTimes deserialize_gather_times(const std::string& bytes) {
  GatherTimes times;
  std::istringstream text(bytes);
  for (std::int64_t called = 0, returned = 0; text >> called >> returned;) {
    times.called.push_back(called);
    times.returned.push_back(returned);
  }
  return times;
}

LOCKSTEP_INLINE std::string clock_name() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  if (!(file >> boot)) return boot;
  struct ::stat time_namespace {};  // stays 0 on a kernel that has no time namespaces
  static_cast<void>(::stat("/proc/self/ns/time", &time_namespace));
  return formatted("{}/{}", boot, time_namespace.st_ino);
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
  return steps_.empty() ? 0 : steady_nanoseconds(steps_.front().spans.front().begin);
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

LOCKSTEP_INLINE std::string TraceRecorder::events(int rank, const ClockOffset& clock,
                                                  std::int64_t origin) const {
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
        rank, thread(lane), name, static_cast<double>(begin - clock.offset - origin) / 1e3,
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
  meta("process_labels", step_lane, "labels",
       json_string(formatted("clock error {:.3f} us", static_cast<double>(clock.error) / 1e3)));

  for (const TracedStep& step : steps_) {
    if (step.spans.empty()) continue;
    complete(formatted("step {}", step.step), step_lane, steady_nanoseconds(step.spans.front().begin),
             steady_nanoseconds(step.spans.back().end),
             formatted("\"epoch\":{},\"step\":{},\"samples\":{}", step.epoch, step.step, step.samples));
    for (const PhaseSpan& span : step.spans)
      if (span.end - span.begin >= std::chrono::microseconds(1))  // the empty ones would only be in the way
        complete(names[static_cast<std::size_t>(span.phase)], phase_lane, steady_nanoseconds(span.begin),
                 steady_nanoseconds(span.end), formatted("\"step\":{}", step.step));
    const auto lane_of = bucket_lanes(step.buckets);
    const std::int64_t began = steady_nanoseconds(step.began);
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

}  // namespace lockstep::detail
