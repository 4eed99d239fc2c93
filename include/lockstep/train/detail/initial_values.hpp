#pragma once

#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::detail {

/// Logs one warning if the ranks have constructed the model with different values. DistributedDataParallel
/// then broadcasts rank 0's, as Python does, and the other ranks' are lost. Call it before that. Collective;
/// sends 8 bytes per parameter.
template <Communicator Comm>
void warn_of_unequal_values(const torch::nn::Module& module, const DdpOptions& options, Comm& comm,
                            const World& world) {
  if (comm.size() == 1) return;
  std::vector<NamedTensor> parameters = unique_parameters(module);
  std::erase_if(parameters, [&](const NamedTensor& parameter) {
    return std::find(options.ignored.begin(), options.ignored.end(), parameter.name) != options.ignored.end();
  });
  const std::vector<std::string> digests =
      agree(comm, [&] { return parameters.empty() ? std::string() : digest_of(parameters); });
  // Every rank has taken part in the collective, whatever its options: DistributedDataParallel compares them,
  // and the models.
  if (!options.init_sync || comm.rank() != 0) return;
  std::size_t first = 0, culprit = 0, differing = 0;
  for (const std::string& sums : digests)
    if (sums.size() != digests[0].size()) return;  // another model, which is an error
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto other = std::find_if(digests.begin(), digests.end(), [&](const std::string& sums) {
      return sums.compare(8 * i, 8, digests[0], 8 * i, 8) != 0;
    });
    if (other == digests.end() || differing++ > 0) continue;
    first = i;
    culprit = static_cast<std::size_t>(other - digests.begin());
  }
  if (differing == 0) return;
  // In a group without world rank 0, the group's rank 0 logs.
  const Log log = world.rank() == 0 ? world.log : world.log.all();
  const RankNames name_of(comm);
  log.warning(
      "the model's initial values differ between the ranks ({} of {} parameters, first '{}' on rank {}): "
      "rank {}'s are used; call torch::manual_seed with one seed on every rank before constructing the "
      "model, or pass std::in_place_type of it, so that the Trainer seeds and constructs it",
      differing, parameters.size(), parameters[first].name, name_of(culprit), name_of(0));
}

}  // namespace lockstep::detail
