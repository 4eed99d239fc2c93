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
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

/// The per-rank error report, gathered when any rank finds a NaN-poisoned bucket view.
struct BackwardReport {
  std::vector<std::size_t> missing;   ///< parameters without a gradient on this rank
  std::optional<std::string> thrown;  ///< message of the error that this rank's backward threw

  [[nodiscard]] bool empty() const { return missing.empty() && !thrown; }
};

std::string serialize(const BackwardReport& report);

BackwardReport deserialize_report(const std::string& bytes);

/// Formats a list such as "parameter 3 'fc.weight', parameter 4 'fc.bias' and 7 more".
std::string parameter_list(const std::vector<std::size_t>& indices,
                           std::span<const ParameterEntry> parameters);

/// Describes the failures of all ranks, in equal words on every rank. `outcome` states what a failure that
/// not every rank has learned of at once leaves behind.
std::string failure_text(const std::vector<BackwardReport>& reports,
                         std::span<const ParameterEntry> parameters, const RankNames& name_of,
                         std::string_view outcome = {});

/// Returns the reports of all ranks, by rank. Collective and blocking.
template <Communicator C>
std::vector<BackwardReport> gather_reports(C& comm, const BackwardReport& mine) {
  std::vector<BackwardReport> reports;
  for (const std::string& bytes : agree(comm, [&] { return serialize(mine); }))
    reports.push_back(deserialize_report(bytes));
  return reports;
}

/// Returns a PeerError on a rank whose backward did not throw while that of another rank did, else a
/// GradientError.
std::exception_ptr failure_of(const std::vector<BackwardReport>& reports, const BackwardReport& mine,
                              const std::string& text);

/// Throws on every rank if any rank has a report: `failure` if this rank has one, else PeerError or
/// GradientError with the reports of all ranks. A no-op if there is no report: NaN alone is not an error,
/// since a model may diverge. Collective and blocking.
template <Communicator C>
void throw_reported_failure(C& comm, const BackwardReport& mine, std::span<const ParameterEntry> parameters,
                            const std::exception_ptr& failure) {
  const std::vector<BackwardReport> reports = gather_reports(comm, mine);
  if (std::all_of(reports.begin(), reports.end(), [](const auto& report) { return report.empty(); })) return;
  if (failure) std::rethrow_exception(failure);
  std::rethrow_exception(failure_of(reports, mine, failure_text(reports, parameters, RankNames(comm))));
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
      detail::formatted(
          "found after backward {} had returned on the other ranks: the parameters hold NaN if an "
          "optimizer has stepped since, so resume from a checkpoint",
          backward));
  if (own) text += "; then the next backward threw on this rank: " + first_line(own);
  return failure_of(reports, mine, text);
}

/// Returns the text of this rank's own failure, of which the other ranks learn later.
template <Communicator C>
std::string own_failure_text(C& comm, const BackwardReport& mine,
                             std::span<const ParameterEntry> parameters) {
  std::vector<BackwardReport> reports(static_cast<std::size_t>(comm.size()));
  reports.at(static_cast<std::size_t>(comm.rank())) = mine;
  return failure_text(reports, parameters, RankNames(comm),
                      "the other ranks throw at the end of their next backward");
}

/// Returns the error text for parameter i, whose gradient fired more often in a backward than expected: the
/// cause and a remedy.
std::string unexpected_text(std::size_t i, const ParameterEntry& parameter, const DdpOptions& options);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/backward_report-inl.hpp"
#endif
