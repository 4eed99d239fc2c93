#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/nn/detail/batch_norm_kernels.hpp"

namespace lockstep::inline v0_1::detail {

/// The collectives of batch norm, independent of the communicator's type.
struct StatisticsExchange {
  virtual ~StatisticsExchange() = default;
  [[nodiscard]] virtual int size() const = 0;
  [[nodiscard]] virtual at::Tensor gather(const at::Tensor& row) = 0;  // [size, n], by rank
  virtual void sum(const at::Tensor& values) = 0;
};

/// Runs the collectives of batch norm on a communicator that it owns. Stream-ordered.
template <class Comm>
struct CommunicatorExchange final : StatisticsExchange {
  explicit CommunicatorExchange(Comm comm) : comm(std::move(comm)) {}
  [[nodiscard]] int size() const override { return comm.size(); }
  [[nodiscard]] at::Tensor gather(const at::Tensor& row) override {
    at::Tensor rows = at::empty({comm.size(), row.numel()}, row.options());
    comm.all_gather(rows, row).wait();
    return rows;
  }
  void sum(const at::Tensor& values) override { comm.all_reduce(values, ReduceOp::sum).wait(); }
  Comm comm;
};

class BatchNormGroup;

/// A communicator from which batch norm can create its group.
template <class C>
concept StatisticsCommunicator = (!std::same_as<C, BatchNormGroup>)&&Splittable<C>;

/// The ranks whose batches form one combined batch for batch norm, and their communicator, which all modules of a model
/// share. Copies share the communicator; it is destroyed with the last copy and the last module that holds it.
///
/// The group has a communicator of its own: DistributedDataParallel reduces its buckets during the same backward,
/// and a rank launches a bucket later than other ranks if a parameter is unused on it. The graph alone determines
/// the order of batch norm's own collectives, which is equal on every rank if every rank calls the same modules
/// in the same order.
class BatchNormGroup {
 public:
  BatchNormGroup() = default;

  /// Constructs a group of all ranks of `comm`, with a sub-group created for it. Collective if there are several ranks.
  template <StatisticsCommunicator Comm>
  BatchNormGroup(Comm& comm) : size_(comm.size()) {  // NOLINT: a communicator may stand for its group
    if (size_ == 1) return;
    std::vector<int> ranks(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    exchange_ = std::make_shared<CommunicatorExchange<Comm>>(std::move(*comm.new_group(ranks)));
  }

  /// Constructs a group of all ranks of `comm`, such as `*comm.new_group({0, 2})`, and takes ownership of it.
  template <StatisticsCommunicator Comm>
  BatchNormGroup(Comm&& comm) : size_(comm.size()) {  // NOLINT
    if (size_ > 1) exchange_ = std::make_shared<CommunicatorExchange<Comm>>(std::move(comm));
  }

  explicit BatchNormGroup(std::shared_ptr<StatisticsExchange> exchange)
      : size_(exchange->size()), exchange_(std::move(exchange)) {}

  [[nodiscard]] int size() const { return size_; }

  [[nodiscard]] const std::shared_ptr<StatisticsExchange>& exchange() const { return exchange_; }

 private:
  int size_ = 0;
  std::shared_ptr<StatisticsExchange> exchange_;
};

/// The part of a module that the graph keeps: its name for error messages, and its exchange.
struct BatchNormSite : torch::CustomClassHolder {
  BatchNormSite(std::string module, std::shared_ptr<StatisticsExchange> exchange)
      : module(std::move(module)), exchange(std::move(exchange)) {}

  template <class Collective>
  decltype(auto) run(const char* pass, Collective&& collective) const {
    const CallScope scope(std::string_view(pass) == "forward" ? "SyncBatchNorm::forward"
                                                              : "SyncBatchNorm::backward");
    const auto named = [&](const Error& error) {
      Failure failure = error.failure();
      failure.message = detail::formatted("{}, {}: {}", module, pass, error.what());
      return failure;
    };
    try {
      return std::forward<Collective>(collective)(*exchange);
    } catch (const TimeoutError& error) {
      throw TimeoutError(named(error));
    } catch (const PeerError& error) {
      throw PeerError(named(error));
    } catch (const CommunicationError& error) {
      throw CommunicationError(named(error));
    } catch (const MismatchError& error) {
      throw MismatchError(named(error));
    }
  }

  const std::string module;
  const std::shared_ptr<StatisticsExchange> exchange;
};

inline const BatchNormKernels& batch_norm_kernels(const at::Tensor& input, const std::string& module) {
  if (input.device().is_cpu()) return cpu_batch_norm::kernels;
  if (input.device().is_cuda()) return cuda_batch_norm::kernels;
  throw UsageError(
      detail::formatted("{}: the input is on {}, and there are kernels for CPU and CUDA tensors only", module,
                        input.device().str()));
}

/// Batch norm in training mode over the combined batch of all ranks: one collective in forward (gathers the rows)
/// and, if the input needs a gradient, one in backward (sums).
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

}  // namespace lockstep::inline v0_1::detail
