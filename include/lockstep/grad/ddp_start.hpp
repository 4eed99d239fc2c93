#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <concepts>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/same_options.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/broadcast_list.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/device_check.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/grad/model_check.hpp"
#include "lockstep/grad/named_tensors.hpp"
#include "lockstep/grad/watched_parameters.hpp"

namespace lockstep::detail {

/// The tensors of a model that DistributedDataParallel sees. Throws UsageError for options that are wrong,
/// whatever other ranks have.
template <class M>
ModelTensors tensors_by(const DdpOptions& options, M& model) {
  const auto& caps = options.bucket_caps;
  if (caps.empty() || std::find(caps.begin(), caps.end(), 0) != caps.end())
    throw UsageError("bucket_caps must hold at least one size in bytes, each greater than 0");
  ModelTensors tensors = without_ignored(tensors_of(model), options.ignored);
  if (options.device) check_device(tensors.parameters, *options.device);
  return tensors;
}

/// Which of the parameters have sparse gradients.
inline std::vector<char> sparse_among(const std::vector<NamedTensor>& trained, const ModelTensors& tensors) {
  std::vector<char> sparse;
  for (const NamedTensor& item : trained)
    sparse.push_back(tensors.sparse.contains(item.tensor.unsafeGetTensorImpl()));
  return sparse;
}

/// Compares options and models of all ranks and, unless the options say that they are equal, gives every rank
/// rank 0's parameters and buffers. Collective. Throws one and the same error on every rank.
template <class Comm, class Hook>
void start_alike(const ModelTensors& tensors, const std::vector<NamedTensor>& trained,
                 const std::vector<char>& sparse, const DdpOptions& options, const Hook& hook, Comm& comm) {
  std::string names;
  for (std::size_t i = 0; i < trained.size(); ++i)
    if (sparse[i]) names += (names.empty() ? "" : ", ") + trained[i].name;
  if (const auto text = option_difference(shared_options(options, hook, names), comm))
    throw MismatchError("the ranks reduce gradients unlike: " + *text +
                        "; give every rank the same model, DdpOptions and hook");
  if (options.init_sync) check_same_model(tensors.parameters, tensors.buffers, comm);
  if (trained.empty()) return;  // an error of the caller's
  for (std::size_t i = 0; i < trained.size(); ++i)
    if (sparse[i] && !std::same_as<Hook, AllReduceHook>)
      throw UsageError(
          fmt::format("the gradient of parameter '{}' is sparse, which communication hooks do not take: "
                      "build its layer without sparse gradients, or use the plain reduction",
                      trained[i].name));
  if (!options.init_sync) return;
  std::vector<at::Tensor> all;
  for (const auto* list : {&tensors.parameters, &tensors.buffers})
    for (const NamedTensor& item : *list) all.push_back(item.tensor);
  BroadcastList(std::move(all)).run(comm, 0);
}

}  // namespace lockstep::detail
