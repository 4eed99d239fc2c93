#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"

namespace lockstep {

/// One bucket of this rank's last reduction.
struct BucketReport {
  std::vector<std::size_t> parameters;  ///< indices, in memory order
  std::size_t bytes = 0;                ///< 0 for a sparse bucket, whose number of rows varies
  bool sparse = false;
  double launched = 0;  ///< seconds from the start of backward to the launch of its reduction
};

/// Statistics of this rank's last reduction, and totals over all reductions. Times are in seconds of host
/// time.
struct DdpReport {
  std::size_t reductions = 0;  ///< completed so far
  std::string hook;
  std::vector<BucketReport> buckets;
  /// Indices into the parameters that require grad: in the order of the last reduction's gradients, and those
  /// that took no part in the last backward on this rank, which `unused_names` names.
  std::vector<std::size_t> ready_order, unused;
  std::vector<std::string> unused_names;
  double forward = 0;        ///< from the last `before_forward` to the start of backward
  double backward = 0;       ///< from the start of backward to the last gradient
  double communication = 0;  ///< from the launch of the first bucket to the completion of the last
  double overlap = 0;        ///< the part of `communication` that overlaps backward
  std::uint64_t bytes = 0;   ///< passed to collectives by the last reduction
  std::uint64_t bytes_so_far = 0;

  /// Returns the communication time that backward does not hide.
  [[nodiscard]] double exposed() const { return communication - overlap; }
};

/// Time points of one reduction.
struct ReductionTimes {
  using Clock = std::chrono::steady_clock;
  Clock::time_point forward, backward, gradients, first_launch, end;
};

/// Returns names and values for a log. Each name is one word.
inline std::vector<std::pair<std::string, double>> fields(const DdpReport& report) {
  return {{"reductions", static_cast<double>(report.reductions)},
          {"buckets", static_cast<double>(report.buckets.size())},
          {"unused_parameters", static_cast<double>(report.unused.size())},
          {"forward_s", report.forward},
          {"backward_s", report.backward},
          {"communication_s", report.communication},
          {"overlap_s", report.overlap},
          {"exposed_s", report.exposed()},
          {"bytes", static_cast<double>(report.bytes)},
          {"bytes_so_far", static_cast<double>(report.bytes_so_far)}};
}

/// Returns a human-readable table of several lines, without a trailing newline.
inline std::string table(const DdpReport& report) {
  std::string text = detail::formatted(
      "{} reductions so far, {:.1f} MiB; hook {}; the last:\n"
      "forward {:.2f} ms, backward {:.2f} ms, communication {:.2f} ms, of which {:.2f} ms hidden by "
      "backward\n"
      "bucket  parameters         KiB  launched after",
      report.reductions, static_cast<double>(report.bytes_so_far) / (1 << 20), report.hook,
      1e3 * report.forward, 1e3 * report.backward, 1e3 * report.communication, 1e3 * report.overlap);
  for (std::size_t b = 0; b < report.buckets.size(); ++b) {
    const BucketReport& bucket = report.buckets[b];
    text += detail::formatted(
        "\n{:>6}  {:>10}  {:>10}  {:>11.2f} ms", b, bucket.parameters.size(),
        bucket.sparse ? "sparse" : detail::formatted("{:.1f}", static_cast<double>(bucket.bytes) / 1024),
        1e3 * bucket.launched);
  }
  if (!report.unused.empty()) {
    constexpr std::size_t shown = 8;
    text += "\nwithout a gradient here:";
    for (std::size_t k = 0; k < std::min(report.unused.size(), shown); ++k)
      text += detail::formatted("{} '{}'", k ? "," : "", report.unused_names.at(k));
    if (report.unused.size() > shown) text += detail::formatted(" and {} more", report.unused.size() - shown);
  }
  return text;
}

}  // namespace lockstep
