#pragma once

#include <torch/torch.h>

#include "lockstep/grad/hooks/post_local_sgd_hook.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/interchange/run_state_dict.hpp"
#include "lockstep/interchange/safetensors.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/nn/activation_checkpoint.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/report/metrics_files.hpp"
#include "lockstep/report/run_report.hpp"
#include "lockstep/report/tensorboard.hpp"
#include "lockstep/report/trace.hpp"

/// The names that the pages' statements use without declaring them. The statements are compiled, never linked.
namespace docs {

using lockstep::World;

struct NetImpl : torch::nn::Module {
  NetImpl() : linear(register_module("linear", torch::nn::Linear(2, 3))) {}
  torch::Tensor forward(const torch::Tensor& x) { return linear(x); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Net);

/// A loss, for a Trainer of any model.
struct CrossEntropy {
  template <class Model, class Batch>
  torch::Tensor operator()(Model& model, const Batch& batch) const {
    return torch::cross_entropy_loss(model->forward(batch.data), batch.target);
  }
};
using NetTrainer = lockstep::Trainer<Net, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32>;

extern int argc;
extern char** argv;
extern const World& world;
extern lockstep::CpuComm& comm;
extern Net model;
extern lockstep::TensorDataset data, test;
extern CrossEntropy loss;
extern NetTrainer& trainer;
extern lockstep::TrainerOptions options;
extern lockstep::DistributedDataParallel<Net, lockstep::CpuComm>& ddp;
extern lockstep::DataLoader<lockstep::TensorDataset, lockstep::DistributedSampler>& loader;
extern torch::optim::Optimizer& optimizer;

}  // namespace docs
