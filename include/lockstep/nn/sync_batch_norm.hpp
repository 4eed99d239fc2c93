#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/detail/sync_batch_norm_function.hpp"

namespace lockstep::inline v0_1 {

/// A module whose training forward is collective: every rank must call it equally often, in the same order. A
/// class derives from this and from torch::nn::Module.
class CollectiveModule {
 public:
  /// Returns the size of the module's group; 1 or less if it does not communicate.
  [[nodiscard]] virtual int ranks() const = 0;

 protected:
  CollectiveModule() = default;
  CollectiveModule(const CollectiveModule&) = default;
  CollectiveModule& operator=(const CollectiveModule&) = default;
  ~CollectiveModule() = default;
};

/// Applies batch normalization over the combined mini-batches of all ranks: mean, variance and gradients are
/// those that one process would compute on the whole batch.
///
/// ```cpp
/// struct NetImpl : torch::nn::Module {
///   NetImpl() { bn = register_module("bn", lockstep::SyncBatchNorm2d(16)); }
///   lockstep::SyncBatchNorm2d bn{nullptr};
/// };
/// Net net;
/// lockstep::convert_sync_batchnorm(net, comm);  // gives every module in it the ranks of comm
/// ```
///
/// Options, parameters, buffers and their names are those of torch::nn::BatchNormNd. Input and output: [N, C]
/// or [N, C, L] for 1d, [N, C, H, W] for 2d, [N, C, D, H, W] for 3d, in any dense memory format; float32,
/// float64, and float16 or bfloat16 with statistics in float32. Results equal those of one process up to
/// rounding. Running statistics are bitwise equal on every rank.
///
/// In training, forward and backward are collective: every rank must call the same modules in the same order,
/// with a batch of any size, including an empty one. The gradients of weight and bias are those of this rank's
/// batch; DistributedDataParallel averages them. The running variance of a channel is left unchanged if the
/// combined batch has only one value of it.
///
/// In eval mode, and with a single process, nothing is communicated. Double backward throws GradientError.
/// torch::nn::BatchNormNd is no base class: code that calls it through that type would skip the collectives.
///
/// Counterpart: torch.nn.SyncBatchNorm, except that ranks exchange the sum of squared deviations instead of 1
/// / sqrt(variance + eps), which loses a variance far below eps.
template <std::size_t D>
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<D, SyncBatchNormImpl<D>>,
                          public CollectiveModule {
  using Base = torch::nn::BatchNormImplBase<D, SyncBatchNormImpl<D>>;
  static_assert(D >= 1 && D <= 3, "lockstep: SyncBatchNorm is for 1, 2 or 3 dimensions, as torch::nn's are");

 public:
  /// Without a group, convert_sync_batchnorm sets one; a training forward before that throws UsageError. From a
  /// communicator, collectively creates a group for this module alone: share one BatchNormGroup among many.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,  // NOLINT: as torch::nn::BatchNormNd
                    const detail::BatchNormGroup& group = {})
      : Base(options) {
    synchronize(group, detail::formatted("{} of {} channels", kind(), options.num_features()));
  }

  /// Constructs a module with the options and mode of `plain` that shares its tensors.
  template <class Derived>
  explicit SyncBatchNormImpl(torch::nn::BatchNormImplBase<D, Derived>& plain)
      : SyncBatchNormImpl(plain.options) {
    if (plain.weight.defined()) {
      this->weight = this->parameters_["weight"] = plain.weight;
      this->bias = this->parameters_["bias"] = plain.bias;
    }
    if (plain.running_mean.defined()) {
      this->running_mean.set_data(plain.running_mean);
      this->running_var.set_data(plain.running_var);
      this->num_batches_tracked.set_data(plain.num_batches_tracked);
    }
    this->train(plain.is_training());
  }

  void synchronize(const detail::BatchNormGroup& group, std::string name) {
    size_ = group.size();
    site_ = c10::make_intrusive<detail::BatchNormSite>(std::move(name), group.exchange());
  }

