#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/optim/sgd.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/detail/select_by_type.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer_options.hpp"

/// Default policies of a Trainer, and their assembly.
namespace lockstep::detail {

/// Default-constructs a model after seeding the generators with `seed`.
struct MakeSeeded {
  std::uint64_t seed;
  template <class M>
  M operator()(std::type_identity<M>) const {
    static_assert(
        DefaultConstructibleModel<M>,
        "lockstep: this model has no default constructor: pass one to the Trainer after its options");
    at::manual_seed(seed);
    return M();
  }
};

/// Moves the model to the device of the communicator's tensors. Call before anything holds its parameters.
template <class M, class Comm>
M placed(M model, const Comm& comm) {
  if constexpr (DeviceCommunicator<Comm> && Model<M>) module_of(model).to(comm.tensor_device());
  return model;
}

/// Moves out the communication hook among the extras, or default-constructs one.
template <class Reduction, class... Extras>
Reduction take_reduction(std::tuple<Extras...>& extras) {
  if constexpr (one_of<Reduction, Extras...>)
    return std::move(std::get<Reduction>(extras));
  else
    return Reduction();
}

/// Calls `validated`. Also throws UsageError if `lr` is set beside an OptimizerFactory, which has its own
/// rate.
template <class... Extras>
const TrainerOptions& validated_beside(const TrainerOptions& options) {
  if ((OptimizerFactory<Extras> || ...) && options.lr)
    throw UsageError(detail::formatted(
        "lr is {}, beside an optimizer that has a rate of its own: give it to that", *options.lr));
  return validated(options);
}

/// Constructs the optimizer by the extras' OptimizerFactory, or SGD if there is none.
template <class... Extras>
std::unique_ptr<torch::optim::Optimizer> made_optimizer(std::tuple<Extras...>& extras,
                                                        const std::vector<NamedTensor>& parameters,
                                                        const TrainerOptions& options) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
  if constexpr ((OptimizerFactory<Extras> || ...)) {
    std::unique_ptr<torch::optim::Optimizer> made;
    const auto make = [&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (OptimizerFactory<E>) {
        if constexpr (requires { extra.make_optimizer(parameters); })
          made = extra.make_optimizer(parameters);
        else
          made = extra.make_optimizer(tensors);
      }
    };
    std::apply([&](auto&... extra) { (make(extra), ...); }, extras);
    return made;
  } else {
    return std::make_unique<SGD>(tensors, SgdOptions{.lr = options.lr.value_or(1e-3)});
  }
}

}  // namespace lockstep::detail
