#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/detail/batch_norm_group.hpp"
#include "lockstep/nn/detail/batch_norm_kernels.hpp"
#include "lockstep/nn/detail/cpu_batch_norm.hpp"
#include "lockstep/nn/detail/cuda_batch_norm.hpp"

namespace lockstep::detail {

/// The part of a module that the graph keeps: its name for error messages, and its exchange.
struct BatchNormSite : torch::CustomClassHolder {
  BatchNormSite(std::string module, std::shared_ptr<StatisticsExchange> exchange)
      : module(std::move(module)), exchange(std::move(exchange)) {}

  /// Returns `collective(exchange)`. Adds the module and the pass to its errors.
  template <class Collective>
  decltype(auto) run(const char* pass, Collective&& collective) const {
    const auto named = [&](const Error& error) {
      return detail::formatted("{}, {}: {}", module, pass, error.what());
    };
    try {
      return std::forward<Collective>(collective)(*exchange);
    } catch (const TimeoutError& error) {
      throw TimeoutError(named(error), error.rank());
    } catch (const PeerError& error) {
      throw PeerError(named(error), error.rank());
    } catch (const CommunicationError& error) {
      throw CommunicationError(named(error), error.rank());
    } catch (const MismatchError& error) {
      throw MismatchError(named(error), error.rank());
    }
  }

  const std::string module;
  const std::shared_ptr<StatisticsExchange> exchange;
};

/// Returns the kernels for the device of `input`. Throws UsageError for an unsupported device.
inline const BatchNormKernels& batch_norm_kernels(const at::Tensor& input, const std::string& module) {
  if (input.device().is_cpu()) return cpu_batch_norm::kernels;
  if (input.device().is_cuda()) return cuda_batch_norm::kernels;
  throw UsageError(
      detail::formatted("{}: the input is on {}, and there are kernels for CPU and CUDA tensors only", module,
                        input.device().str()));
}

/// Batch norm in training mode over the joined batch of all ranks. Runs one collective in forward (gathers
/// the rows) and, if the input needs a gradient, one in backward (sums). Every rank takes part, also with an
/// empty batch. The gradients of weight and bias are those of this rank's batch, for DistributedDataParallel
/// to average.
struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  using Context = torch::autograd::AutogradContext;
  using SitePtr = c10::intrusive_ptr<BatchNormSite>;

  static at::Tensor forward(Context* context, const at::Tensor& given,
                            const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                            const RunningStatistics& running, double eps, const SitePtr& site) {
    const BatchNormKernels& kernels = batch_norm_kernels(given, site->module);
    const at::Tensor input = given.contiguous(given.suggest_memory_format());
    const at::Tensor row = kernels.local(input, eps);
    const at::Tensor rows = site->run("forward", [&](auto& exchange) { return exchange.gather(row); });
    const JoinedStatistics joined = kernels.join(rows, input, eps, running);
    const at::Tensor scale = weight.value_or(at::Tensor()), shift = bias.value_or(at::Tensor());
    context->save_for_backward({input, scale, joined.mean, joined.invstd, joined.count});
    context->saved_data["site"] = c10::IValue::make_capsule(site);
    if (input.numel() == 0) return at::empty_like(input);
    return kernels.normalize(input, scale, shift, joined);
  }

  static torch::autograd::variable_list backward(Context* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto capsule = context->saved_data["site"].toCapsule();
    const auto& site = static_cast<const BatchNormSite&>(*capsule);
    // Checked before the collective, so that all ranks throw here.
    if (c10::GradMode::is_enabled())
      throw GradientError(detail::formatted(
          "{}: backward with create_graph is refused, since the gradient of its gradient is not implemented; "
          "use a norm without batch statistics where gradients of gradients are needed",
          site.module));
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const JoinedStatistics joined{saved[2], saved[3], saved[4]};
    const BatchNormKernels& kernels = batch_norm_kernels(input, site.module);
    const at::Tensor gradient = gradients[0].contiguous(input.suggest_memory_format());
    const at::Tensor sums = kernels.sums(gradient, input, joined);

    at::Tensor of_input, of_weight, of_bias;
    if (weight.defined()) {
      const std::int64_t channels = input.size(1);
      of_weight = (sums.narrow(0, channels, channels) * joined.invstd).to(weight.scalar_type());
      // A copy, not a view: the collective overwrites `sums`.
      of_bias = sums.narrow(0, 0, channels).to(weight.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
    if (context->needs_input_grad(0)) {
      site.run("backward", [&](auto& exchange) { exchange.sum(sums); });
      of_input = kernels.input_gradient(gradient, input, weight, joined, sums);
    }
    return {of_input, of_weight, of_bias, {}, {}, {}};
  }
};

}  // namespace lockstep::detail