  [[nodiscard]] int ranks() const override { return size_; }

  /// Throws UsageError if the input's shape or dtype does not fit or no group is set.
  at::Tensor forward(const at::Tensor& input) {
    if (!this->is_training() || size_ == 1) return Base::forward(input);
    _check_input_dim(input);
    if (size_ == 0)
      throw UsageError(detail::formatted(
          "{} has no ranks to join batches with: call convert_sync_batchnorm(model, comm) before training, "
          "or give it a communicator when it is constructed",
          site_->module));
    return detail::SyncBatchNormFunction::apply(
        input, std::optional<at::Tensor>(this->weight), std::optional<at::Tensor>(this->bias),
        detail::RunningStatistics{this->running_mean, this->running_var, count_batch()}, this->options.eps(),
        site_);
  }

  /// Returns the class's name.
  static std::string kind() { return detail::formatted("SyncBatchNorm{}d", D); }

  void pretty_print(std::ostream& stream) const override {
    const auto& options = this->options;
    const auto momentum = options.momentum();
    stream << detail::formatted("lockstep::{}({}, eps={}, momentum={}, affine={}, track_running_stats={})",
                                kind(), options.num_features(), options.eps(),
                                momentum ? detail::formatted("{}", *momentum) : "None", options.affine(),
                                options.track_running_stats());
  }

 protected:
  void _check_input_dim(const at::Tensor& input) override {
    static constexpr const char* layouts[] = {"[N, C] or [N, C, L]", "[N, C, H, W]", "[N, C, D, H, W]"};
    const auto refuse = [&](const std::string& what) {
      throw UsageError(detail::formatted("{} takes an input {} with {} channels, but {}", site_->module,
                                         layouts[D - 1], this->options.num_features(), what));
    };
    if (!input.defined()) refuse("got none");
    const bool fits = input.dim() == D + 2 || (D == 1 && input.dim() == 2);
    if (!fits || input.size(1) != this->options.num_features() || input.size(1) == 0)
      refuse(detail::formatted("got {}", detail::describe(input)));
    if (!input.is_floating_point())
      refuse(detail::formatted("got {}, which is no floating type", detail::describe(input)));
    for (const at::Tensor& own : {this->weight, this->running_mean})
      if (own.defined() && own.scalar_type() != input.scalar_type() &&
          own.scalar_type() != detail::statistics_dtype(input))
        refuse(
            detail::formatted("got {}, which does not fit its {} parameters: convert the module or the input",
                              detail::describe(input), detail::dtype_name(own.scalar_type())));
  }

 private:
  // Counts one batch and returns the weight of its statistics in the running statistics.
  double count_batch() {
    const auto momentum = this->options.momentum();
    if (!this->num_batches_tracked.defined()) return momentum.value_or(0);
    this->num_batches_tracked += 1;
    return momentum ? *momentum : 1 / this->num_batches_tracked.template item<double>();
  }

  int size_ = 0;
  c10::intrusive_ptr<detail::BatchNormSite> site_;  // never null
};

TORCH_MODULE_IMPL(SyncBatchNorm1d, SyncBatchNormImpl<1>);
TORCH_MODULE_IMPL(SyncBatchNorm2d, SyncBatchNormImpl<2>);
TORCH_MODULE_IMPL(SyncBatchNorm3d, SyncBatchNormImpl<3>);

namespace detail {

template <std::size_t D>
struct PlainBatchNorm;
template <>
struct PlainBatchNorm<1> : std::type_identity<torch::nn::BatchNorm1dImpl> {};
template <>
struct PlainBatchNorm<2> : std::type_identity<torch::nn::BatchNorm2dImpl> {};
template <>
struct PlainBatchNorm<3> : std::type_identity<torch::nn::BatchNorm3dImpl> {};

/// The AnyModule that calls a batch norm, and the name under which its parent registers it.
struct BatchNormPlace {
  torch::nn::AnyModule* caller = nullptr;
  torch::nn::Module* parent = nullptr;
  std::string key;
};

struct ReplacedBatchNorm {
  std::weak_ptr<torch::nn::Module> module;
  std::string name, kind;
  std::shared_ptr<std::vector<BatchNormPlace>> places;
};

/// Finds and replaces the batch norms below a module. A failure changes nothing.
class BatchNormSurgery {
 public:
  explicit BatchNormSurgery(torch::nn::Module& root) { enter(root, {}); }
  explicit BatchNormSurgery(torch::nn::AnyModule& root) { enter(*root.ptr(), {&root, nullptr, {}}); }

