// Trainers of which one policy is wrong: each is told by one sentence.
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/extras.hpp"
#include "train/negative/common.hpp"

struct NoExtra {};
struct ChecksAndHooks : lockstep::CheckFinite {
  void on_gradients(const lockstep::Gradients&) {}
};

struct ScalesAlone : Fp32 {
  void unscale(torch::optim::Optimizer&) {}
};

void program(const lockstep::World& world) {
  Trainer<DistributedSampler, LocalComm> no_model{world};
  Trainer<TinyNet, LocalComm, LocalComm, Fp32> two_comms{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, float> stranger{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, NoExtra> extra_of_nothing{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, ChecksAndHooks> check_and_hook{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, lockstep::Fp16, lockstep::CheckFinite> check_and_scale{
      world};
  Trainer<TinyNet, DistributedSampler, LocalComm, ScalesAlone, lockstep::PowerSgdHook> nobody_agrees{world};
  Trainer callback{world, {.epochs = 1}, TinyNet(), lockstep::OnStep{[](const auto&) {}}};
}
