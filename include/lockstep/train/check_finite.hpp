#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/metrics.hpp"

namespace lockstep {

/// A GradientCheck that rejects NaN and infinite gradients. If a gradient holds one, every rank throws the
/// same GradientError, which names the parameter, the step and the ranks whose own gradients were not finite.
/// The parameters keep the values of the last step.
///
/// It reads each gradient twice, before and after the reduction, and synchronizes with the device. Ranks
/// communicate only if the check fails or if the communication hook does not propagate NaN. Do not use it
/// with a precision that scales losses: such a precision overflows as part of its normal work.
class CheckFinite {
 public:
  CheckFinite() = default;
  CheckFinite(CheckFinite&&) = default;
  CheckFinite& operator=(CheckFinite&&) = default;

  void watch(const std::vector<NamedTensor>& parameters) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      if (parameters[i].tensor.requires_grad())
        watched_.push_back(std::make_unique<Watch>(i, parameters[i].tensor));
  }

  void begin_step() {
    for (const auto& watch : watched_) watch->own = at::Tensor();
  }

  template <Gathering C>
  void check(const Gradients& gradients, C& comm) {
    std::size_t first = 0;
    std::string reduced;
    for (; first < watched_.size(); ++first) {
      reduced = not_finite(largest(gradients.parameters[watched_[first]->index].grad()));
      if (!reduced.empty()) break;
    }
    if (!gradients.propagates_nan)
      for (const std::string& there : agree(comm, [&] { return std::to_string(first); }))
        first = std::min<std::size_t>(first, std::stoull(there));
    if (first == watched_.size()) return;
    // A hook may spread a NaN over its bucket: blame a gradient that was not finite before the reduction.
    const std::vector<std::string> own = agree(comm, [&] { return first_of_own(); });
    std::size_t culprit = watched_.size();
    for (const std::string& found : own)
      if (!found.empty()) culprit = std::min<std::size_t>(culprit, std::stoull(found));
    throw detail::CollectiveError<GradientError>(
        describe(*watched_[culprit < watched_.size() ? culprit : first], gradients) +
        blame(own, culprit, reduced, detail::RankNames(comm)));
  }

 private:
  /// Tracks the largest magnitude of the gradients that this rank's backwards computed for a parameter; NaN
  /// if one was NaN.
  struct Watch {
    Watch(std::size_t index, const at::Tensor& parameter) : index(index), parameter(parameter) {
      hook = parameter.register_hook([this](const at::Tensor& gradient) {
        const at::Tensor here = largest(gradient);
        if (here.defined()) own = own.defined() ? at::maximum(own, here) : here;
      });
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() { parameter.remove_hook(hook); }

    std::size_t index;
    at::Tensor parameter, own;
    unsigned hook;
  };

  static at::Tensor largest(const at::Tensor& gradient) {
    if (!gradient.defined()) return {};
    const at::NoGradGuard no_grad;
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    if (values.numel() == 0) return {};
    return at::linalg_vector_norm(values, std::numeric_limits<double>::infinity());
  }

  // Returns "nan", "inf", or an empty string if it is finite or undefined.
  static std::string not_finite(const at::Tensor& largest) {
    if (!largest.defined()) return "";
    const double value = detail::host_value(largest);
    return std::isnan(value) ? "nan" : std::isinf(value) ? "inf" : "";
  }

  static std::string describe(const Watch& watch, const Gradients& gradients) {
    return detail::formatted(
        "the gradient of parameter {} '{}' is not finite in step {} of epoch {}: ", watch.index,
        gradients.named_parameters[watch.index].name, gradients.step, gradients.epoch);
  }

  // Returns the first parameter whose gradient on this rank was not finite before the reduction, such as
  // "3 nan", or an empty string.
  [[nodiscard]] std::string first_of_own() const {
    for (std::size_t i = 0; i < watched_.size(); ++i)
      if (const std::string kind = not_finite(watched_[i]->own); !kind.empty())
        return detail::formatted("{} {}", i, kind);
    return {};
  }

  // Returns the ranks that caused the error: those with `culprit` as their first.
  static std::string blame(const std::vector<std::string>& own, std::size_t culprit,
                           const std::string& reduced, const detail::RankNames& name_of) {
    std::string ranks;
    for (std::size_t rank = 0; rank < own.size(); ++rank)
      if (!own[rank].empty() && std::stoull(own[rank]) == culprit)
        ranks += detail::formatted("{}rank {} has {}", ranks.empty() ? "" : ", ", name_of(rank),
                                   own[rank].substr(own[rank].find(' ') + 1));
    if (ranks.empty())
      return detail::formatted("it is finite on each rank, but {} after the reduction",
                               reduced.empty() ? "nan or inf" : reduced);
    return ranks + "; look at their batches of this step, or lower the learning rate";
  }

  std::vector<std::unique_ptr<Watch>> watched_;
};

}  // namespace lockstep
