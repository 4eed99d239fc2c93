// Values that a trainer cannot use, and values that it would need.
#include "train/negative/common.hpp"

struct NeedsArgumentsImpl : TinyNetImpl {
  explicit NeedsArgumentsImpl(int inputs) : TinyNetImpl(inputs, 3) {}
};
TORCH_MODULE(NeedsArguments);

struct StepCallbackWithArguments {
  explicit StepCallbackWithArguments(int) {}
  void on_step(const lockstep::StepReport&) {}
};

void program(const lockstep::World& world) {
  Trainer<NeedsArguments, DistributedSampler, LocalComm, Fp32> no_model{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, StepCallbackWithArguments> no_extra{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32> stranger{world, {.epochs = 1}, 3};
}
