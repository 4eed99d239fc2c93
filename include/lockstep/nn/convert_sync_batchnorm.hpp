#pragma once

#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/detail/batch_norm_group.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"

namespace lockstep::detail {

template <std::size_t D>
struct PlainBatchNorm;
template <>
struct PlainBatchNorm<1> : std::type_identity<torch::nn::BatchNorm1dImpl> {};
template <>
struct PlainBatchNorm<2> : std::type_identity<torch::nn::BatchNorm2dImpl> {};
template <>
struct PlainBatchNorm<3> : std::type_identity<torch::nn::BatchNorm3dImpl> {};

/// A place that holds a batch norm: the AnyModule that calls it, and the name under which its parent
/// registers it.
struct BatchNormPlace {
  torch::nn::AnyModule* caller = nullptr;
  torch::nn::Module* parent = nullptr;
  std::string key;
};

/// A batch norm to replace, with all places that hold it.
struct ReplacedBatchNorm {
  std::weak_ptr<torch::nn::Module> module;
  std::string name, kind;
  std::shared_ptr<std::vector<BatchNormPlace>> places;
};

/// Finds and replaces the batch norms below a module. Checks all of them first, so that a failure changes
/// nothing.
class BatchNormSurgery {
 public:
  explicit BatchNormSurgery(torch::nn::Module& root) { enter(root, {}); }
  explicit BatchNormSurgery(torch::nn::AnyModule& root) { enter(*root.ptr(), {&root, nullptr, {}}); }

  /// Throws UsageError with the name of every module that cannot be converted.
  void check() {
    for (const ReplacedBatchNorm& replaced : replaced_) {
      // Another holder would keep calling the old module, which uses the statistics of its own rank.
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

  /// Synchronizes every module found over `group` and returns their names.
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

  /// Returns whether the module is a batch norm of any kind.
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
                               "goes on calling it: declare it as lockstep::SyncBatchNorm{0}d",
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

}  // namespace lockstep::detail

namespace lockstep {

/// Converts every batch norm of a model to compute its statistics over the ranks of `comm`. Returns the names
/// of the converted modules.
///
/// Call it before or after the model is wrapped and its optimizer constructed: parameters and buffers remain
/// the same tensors. `model` is a module, a holder or a torch::nn::AnyModule; it may itself be a batch norm.
/// Converted are:
/// - torch::nn::BatchNorm1d, 2d and 3d inside a torch::nn::Sequential at any depth. Each is replaced by a
///   lockstep::SyncBatchNormNd with the same options, mode and tensors.
/// - lockstep::SyncBatchNormNd anywhere, such as a member of a module. Its group is replaced by the new one.
///
/// Throws UsageError with the names of all batch norms that cannot be converted, and then changes nothing:
/// members and modules that are only registered, also in a ModuleList or ModuleDict; classes derived from
/// BatchNormNd; modules in a Sequential that also have another holder. Python can replace a member, but a C++
/// member `torch::nn::BatchNorm2d bn{nullptr}` always calls the forward of its own type and would use its own
/// rank's statistics. Declare it as lockstep::SyncBatchNormNd instead.
///
/// A batch norm that its holder does not register, such as an AnyModule member, is not found: convert it
/// before the module takes it.
///
/// `comm` is a communicator, of which a separate group is made for batch norm (see BatchNormGroup), or a
/// BatchNormGroup. Collective if there are several ranks. Communicates nothing for a model without batch
/// norms.
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
                "and splits, such as lockstep::GlooComm, or from a BatchNormGroup");
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

}  // namespace lockstep
