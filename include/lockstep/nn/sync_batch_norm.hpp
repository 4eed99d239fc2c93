#pragma once

#include <cstddef>
#include <ostream>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/detail/batch_norm_group.hpp"
#include "lockstep/nn/detail/sync_batch_norm_function.hpp"

namespace lockstep {

/// A module whose training forward is a collective: every rank must call it equally often. A class derives
/// from this and from torch::nn::Module.
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

/// Applies batch normalization over the combined mini-batches of all ranks. In training, mean, variance and
/// gradients are those of the combined batch, so that the ranks train as one process would on the whole
/// batch.
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
/// with a batch of any size, including an empty one. The error of a rank that misses a peer names the peer
/// and the module. The gradients of weight and bias are those of this rank's batch; DistributedDataParallel
/// averages them. The running variance of a channel is left unchanged if the combined batch has only one
/// value of it.
///
/// In eval mode, and with a single process, nothing is communicated and results are those of
/// torch::nn::BatchNormNd. Double backward throws GradientError. torch::nn::BatchNormNd is not a base class,
/// because code that calls it through that type would skip the collectives.
///
/// Counterpart: torch.nn.SyncBatchNorm, except that ranks exchange the sum of squared deviations instead of 1
/// / sqrt(variance + eps), which loses a variance far below eps.
template <std::size_t D>
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<D, SyncBatchNormImpl<D>>,
                          public CollectiveModule {
  using Base = torch::nn::BatchNormImplBase<D, SyncBatchNormImpl<D>>;
  static_assert(D >= 1 && D <= 3, "lockstep: SyncBatchNorm is for 1, 2 or 3 dimensions, as torch::nn's are");

 public:
  /// Constructs a module. Without a group, convert_sync_batchnorm sets one; a training forward before that
  /// throws UsageError. A communicator passed as the group makes a group for this module alone, which is
  /// collective: share one BatchNormGroup among many modules instead.
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

  /// Sets the group whose batches are combined, and the module's name in errors.
  void synchronize(const detail::BatchNormGroup& group, std::string name) {
    size_ = group.size();
    site_ = c10::make_intrusive<detail::BatchNormSite>(std::move(name), group.exchange());
  }

  /// Returns the number of ranks whose batches are combined; 0 before a group is set.
  [[nodiscard]] int ranks() const override { return size_; }

  /// Throws UsageError if the input's shape or dtype does not fit or no group is set; throws
  /// CommunicationError or a class derived from it if the collective fails.
  at::Tensor forward(const at::Tensor& input) {
    if (!this->is_training() || size_ == 1) return Base::forward(input);
    _check_input_dim(input);
    if (size_ == 0)
      throw UsageError(detail::formatted(
          "{} has no ranks to join batches with: call convert_sync_batchnorm(model, comm) before training, "
          "or give it a communicator when it is made",
          site_->module));
    return detail::SyncBatchNormFunction::apply(
        input, std::optional<at::Tensor>(this->weight), std::optional<at::Tensor>(this->bias),
        detail::RunningStatistics{this->running_mean, this->running_var, count_batch()}, this->options.eps(),
        site_);
  }

  /// Returns for example "SyncBatchNorm2d".
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

/// Module holders, as in torch::nn.
TORCH_MODULE_IMPL(SyncBatchNorm1d, SyncBatchNormImpl<1>);
TORCH_MODULE_IMPL(SyncBatchNorm2d, SyncBatchNormImpl<2>);
TORCH_MODULE_IMPL(SyncBatchNorm3d, SyncBatchNormImpl<3>);

}  // namespace lockstep