  void check() {
    for (const ReplacedBatchNorm& replaced : replaced_) {
      // Another holder would keep calling the old module, whose statistics are those of one rank.
      long known = 0;
      for (const BatchNormPlace& place : *replaced.places) known += place.parent ? 2 : 1;
      if (replaced.module.use_count() > known)
        refuse(replaced.name,
               detail::formatted("also held outside of its torch::nn::Sequential, where it would "
                                 "stay as it is: let go of that holder, or make it a lockstep::{}",
                                 replaced.kind));
    }
    if (refused_.empty()) return;
    std::string list;
    for (const std::string& refused : refused_) list += (list.empty() ? "" : "; ") + refused;
    throw UsageError("convert_sync_batchnorm has changed nothing, since it cannot convert " + list);
  }

  [[nodiscard]] bool empty() const { return names_.empty(); }

  std::vector<std::string> run(const BatchNormGroup& group) {
    for (const auto& act : actions_) act(group);
    return std::move(names_);
  }

 private:
  void enter(torch::nn::Module& root, const BatchNormPlace& place) {
    if (!consider(root, "", place)) visit(root, "");
  }

  void visit(torch::nn::Module& module, const std::string& path) {
    if (!visited_.insert(&module).second) return;
    auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
    for (const auto& child : module.named_children()) {
      BatchNormPlace place{nullptr, &module, child.key()};
      if (sequential)
        for (torch::nn::AnyModule& candidate : *sequential)
          if (candidate.ptr() == child.value() && taken_.insert(&candidate).second) {
            place.caller = &candidate;
            break;
          }
      const std::string name = path + child.key();
      if (!consider(*child.value(), name, place)) visit(*child.value(), name + ".");
    }
  }

  bool consider(torch::nn::Module& module, const std::string& name, const BatchNormPlace& place) {
    return consider_as<1>(module, name, place) || consider_as<2>(module, name, place) ||
           consider_as<3>(module, name, place);
  }

  template <std::size_t D>
  bool consider_as(torch::nn::Module& module, const std::string& name, const BatchNormPlace& place) {
    using Plain = typename PlainBatchNorm<D>::type;
    if (auto* ready = dynamic_cast<SyncBatchNormImpl<D>*>(&module)) {
      if (visited_.insert(&module).second)
        add(name, [ready, label = label<D>(name)](const BatchNormGroup& group) {
          ready->synchronize(group, label);
        });
      return true;
    }
    auto* plain = dynamic_cast<Plain*>(&module);
    if (!plain) return false;
    if (typeid(module) != typeid(Plain))
      refuse(name, detail::formatted("of the class {}, which is derived from torch::nn::BatchNorm{}d",
                                     c10::demangle(typeid(module).name()), D));
    else if (!place.caller)
      refuse(name,
             detail::formatted("a torch::nn::BatchNorm{0}d outside of a torch::nn::Sequential, whose holder "
                               "would keep calling it: declare it as lockstep::SyncBatchNorm{0}d",
                               D));
    else
      replace<D>(*plain, name, place);
    return true;
  }

