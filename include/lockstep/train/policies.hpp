#pragma once

#include "lockstep/comm/communicator.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/model_handle.hpp"

namespace lockstep::detail {

// Says in one sentence what is wrong with a Trainer's template arguments. Each check stands on its own; the
// trainer derives from this, so that they come before whatever else a wrong policy would break.
template <class ModelType, class SamplerType, class Comm, class PrecisionType, class... Extras>
struct CheckedPolicies {
  static constexpr bool model = lockstep::Model<ModelType>;
  static constexpr bool sampler = Sampler<SamplerType>;
  static constexpr bool comm = Reducing<Comm> && Gathering<Comm>;
  static constexpr bool precision = Precision<PrecisionType>;
  static constexpr bool named = ((concepts_modelled<Extras> == 1) && ...);
  static constexpr bool unambiguous = ((concepts_modelled<Extras> <= 1) && ...);
  static constexpr bool unique = none_twice<Extras...>;
  static constexpr bool all = model && sampler && comm && precision && named && unique;

  static_assert(
      model,
      "lockstep: the first policy of a Trainer is the model: a class derived from torch::nn::Module or the "
      "holder that TORCH_MODULE makes of one");
  static_assert(
      sampler,
      "lockstep: the second policy of a Trainer is the sampler: a type that models lockstep::Sampler, such "
      "as lockstep::DistributedSampler");
  static_assert(
      comm,
      "lockstep: the third policy of a Trainer is the communicator: a type that models lockstep::Reducing "
      "and lockstep::Gathering, such as lockstep::GlooComm or lockstep::LocalComm");
  static_assert(
      precision,
      "lockstep: the fourth policy of a Trainer is the precision: a type that models lockstep::Precision, "
      "such as lockstep::Fp32");
  static_assert(
      ((concepts_modelled<Extras> >= 1) && ...),
      "lockstep: an extra of a Trainer models none of OptimizerFactory, Schedule, StepHook and EpochHook");
  static_assert(
      unambiguous,
      "lockstep: an extra of a Trainer models more than one of OptimizerFactory, Schedule, StepHook and "
      "EpochHook: split it, one each");
  static_assert(unique, "lockstep: two extras of a Trainer model the same concept: give one of each kind");
};

}  // namespace lockstep::detail
