// Optimizers, groups and schedules of parts that do not fit: each is told by one sentence.
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/options.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/optim/zero_redundancy.hpp"

using lockstep::LocalComm;
using lockstep::ZeroRedundancyOptimizer;
using Parameters = std::vector<torch::Tensor>;

struct NoComm {};

void program(const Parameters& parameters, LocalComm& comm, NoComm& no_comm) {
  const auto sgd = [](Parameters all) { return lockstep::SGD(std::move(all)); };
  ZeroRedundancyOptimizer wrong_comm{parameters, no_comm, sgd};
  ZeroRedundancyOptimizer wrong_maker{parameters, comm, [](Parameters all) { return all.size(); }};
  ZeroRedundancyOptimizer sharded_twice{
      parameters, comm,
      [&](Parameters all) { return ZeroRedundancyOptimizer<LocalComm>(std::move(all), comm, sgd); }};
  lockstep::parameter_group(parameters, torch::optim::SGDOptions(0.1));
  lockstep::PerStep per_step{0.1};
  lockstep::PerEpoch per_epoch{std::string("cosine")};
  lockstep::SequentialLR then{lockstep::ConstantLR{}, 10, 0.1};
}
