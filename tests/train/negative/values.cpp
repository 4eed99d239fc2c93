// Values that a trainer cannot use, and values that it would need.
#include "train/negative/common.hpp"

struct NeedsArgumentsImpl : TinyNetImpl {
  explicit NeedsArgumentsImpl(int inputs) : TinyNetImpl(inputs, 3) {}
};
TORCH_MODULE(NeedsArguments);

struct ScheduleWithArguments {
  explicit ScheduleWithArguments(int) {}
  double rate_factor(std::int64_t, std::int64_t) { return 1; }
};

struct NoPolicy {};

void program(const lockstep::World& world) {
  Trainer<NeedsArguments, DistributedSampler, LocalComm, Fp32> no_model{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32, ScheduleWithArguments> no_extra{world};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32> stranger{world, {.epochs = 1}, NoPolicy()};
  Trainer<TinyNet, DistributedSampler, LocalComm, Fp32> sampler{
      world, {.epochs = 1}, DistributedSampler(8, 0, 1)};
}
