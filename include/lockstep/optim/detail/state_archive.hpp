#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim/options.hpp"

namespace lockstep::detail {

/// Writes an optimizer in LibTorch's format. LibTorch uses addresses as keys, which differ from run to run;
/// here the keys number the parameters from 1, so that equal optimizers write equal archives.
template <class Options>
void write_optimizer(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& optimizer) {
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  torch::serialize::OutputArchive states(archive.compilation_unit());
  torch::serialize::OutputArchive groups(archive.compilation_unit());
  const auto count = [](std::size_t number) {
    return c10::IValue(at::scalar_tensor(static_cast<std::int64_t>(number), at::kLong));
  };
  groups.write("param_groups/size", count(optimizer.param_groups().size()));
  std::size_t key = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    torch::serialize::OutputArchive written(archive.compilation_unit());
    written.write("params/size", count(group.params().size()));
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const std::string name = std::to_string(++key);
      written.write("params/" + std::to_string(i), c10::IValue(name));
      const auto state = optimizer.state().find(group.params()[i].unsafeGetTensorImpl());
      if (state == optimizer.state().end()) continue;
      torch::serialize::OutputArchive fields(archive.compilation_unit());
      state->second->serialize(fields);
      states.write(name, fields);
    }
    torch::serialize::OutputArchive options(archive.compilation_unit());
    static_cast<const GroupOptions<Options>&>(group.options()).serialize(options);
    written.write("options", options);
    groups.write("param_groups/" + std::to_string(g), written);
  }
  archive.write("state", states);
  archive.write("param_groups", groups);
}

/// The contents of an archive: options by group, and states by group and parameter; null for a parameter that
/// was never stepped.
template <class State, class Options>
struct ReadOptimizer {
  std::vector<Options> options;
  std::vector<std::vector<std::unique_ptr<State>>> states;
};

/// Throws CheckpointError if a group in the archive has an option that `Options` lacks: another type of
/// optimizer wrote it, whose options and states would be ignored.
template <class Options>
void refuse_foreign_options(torch::serialize::InputArchive& groups, std::size_t count, const char* name) {
  std::vector<std::string> known{"training"};  // every archive of LibTorch's has it
  const Options defaults;
  Options::each_field(defaults, [&](const char* field, const auto&) { known.emplace_back(field); });
  for (std::size_t g = 0; g < count; ++g) {
    torch::serialize::InputArchive group, options;
    groups.read("param_groups/" + std::to_string(g), group);
    group.read("options", options);
    for (const std::string& key : options.keys())
      if (std::find(known.begin(), known.end(), key) == known.end())
        throw CheckpointError(detail::formatted(
            "{}: the archive has an option '{}', which it does not have: the archive is another kind "
            "of optimizer's",
            name, key));
  }
}

/// Reads an archive of write_optimizer, or of a LibTorch optimizer with equal field names. Throws
/// CheckpointError if it does not match the groups of `optimizer`.
template <class State, class Options>
ReadOptimizer<State, Options> read_optimizer(torch::serialize::InputArchive& archive,
                                             const torch::optim::Optimizer& optimizer, const char* name) try {
  torch::serialize::InputArchive states_archive, groups_archive;
  archive.read("state", states_archive);
  archive.read("param_groups", groups_archive);
  ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> states;
  torch::optim::detail::serialize<State>(states_archive, states);
  std::vector<std::pair<std::vector<std::string>, std::unique_ptr<torch::optim::OptimizerOptions>>> groups;
  torch::optim::detail::serialize<GroupOptions<Options>>(groups_archive, groups);

  if (groups.size() != optimizer.param_groups().size())
    throw CheckpointError(
        detail::formatted("{}: the archive has {} parameter groups, the optimizer {}: load it into "
                          "one that is made as it was",
                          name, groups.size(), optimizer.param_groups().size()));
  refuse_foreign_options<Options>(groups_archive, groups.size(), name);
  ReadOptimizer<State, Options> read;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& keys = groups[g].first;
    const auto& parameters = optimizer.param_groups()[g].params();
    if (keys.size() != parameters.size())
      throw CheckpointError(
          detail::formatted("{}: group {} has {} parameters in the archive and {} in the optimizer: "
                            "load it into one that is made as it was",
                            name, g, keys.size(), parameters.size()));
    read.options.push_back(static_cast<GroupOptions<Options>&>(*groups[g].second).values);
    auto& row = read.states.emplace_back();
    for (std::size_t i = 0; i < keys.size(); ++i) {
      // LibTorch turns the keys into pointers, which are never dereferenced.
      const auto found = states.find(reinterpret_cast<void*>(std::stoull(keys[i])));
      row.emplace_back(found == states.end() ? nullptr : static_cast<State*>(found->second.release()));
      if (!row.back()) continue;
      State::each_tensor(*row.back(), [&](const char* field, const at::Tensor& tensor, bool like_parameter) {
        if (tensor.defined() && like_parameter && tensor.sizes() != parameters[i].sizes())
          throw CheckpointError(detail::formatted(
              "{}: {} of parameter {} of group {} has {} elements in the archive, the parameter {}: "
              "load it into an optimizer of the same model",
              name, field, i, g, tensor.numel(), parameters[i].numel()));
      });
    }
  }
  return read;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {  // from LibTorch, or from a key that is not a number
  throw CheckpointError(
      detail::formatted("{}: this is no archive of such an optimizer ({})", name, first_line(error)));
}

}  // namespace lockstep::detail
