// Trainers of which one policy is wrong: each is told by one sentence.
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/precision/grad_scaler.hpp"
#include "lockstep/train/check_finite.hpp"
#include "train/negative/common.hpp"

struct NoModel {};
struct NoExtra {};
struct TwoExtras {
  void on_step(const lockstep::StepReport&) {}
  void on_epoch(const lockstep::EpochReport&) {}
};
struct ChecksAndHooks : lockstep::CheckFinite {
  void on_gradients(const lockstep::Gradients&) {}
};

struct ScalesAlone : Fp32 {
  void unscale(torch::optim::Optimizer&) {}
};

void program(const lockstep::World& world) {
  Trainer<NoModel, DistributedSampler, LocalComm, Fp32> wrong_model{world};
  Trainer<TinyNet, LocalComm, LocalComm, Fp32> wrong_sampler{world};
  Trainer<TinyNet, DistributedSampler, Fp32, Fp32> wrong_comm{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, float> wrong_precision{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, NoExtra> extra_of_nothing{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, TwoExtras> extra_of_two_kinds{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, ChecksAndHooks> check_and_hook{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, lockstep::Fp16, lockstep::CheckFinite> check_and_scale{
      world};
  Trainer<TinyNet, DistributedSampler, LocalComm, ScalesAlone, lockstep::PowerSgdHook> nobody_agrees{world};
  Trainer extra_twice{world,
                      {.epochs = 1},
                      TinyNet(),
                      lockstep::OnStep{[](const auto&) {}},
                      lockstep::OnStep{[](const auto&) {}}};
}
