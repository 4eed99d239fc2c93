#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1::detail {

/// Throws UsageError unless all parameters are on the device `named`. A device without an index, such as
/// "cuda", matches any device of its type.
inline void check_device(const std::vector<NamedTensor>& parameters, const c10::Device& named) {
  for (const NamedTensor& item : parameters)
    if (item.tensor.device() != parameters[0].tensor.device())
      throw UsageError(detail::formatted(
          "DdpOptions::device is {}, but the parts of this model live on several devices: '{}' on {} "
          "and '{}' on {}; leave the option out",
          named.str(), parameters[0].name, parameters[0].tensor.device().str(), item.name,
          item.tensor.device().str()));
  if (parameters.empty()) return;
  const c10::Device& device = parameters[0].tensor.device();
  if (device.type() != named.type() || (named.has_index() && device.index() != named.index()))
    throw UsageError(detail::formatted("DdpOptions::device is {}, but '{}' is on {}: move the model before",
                                       named.str(), parameters[0].name, device.str()));
}

/// Throws UsageError for an unknown name.
inline ModelTensors without_ignored(ModelTensors tensors, const std::vector<std::string>& ignored) {
  for (const std::string& name : ignored) {
    const auto named = [&](const NamedTensor& item) { return item.name == name; };
    if (std::erase_if(tensors.parameters, named) + std::erase_if(tensors.buffers, named) == 0)
      throw UsageError(
          detail::formatted("DdpOptions::ignored names '{}', and the model has no such parameter or buffer: "
                            "give its qualified name, such as 'block.0.weight'",
                            name));
  }
  return tensors;
}

struct CheckedModel {
  ParameterTable parameters;
  std::vector<NamedTensor> buffers;
};

template <class M>
CheckedModel checked_model(M& model, const DdpOptions& options) {
  const auto& caps = options.bucket_cap_mb;
  // Rejects less than one byte and more bytes than an integer can hold; NaN fails both comparisons.
  const auto fits = [](double cap) { return cap * (1 << 20) >= 1 && cap < 1e12; };
  if (caps.empty() || !std::all_of(caps.begin(), caps.end(), fits))
    throw UsageError("bucket_cap_mb must hold at least one size in MiB, each greater than 0");
  ModelTensors tensors = without_ignored(tensors_of(model), options.ignored);
  if (options.device) check_device(tensors.parameters, *options.device);
  return {{std::move(tensors.parameters), tensors.sparse}, std::move(tensors.buffers)};
}

/// Returns the options that determine collectives and bits, which must be equal on every rank.
template <class Hook>
NamedValues shared_options(const DdpOptions& options, const Hook& hook,
                           const std::vector<std::string>& sparse) {
  static constexpr std::array gradients{"in_bucket", "gradient_as_bucket_view", "separate"};
  const auto text = [](bool on) { return on ? "true" : "false"; };
  const auto list = [](const std::vector<std::string>& items) {
    std::string all;
    for (const std::string& item : items) all += (all.empty() ? "{" : ", ") + item;
    return (all.empty() ? "{" : all) + "}";
  };
  std::vector<std::string> caps;
  for (const double cap : options.bucket_cap_mb) caps.push_back(detail::formatted("{}", cap));
  NamedValues named{{"bucket_cap_mb", list(caps)},
                    {"broadcast_buffers", text(options.broadcast_buffers)},
                    {"forward_sync_buffers", text(options.forward_sync_buffers)},
                    {"gradients", gradients.at(static_cast<std::size_t>(options.gradients))},
                    {"find_unused_parameters", text(options.find_unused_parameters)},
                    {"static_graph", text(options.static_graph)},
                    {"batched_grad_copy", text(options.batched_grad_copy)},
                    {"skip_all_reduce_unused_params", text(options.skip_all_reduce_unused_params)},
                    {"lazy_bucket_allocation", text(options.lazy_bucket_allocation)},
                    {"init_sync", text(options.init_sync)},
                    {"the list of sparse gradients", list(sparse)},
                    {"the communication hook", std::string(hook.name())}};
  if constexpr (requires { hook.settings(); })
    for (auto& [name, value] : hook.settings())
      named.emplace_back("the hook's " + std::move(name), std::move(value));
  return named;
}

/// Compares the options of all ranks and, with DdpOptions::init_sync, compares the models and broadcasts rank
/// 0's parameters and buffers. Collective. Throws UsageError for a sparse gradient with a communication hook,
/// and MismatchError if options or models differ; every rank throws the same error.
template <class Comm, class Hook>
void compare_and_broadcast(const CheckedModel& model, const DdpOptions& options, const Hook& hook,
                           Comm& comm) {
  const auto& [parameters, buffers] = model;
  std::vector<std::string> names;
  for (const ParameterEntry& parameter : parameters.trained)
    if (parameter.sparse) names.emplace_back(parameter.name);
  require_equal(comm, shared_options(options, hook, names), "the ranks reduce gradients differently",
                "give every rank the same model, DdpOptions and hook");
  if (options.init_sync) check_same_model(comm, parameters.all, buffers);
  if (parameters.trained.empty()) return;  // the caller throws
  for (const ParameterEntry& parameter : parameters.trained)
    if (parameter.sparse && !std::same_as<Hook, AllReduceHook>)
      throw UsageError(detail::formatted(
          "the gradient of parameter '{}' is sparse, which communication hooks do not support: "
          "build its layer without sparse gradients, or use AllReduceHook",
          parameter.name));
  if (!options.init_sync) return;
  std::vector<at::Tensor> all;
  for (const NamedTensor& item : parameters.all) all.push_back(item.tensor);
  if (options.broadcast_buffers)
    for (const NamedTensor& item : buffers) all.push_back(item.tensor);
  BroadcastList(std::move(all)).run(comm, 0);
}

}  // namespace lockstep::inline v0_1::detail
