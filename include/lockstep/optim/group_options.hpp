#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep {

/// Which of ATen's operators make up an optimizer's step.
enum class Implementation {
  /// The bits of Python's default (`foreach=None, fused=None`): on a CPU those of its loop over the
  /// parameters,
  /// on other devices foreach; fused where the rate is a tensor on such a device.
  automatic,
  /// Python's `foreach=True`: each operation for all parameters, then the next. On a CPU the same bits as
  /// `automatic`.
  foreach,
  /// Python's `fused=True`: one operator for all. The fastest; its bits are those of `fused=True` alone.
  fused,
};

/// The options of one parameter group, as LibTorch keeps them: `values` are what the optimizer takes, such as
/// SgdOptions. `lr_tensor`, where it is defined, is the rate, and set_lr writes into it.
template <class Options>
class GroupOptions : public torch::optim::OptimizerCloneableOptions<GroupOptions<Options>> {
 public:
  explicit GroupOptions(Options options) : values(std::move(options)) {}
  /// What LibTorch makes before it reads the rest from an archive.
  explicit GroupOptions(double lr) { values.lr = lr; }

  [[nodiscard]] double get_lr() const override {
    return values.lr_tensor.defined() ? values.lr_tensor.template item<double>() : values.lr;
  }
  void set_lr(const double lr) override {
    values.lr = lr;
    if (values.lr_tensor.defined()) values.lr_tensor.fill_(lr);
  }

  /// Numbers and switches; neither the implementation nor the tensor, which are of the run and not its state.
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Options saved = values;
    saved.lr = get_lr();
    Options::each_field(
        saved, [&](const char* name, const auto& value) { archive.write(name, c10::IValue(value)); });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Options::each_field(values, [&]<class Value>(const char* name, Value& value) {
      c10::IValue found;
      if (archive.try_read(name, found)) value = found.to<Value>();
    });
  }

  Options values;
};

/// Parameters with options of their own, for an optimizer's list of groups: `SGD({parameter_group(weights,
/// SgdOptions{.weight_decay = 1e-4}), parameter_group(biases, SgdOptions{})})`.
template <class Options>
torch::optim::OptimizerParamGroup parameter_group(std::vector<at::Tensor> parameters,
                                                  const Options& options) {
  constexpr bool ours = requires {
    typename Options::Group;
  };
  static_assert(ours,
                "lockstep: parameter_group takes the options of one of lockstep's optimizers, such as "
                "SgdOptions; LibTorch's options go with torch::optim::OptimizerParamGroup");
  if constexpr (ours) {
    using Kept = typename Options::Group;
    return {std::move(parameters), std::make_unique<GroupOptions<Kept>>(Kept(options))};
  } else {
    return torch::optim::OptimizerParamGroup(std::move(parameters));
  }
}

namespace detail {

/// Throws UsageError unless `good`; NaN is good for nothing.
inline void require_option(bool good, const char* optimizer, std::size_t group, const char* name,
                           double value, const char* range) {
  if (!good)
    throw UsageError(
        fmt::format("{}: {} = {} of group {} is {}: choose another", optimizer, name, value, group, range));
}

/// What is wrong with the rate of either kind of optimizer.
template <class Options>
void check_rate(const Options& options, const char* optimizer, std::size_t group) {
  require_option(options.lr >= 0, optimizer, group, "lr", options.lr, "not 0 or more");
  require_option(options.weight_decay >= 0, optimizer, group, "weight_decay", options.weight_decay,
                 "not 0 or more");
  if (options.lr_tensor.defined() && options.lr_tensor.numel() != 1)
    throw UsageError(fmt::format("{}: lr_tensor of group {} has {} elements: give it one", optimizer, group,
                                 options.lr_tensor.numel()));
}

}  // namespace detail

}  // namespace lockstep
