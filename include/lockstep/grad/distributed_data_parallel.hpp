#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/broadcast_list.hpp"
#include "lockstep/grad/bucket_plan.hpp"
#include "lockstep/grad/model_check.hpp"
#include "lockstep/grad/named_tensors.hpp"
#include "lockstep/grad/reducer.hpp"

namespace lockstep {

struct DdpOptions {
  /// Size limits of the buckets in bytes, of the first, the second and so on; the last holds for all after
  /// it. One value alone is what Python's bucket_cap_mb sets (times 2^20).
  std::vector<std::size_t> bucket_caps = default_bucket_caps();
  /// Rank 0's buffers (running statistics) go to all ranks before a forward, as in Python.
  bool broadcast_buffers = true;
};

namespace detail {
template <class M>
concept ModuleImpl = std::derived_from<M, torch::nn::Module>;
template <class M>
concept ModuleHandle = std::copyable<M> && requires(M& handle) {
  { *handle } -> std::convertible_to<const torch::nn::Module&>;
};

// A communicator of one process, known as such when compiling: no hook, no copy, no check is left.
template <class Comm>
inline constexpr bool alone = std::same_as<Comm, LocalComm>;
struct NoReducer {};
template <class Comm>
struct ReducerFor {
  using type = Reducer<Comm>;
};
template <>
struct ReducerFor<LocalComm> {
  using type = NoReducer;
};
}  // namespace detail

/// A model of LibTorch: a module (`ConvNetImpl`), or a handle to one (`ConvNet` as TORCH_MODULE makes it, a
/// shared_ptr).
template <class M>
concept Model = detail::ModuleImpl<M> || detail::ModuleHandle<M>;

/// Trains one model on all ranks of a communicator: the same parameters at the start, gradients averaged in
/// backward.
///
/// ```cpp
/// auto ddp = lockstep::DistributedDataParallel{model, comm};
/// ...
/// ddp.backward(cross_entropy(ddp(batch.data), batch.target));
/// optimizer.step();
/// ```
///
/// Construction is collective. It compares the models of all ranks, then sends rank 0's parameters and
/// buffers to all. Arithmetic, bucket contents and order are Python's, so parameters stay equal to its bit
/// for bit.
///
/// After `backward` the gradients lie in the buckets: `p.grad()` shares their memory, and the next backward
/// writes there. Clone what must outlive it. Both kinds of `zero_grad` work. Hooks on the parameters stack
/// with others' and go with this object; it may be moved, a holder it was made from may die, a module given
/// by reference and the communicator must outlive it. Parameters, their requires_grad, dtype and device must
/// stay as they were.
///
/// A bare `loss.backward()` reduces too, as best effort: where it throws, the other ranks learn of it only in
/// this rank's next backward, and inside a re-entrant backward it may end too early, which is an error and
/// not a wrong gradient. One thread uses one model at a time.
template <Model M, Communicator Comm>
class DistributedDataParallel {
  static constexpr bool alone = detail::alone<Comm>;
  static_assert(
      alone || (Reducing<Comm> && Gathering<Comm>),
      "DistributedDataParallel needs a communicator that reduces and gathers (concepts Reducing, Gathering)");

 public:
  /// Throws UsageError where no parameter requires grad or an option is wrong, MismatchError where models
  /// differ.
  DistributedDataParallel(M& model, Comm& comm, DdpOptions options = {})
      : model_(store(model)), parameters_(unique_parameters(base())), state_(std::make_unique<State>()) {
    std::vector<NamedTensor> trained;
    for (const NamedTensor& parameter : parameters_)
      if (parameter.tensor.requires_grad()) trained.push_back(parameter);
    const auto& caps = options.bucket_caps;
    if (caps.empty() || std::find(caps.begin(), caps.end(), 0) != caps.end())
      throw UsageError("bucket_caps must hold at least one size in bytes, each greater than 0");
    if constexpr (alone) {
      require_some(trained);
    } else {
      std::vector<NamedTensor> buffers = unique_buffers(base());
      check_same_model(parameters_, buffers, comm);
      require_some(trained);
      std::vector<at::Tensor> state;
      for (const auto& list : {parameters_, buffers})
        for (const NamedTensor& item : list) state.push_back(item.tensor);
      detail::BroadcastList(std::move(state)).run(comm, 0);
      state_->comm = &comm;
      if (options.broadcast_buffers) {
        std::vector<at::Tensor> tensors;
        for (NamedTensor& item : buffers) tensors.push_back(std::move(item.tensor));
        state_->buffers = detail::BroadcastList(std::move(tensors));
      }
      state_->reducer =
          std::make_unique<detail::Reducer<Comm>>(std::move(trained), comm, options.bucket_caps);
    }
  }

  /// Forwards to the model, after `before_forward()`.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    before_forward();
    return impl().forward(std::forward<Args>(args)...);
  }

