#pragma once

#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/ddp_start.hpp"
#include "lockstep/grad/detail/loop_check.hpp"
#include "lockstep/grad/detail/parameter_table.hpp"
#include "lockstep/grad/detail/reducer.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep::inline v0_1 {

/// Replicates a model over the ranks of a communicator and averages its gradients during backward.
///
/// ```cpp
/// auto ddp = lockstep::DistributedDataParallel{model, comm};
/// ...
/// ddp.backward(cross_entropy(ddp(batch.data), batch.target));
/// optimizer.step();
/// ```
///
/// Construction is collective. It compares the models of all ranks, then broadcasts rank 0's parameters and
/// buffers (see DdpOptions::init_sync and broadcast_buffers). Arithmetic, bucket contents and bucket order, and so
/// parameters, are bitwise Python's. `Hook` is the CommunicationHook that reduces the buckets.
///
/// After `backward`, `p.grad()` is a bucket view: the next backward overwrites it. Clone a gradient that must
/// outlive the next backward, or set DdpOptions::gradients to `separate`. `zero_grad` may set
/// gradients to zero or to undefined.
///
/// The object is movable. It stores a copy of a module holder; a module passed by reference and the
/// communicator must outlive it. Its autograd hooks on the parameters coexist with other hooks. The set of
/// parameters and each one's requires_grad, dtype and device must not change.
///
/// A bare `loss.backward()` also reduces gradients. If it throws, the other ranks learn of the failure only in
/// this rank's next backward. Inside a re-entrant backward the reduction may end too early; that throws and
/// never yields a wrong gradient. If several live objects hold a parameter, the one whose `backward` runs, or
/// else whose forward ran last, reduces its gradient, and the others ignore the backward; if none has run its
/// forward since its last backward, a bare one throws GradientError.
///
/// Not thread-safe: one thread at a time may use a model.
///
/// Counterpart: torch.nn.parallel.DistributedDataParallel.
template <class M, class Comm, class Hook = AllReduceHook>
class DistributedDataParallel {
  static constexpr bool alone = detail::alone<Comm>;
  using Reducer = detail::ReducerFor<Comm, Hook>;
  static_assert(detail::Trainable<M>,
                "lockstep: the model of DistributedDataParallel is a torch::nn::Module or a handle to one, a "
                "TorchScript module, or a std::vector of parameters");
  static_assert(Communicator<Comm>,
                "lockstep: the communicator of DistributedDataParallel is a type that models "
                "lockstep::Communicator, such as lockstep::CpuComm");
  static_assert(
      CommunicationHook<Hook, Comm>,
      "lockstep: the hook of DistributedDataParallel is a type that models lockstep::CommunicationHook, such "
      "as lockstep::AllReduceHook; hook_of(f) makes one of a function");

 public:
  /// Collective.
  ///
  /// Throws UsageError if no parameter requires grad or an option is invalid. Throws MismatchError if the
  /// models or the options of the ranks differ.
  explicit DistributedDataParallel(M& model, Comm& comm, DdpOptions options = {}, Hook hook = {})
      : model_(store(model)), state_(std::make_unique<State>()) {
    const detail::CallScope scope("the constructor of DistributedDataParallel");
    detail::CheckedModel checked;
    const auto check = [&] { checked = detail::checked_model(model, options); };
    state_->comm = &comm;
    state_->ignored = options.ignored;
    if constexpr (alone) {
      check();
    } else {
      agree<UsageError>(comm, check);
      detail::compare_and_broadcast(checked, options, hook, comm);
      state_->broadcasts_buffers = options.syncs_buffers();
      if (state_->broadcasts_buffers) state_->buffers = broadcast_list(checked.buffers);
    }
    if (checked.parameters.trained.empty())
      throw UsageError(
          "DistributedDataParallel got a model without a parameter that requires grad; there is nothing "
          "to train");
    state_->parameters = std::move(checked.parameters);
    state_->reducer = std::make_unique<Reducer>(state_->parameters, comm, std::move(hook), options);
  }

