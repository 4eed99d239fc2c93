#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {

/// The kind of ATen operators that an optimizer's step uses.
enum class Implementation {
  /// The bits of Python's default (`foreach=None, fused=None`): a loop over the parameters on a CPU, foreach
  /// on other devices, fused if the learning rate is a tensor on such a device.
  automatic,
  /// Python's `foreach=True`: each operation over all parameters at once. On a CPU bitwise equal to `automatic`.
  foreach,
  /// Python's `fused=True`: one operator for the whole step. The fastest; its bits differ from those of the others.
  fused,
};

/// The options of one parameter group in LibTorch's form. `values` holds the optimizer's options, such as
/// SGDOptions. If `lr_tensor` is defined, it is the learning rate and set_lr writes into it.
template <class Options>
class GroupOptions : public torch::optim::OptimizerCloneableOptions<GroupOptions<Options>> {
 public:
  explicit GroupOptions(Options options) : values(std::move(options)) {}
  /// The constructor that LibTorch calls before it reads the other options from an archive.
  explicit GroupOptions(double lr) { values.lr = lr; }

  [[nodiscard]] double get_lr() const override {
    return values.lr_tensor.defined() ? values.lr_tensor.template item<double>() : values.lr;
  }
  void set_lr(const double lr) override {
    values.lr = lr;
    if (values.lr_tensor.defined()) values.lr_tensor.fill_(lr);
  }

  /// Omits the implementation and the tensor, which belong to the run.
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

/// Returns a parameter group with its own options, for an optimizer's list of groups:
///
///   SGD({parameter_group(weights, SGDOptions{.weight_decay = 1e-4}),
///        parameter_group(biases, SGDOptions{})})
template <class Options>
torch::optim::OptimizerParamGroup parameter_group(std::vector<at::Tensor> parameters,
                                                  const Options& options) {
  constexpr bool ours = requires {
    typename Options::Group;
  };
  static_assert(ours,
                "lockstep: parameter_group takes the options of one of lockstep's optimizers, such as "
                "SGDOptions; LibTorch's options go with torch::optim::OptimizerParamGroup");
  if constexpr (ours) {
    using Kept = typename Options::Group;
    return {std::move(parameters), std::make_unique<GroupOptions<Kept>>(Kept(options))};
  } else {
    return torch::optim::OptimizerParamGroup(std::move(parameters));
  }
}

namespace detail {

/// Throws UsageError unless `good`. Callers phrase `good` so that NaN fails it.
inline void require_option(bool good, const char* optimizer, std::size_t group, const char* name,
                           double value, const char* range) {
  if (!good)
    throw UsageError(detail::formatted("{}: {} = {} of group {} is {}: choose another", optimizer, name,
                                       value, group, range));
}

template <class Options>
void check_rate(const Options& options, const char* optimizer, std::size_t group) {
  require_option(options.lr >= 0, optimizer, group, "lr", options.lr, "not 0 or more");
  require_option(options.weight_decay >= 0, optimizer, group, "weight_decay", options.weight_decay,
                 "not 0 or more");
  if (options.lr_tensor.defined() && options.lr_tensor.numel() != 1)
    throw UsageError(detail::formatted("{}: lr_tensor of group {} has {} elements: give it one", optimizer,
                                       group, options.lr_tensor.numel()));
}

/// The optimizer state of one parameter as tensors, which Derived enumerates: `each_tensor(self, f)` calls `f(name,
/// tensor, like_parameter)`; `like_parameter` is true for a tensor with the parameter's shape and device.
template <class Derived>
struct TensorState : torch::optim::OptimizerCloneableParamState<Derived> {
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Derived::each_tensor(static_cast<const Derived&>(*this),
                         [&](const char* name, const at::Tensor& tensor, bool) {
                           if (tensor.defined()) archive.write(name, c10::IValue(tensor));
                         });
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    Derived::each_tensor(static_cast<Derived&>(*this), [&](const char* name, at::Tensor& tensor, bool) {
      c10::IValue found;
      if (archive.try_read(name, found)) tensor = found.toTensor();
    });
  }
};

}  // namespace detail
}  // namespace lockstep::inline v0_1
