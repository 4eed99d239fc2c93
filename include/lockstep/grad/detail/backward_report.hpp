#pragma once

#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"

namespace lockstep::detail {

/// The per-rank error report, gathered when any rank finds a NaN-poisoned bucket view.
struct BackwardReport {
  std::vector<std::size_t> missing;   ///< parameters without a gradient on this rank
  std::optional<std::string> thrown;  ///< message of the error that this rank's backward threw
};

std::string serialize(const BackwardReport& report);

BackwardReport deserialize_report(const std::string& bytes);

/// Formats a list such as "parameter 3 'fc.weight', parameter 4 'fc.bias' and 7 more".
std::string parameter_list(const std::vector<std::size_t>& indices,
                           std::span<const ParameterEntry> parameters);

/// Describes the failures of all ranks, in equal words on every rank.
std::string failure_text(const std::vector<BackwardReport>& reports,
                         std::span<const ParameterEntry> parameters, const RankNames& name_of);

/// Throws on every rank if any rank has a report: `failure` if this rank has one, else PeerError or
/// GradientError with the reports of all ranks. A no-op if there is no report: NaN alone is not an error,
/// since a model may diverge. Collective and blocking.
template <Gathering C>
void throw_reported_failure(C& comm, const BackwardReport& mine, std::span<const ParameterEntry> parameters,
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

/// A parameter whose gradient fired more often in a backward than expected.
struct UnexpectedGradient {
  std::size_t parameter = 0;
  std::string name;
  int expected = 0;         ///< gradients expected in a backward
  int fired = 0;            ///< gradients that fired in this backward before
  bool copied = false;      ///< the gradient had been copied to its bucket before
  bool searches = false;    ///< find_unused_parameters searches the graph
  bool never_used = false;  ///< static_graph has recorded the parameter as unused
};

/// Returns the error text: the cause and a remedy.
std::string text_of(const UnexpectedGradient& it);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/backward_report-inl.hpp"
#endif
