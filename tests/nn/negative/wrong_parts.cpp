// Batch norm of parts that do not fit: each is told by one sentence.
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"

struct NoModel {};
struct NoComm {};

void program(torch::nn::Sequential& model, lockstep::LocalComm& comm, NoModel& no_model, NoComm& no_comm) {
  lockstep::convert_sync_batchnorm(no_model, comm);
  lockstep::convert_sync_batchnorm(model, no_comm);
  lockstep::SyncBatchNormImpl<4> four_dimensions(torch::nn::BatchNormOptions(3));
}
