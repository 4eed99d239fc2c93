#pragma once

#include <algorithm>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/grad/ddp_options.hpp"

namespace lockstep {

LOCKSTEP_INLINE std::vector<std::pair<std::string, double>> fields(const DdpReport& report) {
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

LOCKSTEP_INLINE std::string table(const DdpReport& report) {
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