  template <std::size_t D>
  void replace(typename PlainBatchNorm<D>::type& plain, const std::string& name,
               const BatchNormPlace& place) {
    for (ReplacedBatchNorm& known : replaced_)
      if (known.module.lock().get() == &plain) return known.places->push_back(place);
    auto places = std::make_shared<std::vector<BatchNormPlace>>(1, place);
    replaced_.push_back({plain.weak_from_this(), name, SyncBatchNormImpl<D>::kind(), places});
    add(name, [&plain, places, label = label<D>(name)](const BatchNormGroup& group) {
      const auto made = std::make_shared<SyncBatchNormImpl<D>>(plain);
      made->synchronize(group, label);
      for (const auto& [caller, parent, key] : *places) {  // the last assignment destroys `plain`
        *caller = torch::nn::AnyModule(made);
        if (parent) parent->replace_module(key, made);
      }
    });
  }

  void add(const std::string& name, std::function<void(const BatchNormGroup&)> action) {
    names_.push_back(name);
    actions_.push_back(std::move(action));
  }
  void refuse(const std::string& name, const std::string& why) {
    refused_.push_back(
        detail::formatted("{} ({})", name.empty() ? "the model itself" : "'" + name + "'", why));
  }

  template <std::size_t D>
  static std::string label(const std::string& name) {
    return name.empty() ? SyncBatchNormImpl<D>::kind()
                        : detail::formatted("{} '{}'", SyncBatchNormImpl<D>::kind(), name);
  }

  std::unordered_set<const torch::nn::Module*> visited_;
  std::unordered_set<const torch::nn::AnyModule*> taken_;
  std::vector<ReplacedBatchNorm> replaced_;
  std::vector<std::function<void(const BatchNormGroup&)>> actions_;
  std::vector<std::string> names_, refused_;
};

}  // namespace detail

/// Converts every batch norm of a model to compute its statistics over the ranks of `comm`. Returns the names
/// of the converted modules.
///
/// Call it before or after the model is wrapped and its optimizer constructed: parameters and buffers remain the same
/// tensors. `model` is a module, a holder or a torch::nn::AnyModule; it may itself be a batch norm. Converted are:
/// - torch::nn::BatchNorm1d, 2d and 3d inside a torch::nn::Sequential at any depth. Each is replaced by a
///   lockstep::SyncBatchNormNd with the same options, mode and tensors.
/// - lockstep::SyncBatchNormNd anywhere, such as a member of a module. Its group is replaced by the new one.
///
/// Throws UsageError with the names of all batch norms that cannot be converted, and then changes nothing:
/// members and modules that are only registered, also in a ModuleList or ModuleDict; classes derived from
/// BatchNormNd; modules in a Sequential that also have another holder. A C++ member `torch::nn::BatchNorm2d`
/// always calls the forward of its own type: declare it as lockstep::SyncBatchNormNd instead.
///
/// A batch norm that its holder does not register, such as an AnyModule member, is not found.
///
/// `comm` is a communicator, of which a separate group is made for batch norm, or a BatchNormGroup. Collective.
///
/// Counterpart: torch.nn.SyncBatchNorm.convert_sync_batchnorm.
template <class M, class Comm>
std::vector<std::string> convert_sync_batchnorm(M& model, Comm&& comm) {
  constexpr bool itself = std::derived_from<M, torch::nn::Module> || std::same_as<M, torch::nn::AnyModule>;
  constexpr bool convertible = itself || requires {
    { *model } -> std::convertible_to<torch::nn::Module&>;
  };
  constexpr bool gathers = std::constructible_from<detail::BatchNormGroup, Comm>;
  static_assert(convertible,
                "lockstep: convert_sync_batchnorm takes a torch::nn::Module, a holder of one, or a "
                "torch::nn::AnyModule");
  static_assert(gathers,
                "lockstep: convert_sync_batchnorm takes its ranks from a communicator that reduces, gathers "
                "and splits, such as lockstep::CpuComm, or from a BatchNormGroup");
  if constexpr (convertible && gathers) {
    auto surgery = [&] {
      if constexpr (itself)
        return detail::BatchNormSurgery(model);
      else
        return detail::BatchNormSurgery(*model);
    }();
    surgery.check();
    if (surgery.empty()) return {};
    return surgery.run(detail::BatchNormGroup(std::forward<Comm>(comm)));
  } else {
    return {};
  }
}

}  // namespace lockstep::inline v0_1
