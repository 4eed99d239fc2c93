#pragma once

#include <algorithm>

#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/grad/detail/backward_report.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string serialize(const BackwardReport& report) {
  std::string bytes;
  for (const std::size_t i : report.missing) bytes += std::to_string(i) + ' ';
  if (report.thrown) bytes += '!' + *report.thrown;
  return bytes;
}

LOCKSTEP_INLINE BackwardReport deserialize_report(const std::string& bytes) {
  BackwardReport report;
  const std::size_t mark = std::min(bytes.find('!'), bytes.size());
  for (std::size_t at = 0; at < mark; at = bytes.find(' ', at) + 1)
    report.missing.push_back(std::stoul(bytes.substr(at)));
  if (mark < bytes.size()) report.thrown = bytes.substr(mark + 1);
  return report;
}

LOCKSTEP_INLINE std::string parameter_list(const std::vector<std::size_t>& indices,
                                           std::span<const ParameterEntry> parameters) {
  std::vector<std::string> names;
  for (const std::size_t i : indices)
    names.push_back(detail::formatted("parameter {} '{}'", i, parameters[i].name));
  return joined(names, ", ", ", ", 8);
}

LOCKSTEP_INLINE std::string failure_text(const std::vector<BackwardReport>& reports,
                                         std::span<const ParameterEntry> parameters, const RankNames& name_of,
                                         std::string_view outcome) {
  std::string thrown, missing;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    const BackwardReport& report = reports[i];
    const int rank = name_of(i);
    if (report.thrown)
      thrown += detail::formatted("{}backward threw on rank {}: {}", thrown.empty() ? "" : "; ", rank,
                                  *report.thrown);
    else if (report.missing.size() == parameters.size())
      missing += detail::formatted("{}rank {} (none of the parameters took part)",
                                   missing.empty() ? "" : "; ", rank);
    else if (!report.missing.empty())
      missing += detail::formatted("{}rank {} ({})", missing.empty() ? "" : "; ", rank,
                                   parameter_list(report.missing, parameters));
  }
  if (!thrown.empty())
    return detail::formatted("{}; {}", thrown, outcome.empty() ? "no rank kept its gradients" : outcome);
  return detail::formatted(
      "backward left gradients undefined on {}; let every parameter take part in the loss on every rank, "
      "take it out with requires_grad_(false), or allow it with DdpOptions::find_unused_parameters (or "
      "static_graph, where it is always the same){}{}",
      missing, outcome.empty() ? "" : "; ", outcome);
}

LOCKSTEP_INLINE std::string late_outcome(std::size_t backward) {
  return detail::formatted(
      "found after backward {} had returned on the other ranks: the parameters hold NaN if an optimizer has "
      "stepped since, so resume from a checkpoint",
      backward);
}

LOCKSTEP_INLINE std::exception_ptr failure_of(const std::vector<BackwardReport>& reports,
                                              const BackwardReport& mine, const std::string& text) {
  const bool thrown = std::any_of(reports.begin(), reports.end(),
                                  [](const BackwardReport& report) { return report.thrown.has_value(); });
  if (thrown && !mine.thrown) return std::make_exception_ptr(PeerError(text));
  return std::make_exception_ptr(GradientError(text));
}

LOCKSTEP_INLINE std::string text_of(const UnexpectedGradient& it) {
  const std::string name = detail::formatted("parameter {} '{}'", it.parameter, it.name);
  if (it.never_used)
    return name +
           " took no part in the first backward and does in this one, while static_graph promises that every "
           "backward follows the graph of the first; leave it out";
  if (it.copied && it.fired == 0)
    return name +
           " was taken for unused, since the loss reaches it through a re-entrant backward (a checkpoint) "
           "alone; turn find_unused_parameters off, or use static_graph";
  if (it.searches)
    return name +
           " got more than one gradient in this backward, which find_unused_parameters cannot foresee in a "
           "re-entrant backward (a checkpoint); turn it off, or use static_graph";
  return detail::formatted(
      "{} got {} gradients in this backward and {} in the first, after which its bucket is reduced; keep the "
      "number of uses in re-entrant backwards (checkpoints) fixed",
      name, it.fired + 1, it.expected);
}

}  // namespace lockstep::detail
