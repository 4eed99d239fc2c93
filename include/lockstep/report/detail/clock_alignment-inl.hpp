#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <sstream>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/report/detail/clock_alignment.hpp"

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

}  // namespace lockstep::detail
