#pragma once

#include <cmath>
#include <concepts>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// A parameter or buffer with its qualified name, such as "block.0.weight".
struct NamedTensor {
  std::string name;
  at::Tensor tensor;  ///< shares the memory of the model's
};

/// Returns the parameters in registration order, a tied tensor once, under its first name.
/// `Module::parameters()` repeats a tied tensor, and an optimizer over that list steps it repeatedly.
std::vector<NamedTensor> unique_parameters(const torch::nn::Module& module);

/// Returns the buffers (such as running statistics) in registration order, each once.
std::vector<NamedTensor> unique_buffers(const torch::nn::Module& module);

namespace detail {
template <class M>
concept ModuleImpl = std::derived_from<M, torch::nn::Module>;
template <class M>
concept ModuleHandle = std::copyable<M> && requires(M& handle) {
  { *handle } -> std::convertible_to<const torch::nn::Module&>;
};
}  // namespace detail

/// A LibTorch model: a module (`ConvNetImpl`), or a handle to one (a TORCH_MODULE holder such as `ConvNet`,
/// or a shared_ptr).
template <class M>
concept Model = detail::ModuleImpl<M> || detail::ModuleHandle<M>;

namespace detail {

/// A TorchScript module (`torch::jit::Module`). Recognized by its members, which avoids its heavy header.
template <class M>
concept ScriptModule =
    !Model<M> && std::copyable<M> && requires(M & module, std::vector<c10::IValue> inputs) {
  { module.forward(std::move(inputs)) } -> std::same_as<c10::IValue>;
  (*module.named_parameters(true).begin()).value;
  (*module.named_buffers(true).begin()).name;
};

/// A list of parameters without a module.
template <class M>
concept ParameterList = std::same_as<M, std::vector<at::Tensor>> || std::same_as<M, std::vector<NamedTensor>>;

/// A model that DistributedDataParallel can wrap.
template <class M>
concept Trainable = Model<M> || ScriptModule<M> || ParameterList<M>;

/// A model's parameters and buffers, each once, and the parameters that get sparse gradients.
struct ModelTensors {
  std::vector<NamedTensor> parameters;  ///< under their first name
  std::vector<NamedTensor> buffers;     ///< the same
  std::unordered_set<const c10::TensorImpl*> sparse;
};

}  // namespace detail

/// Returns the tensors of a model. The weights of Embedding and EmbeddingBag with `sparse(true)` get sparse gradients.
detail::ModelTensors tensors_of(const torch::nn::Module& module);
template <detail::ModuleHandle M>
detail::ModelTensors tensors_of(const M& model) {
  return tensors_of(static_cast<const torch::nn::Module&>(*model));
}
/// Those of a TorchScript module.
template <detail::ScriptModule M>
detail::ModelTensors tensors_of(const M& model) {
  detail::ModelTensors tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto collect = [&](const auto& list, std::vector<NamedTensor>& result) {
    for (const auto& item : list)
      if (item.value.defined() && seen.insert(item.value.unsafeGetTensorImpl()).second)
        result.push_back({item.name, item.value});
  };
  collect(model.named_parameters(true), tensors.parameters);
  collect(model.named_buffers(true), tensors.buffers);
  return tensors;
}
/// Returns the tensors of a parameter list. Unnamed tensors are named by their index.
detail::ModelTensors tensors_of(const std::vector<NamedTensor>& list);
/// Those of a list without names.
detail::ModelTensors tensors_of(const std::vector<at::Tensor>& list);

namespace detail {

std::string digest_of(const std::vector<NamedTensor>& parameters);

/// Returns the norm of the difference to rank 0's parameter, relative to the norm of rank 0's; 1 if that is
/// undefined. Collective.
template <Communicator Comm>
double relative_distance(const at::Tensor& parameter, Comm& comm) {
  at::Tensor first = parameter.detach().clone(at::MemoryFormat::Contiguous);
  comm.broadcast(first, 0).synchronize();
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  const auto norm = [](const at::Tensor& tensor) {
    return at::linalg_vector_norm(tensor).template item<double>();
  };
  const double distance = norm(wide(parameter.detach()) - wide(first)), length = norm(wide(first));
  if (distance == 0) return 0;
  return std::isfinite(distance) && length > 0 ? distance / length : 1;
}

}  // namespace detail

/// Compares the values of the parameters over all ranks. Collective.
///
/// They diverge silently if the ranks' optimizers differ, one rank alone loads a model, or gradients are changed
/// on one rank. Sends 8 bytes per parameter, and rank 0's value of each parameter that differs.
///
/// Returns the largest relative distance of any rank's parameter from rank 0's: 0 if all bits are equal, and
/// about the rounding error of the dtype if the ranks' processors differ in kind. Throws the same MismatchError
/// on every rank if it exceeds `tolerance`.
template <Communicator Comm>
double check_same_parameters(Comm& comm, const std::vector<NamedTensor>& parameters,
                             double tolerance = 1e-3) {
  if (comm.size() == 1 || parameters.empty()) return 0;
  const detail::CallScope scope("check_same_parameters");
  const c10::NoGradGuard no_grad;
  const std::vector<std::string> digests = agree(comm, [&] { return detail::digest_of(parameters); });
  const std::size_t count = parameters.size();
  double worst = 0;
  std::string mine(count * sizeof(double), '\0');
  std::vector<std::size_t> differing;
  for (std::size_t i = 0; i < count; ++i)
    for (const std::string& digest : digests)
      if (std::memcmp(&digest[8 * i], &digests[0][8 * i], 8) != 0) {
        differing.push_back(i);
        break;
      }
  if (differing.empty()) return 0;
  for (const std::size_t i : differing) {
    const double distance = detail::relative_distance(parameters[i].tensor, comm);
    std::memcpy(&mine[8 * i], &distance, 8);
  }
  const std::vector<std::string> distances = agree(comm, [&] { return mine; });
  std::size_t farthest = differing[0], rank = 0;
  for (const std::size_t i : differing)
    for (std::size_t r = 0; r < distances.size(); ++r) {
      double distance = 0;
      std::memcpy(&distance, &distances[r][8 * i], 8);
      if (distance <= worst) continue;
      worst = distance;
      farthest = i;
      rank = r;
    }
  if (worst > tolerance) {
    const detail::RankNames name_of(comm);
    throw detail::CollectiveError<MismatchError>(detail::formatted(
        "the ranks' models have diverged: {} of {} parameters differ, most of all parameter {} '{}' on rank "
        "{}, which is {:.2g} of its norm away from rank {}'s; load, initialise and step the model in the "
        "same way on every rank, and change gradients only in the same way",
        differing.size(), count, farthest, parameters[farthest].name, name_of(rank), worst, name_of(0)));
  }
  return worst;
}

namespace detail {

/// Returns the properties of a model that must be equal on every rank: name, shape, dtype, layout and
/// requires_grad of each parameter and buffer, in registration order.
NamedValues describe(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

}  // namespace detail

/// Compares the parameters and buffers of all ranks: count, names, shapes, dtypes, layout, order and requires_grad.
/// Collective. Throws the same MismatchError on every rank, with the parameter's name and its properties on each rank.
template <Communicator Comm>
void check_same_model(Comm& comm, const std::vector<NamedTensor>& parameters,
                      const std::vector<NamedTensor>& buffers) {
  const detail::CallScope scope("check_same_model");
  require_equal(comm, detail::describe(parameters, buffers), "the models of the ranks differ",
                "build the same model on every rank");
}

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/grad/detail/model-inl.hpp"
#endif
