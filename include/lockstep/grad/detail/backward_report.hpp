#pragma once

#include <algorithm>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

/// The per-rank error report, gathered when any rank finds a NaN-poisoned bucket view.
struct BackwardReport {
  std::vector<std::size_t> missing;   ///< parameters without a gradient on this rank
  std::optional<std::string> thrown;  ///< message of the error that this rank's backward threw
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
  constexpr std::size_t shown = 8;
  std::string text;
  for (std::size_t k = 0; k < std::min(indices.size(), shown); ++k)
    text += detail::formatted("{}parameter {} '{}'", k ? ", " : "", indices[k], parameters[indices[k]].name);
  if (indices.size() > shown) text += detail::formatted(" and {} more", indices.size() - shown);
  return text;
}

/// Describes the failures of all ranks, in equal words on every rank.
inline std::string failure_text(const std::vector<BackwardReport>& reports,
                                std::span<const ParameterEntry> parameters, const RankNames& name_of) {
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
  if (!thrown.empty()) return thrown + "; no rank kept its gradients";
  return "backward left gradients undefined on " + missing +
         "; let every parameter take part in the loss on every rank, take it out with requires_grad_(false), "
         "or allow it with DdpOptions::find_unused_parameters (or static_graph, where it is always the same)";
}

/// Throws on every rank if any rank has a report: `failure` if this rank has one, else PeerError or
/// GradientError with the reports of all ranks. A no-op if there is no report: NaN alone is not an error,
/// since a model may diverge. Collective and blocking.
template <Gathering C>
void throw_what_ranks_report(C& comm, const BackwardReport& mine, std::span<const ParameterEntry> parameters,
                             const std::exception_ptr& failure) {
  bool any = false, thrown = false;
  std::vector<BackwardReport> reports;
  for (const std::string& bytes : agree(comm, [&] { return serialize(mine); })) {
    any = any || !bytes.empty();
    thrown = thrown || reports.emplace_back(deserialize_report(bytes)).thrown;
  }
  if (!any) return;
  if (failure) std::rethrow_exception(failure);
  const std::string text = failure_text(reports, parameters, RankNames(comm));
  if (thrown && !mine.thrown) throw PeerError(text);
  throw GradientError(text);
}

}  // namespace lockstep::detail
