#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/lists.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::inline v0_1::detail {

/// The per-rank error report, gathered when any rank finds a NaN-poisoned bucket view.
struct BackwardReport {
  std::vector<std::size_t> missing;   ///< parameters without a gradient on this rank
  std::optional<std::string> thrown;  ///< message of the error that this rank's backward threw

  [[nodiscard]] bool empty() const { return missing.empty() && !thrown; }
};

inline std::string serialize(const BackwardReport& report) {
  std::string bytes;
  for (const std::size_t i : report.missing) bytes += std::to_string(i) + ' ';
  if (report.thrown) bytes += '!' + *report.thrown;
  return bytes;
}
inline BackwardReport deserialize_report(const std::string& bytes) {
  BackwardReport report;
  const std::size_t mark = std::min(bytes.find('!'), bytes.size());
  for (std::size_t at = 0; at < mark; at = bytes.find(' ', at) + 1)
    report.missing.push_back(std::stoul(bytes.substr(at)));
  if (mark < bytes.size()) report.thrown = bytes.substr(mark + 1);
  return report;
}

/// Formats a list such as "parameter 3 'fc.weight', parameter 4 'fc.bias' and 7 more".
inline std::string parameter_list(const std::vector<std::size_t>& indices,
                                  std::span<const ParameterEntry> parameters) {
  std::vector<std::string> names;
  for (const std::size_t i : indices)
    names.push_back(detail::formatted("parameter {} '{}'", i, parameters[i].name));
  return joined(names, ", ", ", ", 8);
}

/// Describes the failures of all ranks, in equal words on every rank. `outcome` states what a failure that
/// not every rank has learned of at once leaves behind.
inline std::string failure_text(const std::vector<BackwardReport>& reports,
                                std::span<const ParameterEntry> parameters, const RankNames& name_of,
                                std::string_view outcome = {}) {
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

/// Returns the reports of all ranks, by rank. Collective and blocking.
template <Communicator C>
std::vector<BackwardReport> gather_reports(C& comm, const BackwardReport& mine) {
  std::vector<BackwardReport> reports;
  for (const std::string& bytes : agree(comm, [&] { return serialize(mine); }))
    reports.push_back(deserialize_report(bytes));
  return reports;
}

/// Returns a PeerError on a rank whose backward did not throw while that of another rank did, else a GradientError. Its cause
/// is the rank that failed, unless several have.
inline std::exception_ptr failure_of(const std::vector<BackwardReport>& reports, const BackwardReport& mine,
                                     const RankNames& name_of, const std::string& text) {
  const bool thrown = std::any_of(reports.begin(), reports.end(),
                                  [](const BackwardReport& report) { return report.thrown.has_value(); });
  std::vector<int> failed;
  for (std::size_t i = 0; i < reports.size(); ++i)
    if (thrown ? reports[i].thrown.has_value() : !reports[i].empty()) failed.push_back(name_of(i));
  Failure failure{.rank = process_rank.load(), .cause = failed.size() == 1 ? failed[0] : -1, .message = text};
  if (!thrown || mine.thrown) return std::make_exception_ptr(GradientError(std::move(failure)));
  failure.kind = FailureKind::consequence;
  return std::make_exception_ptr(PeerError(std::move(failure)));
}

/// Throws on every rank if any rank has a report: `failure` if this rank has one, else PeerError or
/// GradientError. NaN alone is not an error, since a model may diverge. Collective and blocking.
template <Communicator C>
void throw_reported_failure(C& comm, const BackwardReport& mine, std::span<const ParameterEntry> parameters,
                            const std::exception_ptr& failure) {
  const std::vector<BackwardReport> reports = gather_reports(comm, mine);
  if (std::all_of(reports.begin(), reports.end(), [](const auto& report) { return report.empty(); })) return;
  if (failure) std::rethrow_exception(failure);
  const RankNames name_of(comm);
  std::rethrow_exception(failure_of(reports, mine, name_of, failure_text(reports, parameters, name_of)));
}

/// Returns the error of reports of a `backward`, counted from 1, that has returned on the ranks without a
/// report. Returns null if there is no report, and if every rank has one, since every rank has thrown its
/// own. The text ends with this rank's `own` later failure if that is not null. Collective and blocking.
template <Communicator C>
std::exception_ptr late_failure(C& comm, const BackwardReport& mine,
                                std::span<const ParameterEntry> parameters, std::size_t backward,
                                const std::exception_ptr& own) {
  const std::vector<BackwardReport> reports = gather_reports(comm, mine);
  const auto failed =
      std::count_if(reports.begin(), reports.end(), [](const auto& report) { return !report.empty(); });
  if (failed == 0 || failed == comm.size()) return nullptr;
  std::string text = failure_text(
      reports, parameters, RankNames(comm),
      detail::formatted("found after backward {} had returned on the other ranks: the parameters hold NaN if "
                        "an optimizer has stepped since, so resume from a checkpoint",
                        backward));
  if (own) text += "; then the next backward threw on this rank: " + first_line(own);
  return failure_of(reports, mine, RankNames(comm), text);
}

template <Communicator C>
std::string own_failure_text(C& comm, const BackwardReport& mine,
                             std::span<const ParameterEntry> parameters) {
  std::vector<BackwardReport> reports(static_cast<std::size_t>(comm.size()));
  reports.at(static_cast<std::size_t>(comm.rank())) = mine;
  return failure_text(reports, parameters, RankNames(comm),
                      "the other ranks throw at the end of their next backward");
}

/// Returns the error of a parameter whose gradient fired more often in a backward than expected.
inline std::string unexpected_text(std::size_t i, const ParameterEntry& parameter,
                                   const DdpOptions& options) {
  const std::string name = detail::formatted("parameter {} '{}'", i, parameter.name);
  if (parameter.skipped && !options.static_graph)
    return name +
           " was used by no rank in the first backward, so that skip_all_reduce_unused_params skips its "
           "reduction; leave that out";
  if (options.static_graph && parameter.expected == 0)
    return name +
           " took no part in the first backward and does in this one, while static_graph promises that every "
           "backward follows the graph of the first; leave it out";
  if (parameter.copied && parameter.fired == 0)
    return name +
           " was taken for unused, since the loss reaches it through a re-entrant backward (a checkpoint) "
           "alone; turn find_unused_parameters off, or use static_graph";
  if (options.find_unused_parameters && !options.static_graph)
    return name +
           " got more than one gradient in this backward, which find_unused_parameters cannot foresee in a "
           "re-entrant backward (a checkpoint); turn it off, or use static_graph";
  return detail::formatted(
      "{} got {} gradients in this backward and {} in the first, after which its bucket is reduced; keep the "
      "number of uses in re-entrant backwards (checkpoints) fixed",
      name, parameter.fired + 1, parameter.expected);
}

}  // namespace lockstep::inline v0_1::detail