  /// Returns the model's forward, after `before_forward()`.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) requires(!detail::ParameterList<M>) {
    before_forward();
    if constexpr (detail::ScriptModule<M>)
      return model_.forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
    else
      return (*model_).forward(std::forward<Args>(args)...);
  }

  /// Call it before each forward that bypasses `operator()`. Collective if the model has buffers: with
  /// DdpOptions::syncs_buffers, broadcasts them when the previous forward was a training forward (grad mode
  /// on, outside `no_sync`), as Python does.
  void before_forward() {
    if (std::exchange(state_->sync_due, c10::GradMode::is_enabled() && state_->reducer->no_sync_depth == 0)) {
      const detail::CallScope scope("the forward of DistributedDataParallel (buffers)");
      run_buffer_sync();
    }
    state_->reducer->forward_begins();
  }

  /// Broadcasts the buffers now, if DdpOptions::syncs_buffers. Collective.
  void sync_buffers() {
    const detail::CallScope scope("DistributedDataParallel::sync_buffers");
    run_buffer_sync();
    state_->sync_due = false;
  }

  /// Runs backward from a scalar `loss` and averages the gradients over all ranks. Collective outside `no_sync`.
  ///
  /// If the backward of a rank throws, that exception is rethrown on that rank and the other ranks throw PeerError. If
  /// a parameter has no gradient on some rank, every rank throws GradientError with its name, unless an option allows
  /// missing gradients. After either failure no rank keeps a gradient, and the next reduction works; but if the other
  /// ranks do not reach their backward within 2 s, the communicator is aborted so that the error is reported.
  ///
  /// On a GPU the host does not wait for the reduction: the other ranks throw at the end of their next
  /// backward or in `synchronize()`, where this rank throws again. Their optimizers may have stepped in
  /// between, which leaves NaN in the parameters; the error says so. Until then this rank must run the same
  /// collectives as the others. If it wraps another model too, the communicator is aborted. docs/gpu.md lists
  /// the backwards that wait for the reduction and so throw as on a CPU.
  ///
  /// A loss may depend on several wrapped models, which must be the same on all ranks. This model is reduced
  /// while backward runs, the others after it.
  ///
  /// A loss that is no single number or requires no grad throws GradientError, and so does `create_graph`.
  void backward(const at::Tensor& loss, bool retain_graph = false, bool create_graph = false) {
    refuse(create_graph);
    run({.losses = loss}, [&] { loss.backward({}, retain_graph); });
  }

  /// Runs one backward from several losses, whose gradients add up.
  void backward(const std::vector<at::Tensor>& losses, bool retain_graph = false, bool create_graph = false) {
    refuse(create_graph);
    run({.losses = losses}, [&] { torch::autograd::backward(losses, {}, retain_graph); });
  }

  /// Runs backward from the sum of a loss over `count` samples (or tokens, or weights) of this rank. On
  /// return each gradient is the gradient of the sum over all ranks, divided by the count over all ranks.
  ///
  /// Collective outside `no_sync`; every rank must call `backward_sum`, not `backward`, in that step. Counts
  /// may differ between ranks. A rank without samples passes an undefined `sum` and 0. If the total count is
  /// 0, gradients are zero. Inside `no_sync`, sums and counts accumulate. Returns the total count, inside `no_sync`
  /// the count accumulated on this rank.
  ///
  /// With AllReduceHook and up to 256 ranks, the counts travel with the last bucket of float32 or float64;
  /// otherwise a further all-reduce sends them first.
  ///
  /// Throws UsageError if `count` is negative, not finite, or above 2^32 with a float32 bucket, or without a sum,
  /// and GradientError if backward adds to a gradient that still holds the previous reduction's average.
  double backward_sum(const at::Tensor& sum, double count, bool retain_graph = false) {
    const auto work = [&] {
      if (!std::isfinite(count) || count < 0)
        throw UsageError(detail::formatted(
            "backward_sum got the count {}: pass the number of samples in the sum, finite and 0 or more",
            count));
      detail::forget_cleared(state_->parameters.trained);
      if (sum.defined())
        sum.backward({}, retain_graph);
      else if (count != 0)
        throw UsageError(detail::formatted(
            "backward_sum got the count {} with an undefined sum: pass the sum, or the count 0", count));
      detail::require_no_average(state_->parameters.trained,
                                 [&](std::size_t i) { return state_->reducer->has_gradient(i); });
    };
    run({.losses = sum, .count = count, .no_data = !sum.defined()}, work);
    const Reducer& reducer = *state_->reducer;
    return reducer.no_sync_depth > 0 ? reducer.count_so_far() : reducer.total_count();
  }

  /// Takes part in the reduction of the other ranks' `backward` with zeros, for a rank without data in this
  /// step. Gradients accumulated under `no_sync` are reduced. Collective.
  ///
  /// Not supported for a loss over several wrapped models.
  void backward_empty() {
    run({.losses = {}, .no_data = true}, [] {});
  }

  /// Reports that this rank cannot run the backward of this step, because its forward or its data loading
  /// threw `failure`. The other ranks throw PeerError with its text, when `backward` would. Collective. Never
  /// throws: an error of an earlier backward is kept for the next `synchronize()` or `backward`.
  ///
  /// Set `counted` if the other ranks call `backward_sum`. If the model itself runs collectives, abort the
  /// communicator instead.
  void fail_backward(const std::exception_ptr& failure, bool counted = false) noexcept {
    const detail::CallScope scope(detail::backward_name);
    state_->reducer->fail_backward(failure, counted);
  }

  /// Blocks the host until the last reduction is complete, and throws the error of a rank whose backward
  /// failed in it. Call it on every rank before parameters are saved or evaluated; a Trainer does. Collective.
  /// A no-op on CPUs, where `backward` itself throws.
  void synchronize() {
    const detail::CallScope scope("DistributedDataParallel::synchronize");
    state_->reducer->settle();
  }

  /// Returns whether the other ranks learn of a failed `backward` later. Equal on every rank. False on CPUs.
  [[nodiscard]] bool checks_late() const { return state_->reducer->checks_late(); }

  /// Discards the counts and the record of used parameters that backwards under `no_sync` have accumulated, but
  /// not the gradients. Not collective.
  void forget() { state_->reducer->forget(); }

  /// Returns a guard that disables the reduction. While it lives, backward only accumulates gradients on this
  /// rank; the first backward after it reduces the sum. Every rank must do the same.
  ///
  /// The guard applies to each backward that runs inside it, whereas Python's applies to each forward. Buffers follow
  /// the forward, as in Python. Guards nest; none may outlive this object. With `enabled` false the guard is a no-op.
  ///
  /// Counterpart: torch.nn.parallel.DistributedDataParallel.no_sync.
  [[nodiscard]] auto no_sync(bool enabled = true) {
    struct Guard {
      explicit Guard(State* state) : state(state) {
        if (!state) return;
        if (state->reducer->no_sync_depth++ == 0)
          state->loop.begin_no_sync(*state->comm, state->parameters.trained);
      }
      Guard(Guard&& other) noexcept : state(std::exchange(other.state, nullptr)) {}
      Guard& operator=(Guard&&) = delete;
      ~Guard() {
        if (!state) return;
        if (--state->reducer->no_sync_depth == 0)
          state->loop.end_no_sync(*state->comm, state->parameters.trained);
      }
      State* state;
    };
    return Guard(enabled ? state_.get() : nullptr);
  }

  /// Returns the model's parameters in registration order, a tied parameter once. Pass them to the optimizer.
  /// `named_parameters` has their names too.
  [[nodiscard]] std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& parameter : named_parameters()) tensors.push_back(parameter.tensor);
    return tensors;
  }

  [[nodiscard]] const std::vector<NamedTensor>& named_parameters() const { return state_->parameters.all; }

  /// Returns the wrapped model: the holder, or the module itself.
  [[nodiscard]] M& module() {
    if constexpr (detail::ModuleImpl<M>)
      return *model_;
    else
      return model_;
  }

  /// Returns the communication hook.
  [[nodiscard]] Hook& hook() requires(!detail::alone<Comm>) { return state_->reducer->hook(); }

  /// Returns the buckets in use, as indices into the parameters that require grad. Empty for LocalComm.
  [[nodiscard]] detail::BucketPlan buckets() const { return state_->reducer->plan(); }

  /// Returns what a resumed run needs besides the model and the optimizer for the bits of an uninterrupted
  /// one: the bucket order, the number of backwards, each rank's expected gradients and hook state, and the threads,
  /// CPU capability and LibTorch that the bits depend on, which alone is the state for LocalComm. None on the other
  /// ranks than 0. lockstep::torch_save and `torch.load` take it in any dict. Collective: call it between steps, and
  /// before a rank-zero scope.
  [[nodiscard]] c10::IValue state() {
    const detail::CallScope scope("DistributedDataParallel::state");
    return state_->reducer->state();
  }
  /// Restores a `state`, the same on every rank, outside `no_sync`; None and the state of a LocalComm change nothing.
  /// On another number of ranks, a hook restores the part of its state that is equal on every rank. Logs a warning if
  /// only one of the two has a stateful hook, or the bits depend on other things. Throws CheckpointError if the state
  /// is damaged or another model's, or what the hook throws, and then changes nothing on this rank.
  void load_state(const c10::IValue& state) { state_->reducer->load_state(state); }
  /// Returns a function that reverts later calls of `load_state` on this rank, unless this object was moved.
  [[nodiscard]] auto snapshot() {
    return [this, restore = state_->reducer->snapshot()] { restore(*state_->reducer); };
  }

  /// Reverts the hook's state to its value before the last reduction, for a skipped step. No-op unless the
  /// hook is a StatefulHook.
  void rollback() { state_->reducer->rollback(); }

  /// Returns the statistics of the last reduction. Empty for LocalComm.
  [[nodiscard]] DdpReport report() const { return state_->reducer->report(); }
  /// Records when the reduction of each bucket completes, for BucketReport::completed; off by default. With
  /// communicators other than CpuComm, ShmComm and GlooComm, and hooks with a Reduction of their own, that is when the wait for it
  /// returned. Call it between steps.
  void record_completions(bool enabled = true) { state_->reducer->record_completions(enabled); }

 private:
  struct State {
    Comm* comm = nullptr;
    bool sync_due = true;
    detail::BroadcastList buffers{{}};
    bool broadcasts_buffers = false;
    detail::LoopCheck loop;
    std::vector<std::string> ignored;
    detail::ParameterTable parameters;
    std::unique_ptr<Reducer> reducer;  // refers to the members above
  };

  static auto store(M& model) {
    if constexpr (detail::ModuleImpl<M>)
      return &model;
    else
      return model;
  }

  static detail::BroadcastList broadcast_list(const std::vector<NamedTensor>& buffers) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& buffer : buffers) tensors.push_back(buffer.tensor);
    return detail::BroadcastList(std::move(tensors));
  }

  void run_buffer_sync() {
    // The forward of a ScriptModule replaces the tensor of a buffer that it assigns.
    if constexpr (detail::ScriptModule<M>)
      if (state_->broadcasts_buffers)
        state_->buffers =
            broadcast_list(detail::without_ignored(tensors_of(model_), state_->ignored).buffers);
    if (!state_->buffers.empty()) state_->buffers.run(*state_->comm, 0);
  }

  static void refuse(bool create_graph) {
    if (create_graph)
      throw GradientError(
          "ddp.backward with create_graph is refused: gradients of gradients would not be averaged "
          "over the ranks; take them with torch::autograd::grad and put the result into the loss");
  }

  static void check_losses(const detail::Contribution& contribution) {
    for (const at::Tensor& loss : contribution.losses) {
      if (!loss.defined() && contribution.no_data) continue;
      const char* fault = !loss.defined()     ? "is undefined: compute it from the model's output"
                          : loss.numel() != 1 ? "is no single number: take its mean() or its sum()"
                          : !loss.requires_grad()
                              ? "does not require grad: compute it from the model's output "
                                "in grad mode, and do not detach() it"
                              : nullptr;
      if (fault)
        throw GradientError(
            detail::formatted("the loss {}{}", loss.defined() ? detail::describe(loss) + " " : "", fault));
    }
  }

  template <class Run>
  void run(const detail::Contribution& contribution, Run&& backward) {
    if (state_->reducer->no_sync_depth == 0 && !contribution.count && !contribution.no_data)
      state_->loop.begin_backward(*state_->comm);
    const detail::CallScope scope(detail::backward_name);
    state_->reducer->backward(contribution, [&] {
      check_losses(contribution);
      state_->reducer->check_model(contribution.losses, [&] { return tensors_of(module()).parameters; });
      backward();
    });
    if (state_->reducer->no_sync_depth == 0) detail::note_reduced(state_->parameters.trained);
  }

  std::conditional_t<detail::ModuleImpl<M>, M*, M> model_;
  std::unique_ptr<State> state_;  // hooks hold its address, so it must not move
};

}  // namespace lockstep::inline v0_1
