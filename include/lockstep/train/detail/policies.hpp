#pragma once

#include <concepts>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/detail/training_step.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/loss.hpp"
#include "lockstep/train/stream.hpp"

namespace lockstep::detail {

// The CommunicationHook among the extras, or AllReduceHook.
template <class... Extras>
struct ReductionAmong {
  using type = AllReduceHook;
};
template <class First, class... Rest>
struct ReductionAmong<First, Rest...> : ReductionAmong<Rest...> {};
template <ReductionPolicy First, class... Rest>
struct ReductionAmong<First, Rest...> {
  using type = First;
};
template <class... Extras>
using ReductionOf = typename ReductionAmong<Extras...>::type;

// Diagnoses a Trainer's template arguments with one static_assert each. The Trainer derives from this class,
// so that this message comes before the other errors that a wrong policy causes.
template <class ModelType, class SamplerType, class Comm, class PrecisionType, class... Extras>
struct CheckedPolicies {
  static_assert(
      Model<ModelType>,
      "lockstep: the first policy of a Trainer is the model: a class derived from torch::nn::Module or the "
      "holder that TORCH_MODULE makes of one");
  static_assert(
      Sampler<SamplerType>,
      "lockstep: the second policy of a Trainer is the sampler: a type that models lockstep::Sampler, such "
      "as lockstep::DistributedSampler");
  static_assert(
      Reducing<Comm> && Gathering<Comm>,
      "lockstep: the third policy of a Trainer is the communicator: a type that models lockstep::Reducing "
      "and lockstep::Gathering, such as lockstep::GlooComm or lockstep::LocalComm");
  static_assert(
      Precision<PrecisionType>,
      "lockstep: the fourth policy of a Trainer is the precision: a type that models lockstep::Precision, "
      "such as lockstep::Fp32");
  static_assert(((concepts_modelled<Extras> >= 1) && ...),
                "lockstep: an extra of a Trainer models none of OptimizerFactory, Schedule, GradientCheck, "
                "GradientCallback, StepCallback, EpochStartCallback, EpochCallback and CommunicationHook");
  static_assert(
      ((concepts_modelled<Extras> <= 1) && ...),
      "lockstep: an extra of a Trainer models more than one of OptimizerFactory, Schedule, GradientCheck, "
      "GradientCallback, StepCallback, EpochStartCallback, EpochCallback and CommunicationHook: split it "
      "into one each");
  static_assert(
      !(ScalingPrecision<PrecisionType> && (GradientCheck<Extras> || ...)),
      "lockstep: a GradientCheck, such as CheckFinite, refuses gradients that are not finite, which a "
      "precision that scales losses, such as Fp16, meets as part of its work: leave the check out");
  static_assert(
      !ScalingPrecision<PrecisionType> || ReductionOf<Extras...>::propagates_nan ||
          AgreeingPrecision<PrecisionType, Comm>,
      "lockstep: a communication hook that keeps infinities from the other ranks, such as PowerSgdHook, "
      "needs a precision whose ranks agree on the steps to leave out: give it agree(optimizer, comm), as "
      "Fp16 has");
  static_assert(none_twice<Extras...>,
                "lockstep: two extras of a Trainer model the same concept: give one of each kind");
};

// Diagnoses the arguments of `fit` with one static_assert each.
template <class Model, class Data, class Loss, class... Callbacks>
struct CheckedFit {
  static constexpr bool good() {
    constexpr bool trainable = Dataset<Data> || BatchStream<Data>;
    static_assert(
        trainable,
        "lockstep: fit trains on a dataset, which has size() and get(i) or get_batch(indices), or on a "
        "stream, whose next() returns a std::optional batch");
    if constexpr (trainable) {
      using Batch = BatchFrom<Data>;
      constexpr bool callable = std::invocable<Loss&, Model&, Batch&>;
      constexpr bool a_loss = LossFunction<Loss, Model, Batch>;
      constexpr bool all_callbacks = (Callback<Callbacks> && ...);
      static_assert(
          callable,
          "lockstep: the loss is called as loss(model, batch), with the Trainer's model and a batch of the "
          "dataset");
      static_assert(
          a_loss || !callable,
          "lockstep: the loss returns neither a tensor, the mean over the batch, nor a Mean{sum, count}");
      static_assert(all_callbacks,
                    "lockstep: after the loss, fit takes callbacks, such as OnStep{f}, OnEpochStart{f}, "
                    "OnEpoch{f} and OnGradients{f}");
      return a_loss && all_callbacks;
    } else {
      return false;
    }
  }
};

// A placeholder for a Trainer's members when its policies are wrong. Accepts any constructor arguments, so
// that the static_assert above is the only error.
struct Nothing {
  template <class... Given>
  explicit Nothing(Given&&...) {}
};
// The types of a Trainer's members, from its policies.
template <class ModelType, class Comm, class PrecisionType, class... Extras>
struct KeptOf {
  using Model = Nothing;
  using Ddp = Nothing;
  using Step = Nothing;
};
template <Model ModelType, class Comm, class PrecisionType, class... Extras>
requires Reducing<Comm> && Gathering<Comm>
struct KeptOf<ModelType, Comm, PrecisionType, Extras...> {
  using Model = ModelHandle<ModelType>;
  using Ddp = DistributedDataParallel<ModelType, Comm, ReductionOf<Extras...>>;
  using Step = TrainingStep<ModelType, Comm, torch::optim::Optimizer, PrecisionType, ReductionOf<Extras...>>;
};

}  // namespace lockstep::detail
