// DistributedDataParallel of parts that do not fit: each is told by one sentence.
#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"

using lockstep::DistributedDataParallel;

struct NoHook {};

struct NoComm {};
struct NoModel {};

void program(torch::nn::Linear& model, lockstep::CpuComm& comm, NoComm& no_comm, NoModel& no_model) {
  DistributedDataParallel wrong_hook{model, comm, {}, NoHook{}};
  DistributedDataParallel wrong_comm{model, no_comm};
  DistributedDataParallel wrong_model{no_model, comm};
}