  /// What must precede each forward where the model is called directly. Collective where it has buffers:
  /// sends rank 0's to all, in a forward that follows one in training (grad mode on, outside `no_sync`), as
  /// Python does.
  void before_forward() {
    if constexpr (!alone) {
      if (std::exchange(state_->sync_due, c10::GradMode::is_enabled() && state_->reducer->no_sync_depth == 0))
        state_->buffers.run(*state_->comm, 0);
    }
  }

  /// Sends rank 0's buffers to all ranks now, so that an evaluation that follows is one model's. Collective.
  void sync_buffers() {
    if constexpr (!alone) {
      state_->buffers.run(*state_->comm, 0);
      state_->sync_due = false;
    }
  }

  /// Backward, and the gradients averaged over all ranks: on return each parameter's gradient is the average.
  /// Collective, outside `no_sync`. Whatever happens inside, the reduction ends on every rank and the next
  /// one works: what backward throws is rethrown here, while the other ranks throw PeerError; where a
  /// parameter got no gradient on some rank, every rank throws GradientError naming it. After either, no rank
  /// keeps a gradient. Where the other ranks take more than two seconds to come to a backward that threw
  /// here, the communicator is aborted instead, so that the error is seen: then nothing works on it any more.
  ///
  /// A loss that depends on several models, each wrapped by one of these, reduces all of them; keep out of
  /// one with its `no_sync`, or freeze its parameters.
  ///
  /// `loss` is a scalar that requires grad. `create_graph` is refused with GradientError.
  void backward(const at::Tensor& loss, bool retain_graph = false, bool create_graph = false) {
    run(create_graph, [&] { loss.backward({}, retain_graph); });
  }

  /// The same for several losses in one backward, whose gradients add up.
  void backward(const std::vector<at::Tensor>& losses, bool retain_graph = false, bool create_graph = false) {
    run(create_graph, [&] { torch::autograd::backward(losses, {}, retain_graph); });
  }

  /// While the guard that this returns lives, backward only accumulates on this rank; the first backward
  /// after it reduces the sum. Every rank must do the same. Where Python looks at whether the forward ran
  /// inside `no_sync`, here it is the backward that counts (for the buffers it is the forward). Guards nest;
  /// the guard must not outlive this object.
  [[nodiscard]] auto no_sync() {
    struct Guard {
      explicit Guard(State* state) : state(state) { count(+1); }
      Guard(Guard&& other) noexcept : state(std::exchange(other.state, nullptr)) {}
      Guard& operator=(Guard&&) = delete;
      ~Guard() {
        if (state) count(-1);
      }
      void count([[maybe_unused]] int step) const {
        if constexpr (!alone) state->reducer->no_sync_depth += step;
      }
      State* state;
    };
    return Guard(state_.get());
  }

  /// The model's parameters in registration order, a tied one once: what an optimizer should get.
  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& parameter : parameters_) tensors.push_back(parameter.tensor);
    return tensors;
  }

  /// The same with names.
  [[nodiscard]] const std::vector<NamedTensor>& named_parameters() const { return parameters_; }

  /// The model as it was given: a holder, or the module itself.
  [[nodiscard]] M& module() {
    if constexpr (detail::ModuleImpl<M>)
      return *model_;
    else
      return model_;
  }

  /// The buckets in use, as indices into the parameters that require grad; empty for LocalComm.
  [[nodiscard]] BucketPlan buckets() const {
    if constexpr (alone)
      return {};
    else
      return state_->reducer->plan();
  }

 private:
  struct State {
    Comm* comm = nullptr;
    bool sync_due = true;
    detail::BroadcastList buffers{{}};
    std::unique_ptr<typename detail::ReducerFor<Comm>::type> reducer;
  };

  static auto store(M& model) {
    if constexpr (detail::ModuleImpl<M>)
      return &model;
    else
      return model;
  }
  auto& impl() { return *model_; }
  const torch::nn::Module& base() { return impl(); }

  static void require_some(const std::vector<NamedTensor>& trained) {
    if (trained.empty())
      throw UsageError(
          "DistributedDataParallel got a model without a parameter that requires grad; there is nothing "
          "to train");
  }

  template <class Run>
  void run(bool create_graph, Run&& backward) {
    if (create_graph)
      throw GradientError(
          "ddp.backward with create_graph is refused: gradients of gradients would not be averaged "
          "over the ranks; take them with torch::autograd::grad and put the result into the loss");
    if constexpr (alone)
      backward();
    else
      state_->reducer->backward(std::forward<Run>(backward));
  }

  std::conditional_t<detail::ModuleImpl<M>, M*, M> model_;
  std::vector<NamedTensor> parameters_;
  std::unique_ptr<State> state_;  // hooks point into it: it does not move
};

}  // namespace lockstep
