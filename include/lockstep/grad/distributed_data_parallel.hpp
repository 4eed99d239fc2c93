#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/same_errors.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/ddp_options.hpp"
#include "lockstep/grad/ddp_report.hpp"
#include "lockstep/grad/detail/bucket_plan.hpp"
#include "lockstep/grad/detail/buffer_sync.hpp"
#include "lockstep/grad/detail/ddp_start.hpp"
#include "lockstep/grad/detail/low_precision_parameters.hpp"
#include "lockstep/grad/detail/ready_order.hpp"
#include "lockstep/grad/detail/reduced_gradient_tracker.hpp"
#include "lockstep/grad/detail/reducer_for.hpp"
#include "lockstep/grad/detail/watched_parameters.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/grad/model.hpp"

namespace lockstep {

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
/// buffers to all (but see DdpOptions::init_sync). Arithmetic, bucket contents and order are Python's, so
/// parameters stay equal to its bit for bit. `Hook` is how buckets are reduced: a CommunicationHook, plain by
/// default.
///
/// After `backward` the gradients lie in the buckets: `p.grad()` shares their memory, and the next backward
/// writes there. Clone what must outlive it, or set DdpOptions::gradients to `separate`. Both kinds of
/// `zero_grad` work. Hooks on the parameters stack with others' and go with this object; it may be moved, a
/// holder it was made from may die, a module given by reference and the communicator must outlive it.
/// Parameters, their requires_grad, dtype and device must stay as they were (but see
/// DdpOptions::param_dtype).
///
/// A bare `loss.backward()` reduces too, as best effort: where it throws, the other ranks learn of it only in
/// this rank's next backward, and inside a re-entrant backward it may end too early, which is an error and
/// not a wrong gradient. One thread uses one model at a time.
template <class M, class Comm, class Hook = AllReduceHook>
class DistributedDataParallel {
  static constexpr bool alone = detail::alone<Comm>;
  static_assert(Trainable<M>,
                "lockstep: the model of DistributedDataParallel is a torch::nn::Module or a handle to one, a "
                "TorchScript module, or a std::vector of parameters");
  static_assert(
      alone || (Reducing<Comm> && Gathering<Comm>),
      "lockstep: DistributedDataParallel needs a communicator that reduces and gathers (concepts Reducing, "
      "Gathering)");
  static_assert(
      CommunicationHook<Hook, Comm>,
      "lockstep: the hook of DistributedDataParallel is a type that models lockstep::CommunicationHook, such "
      "as lockstep::AllReduceHook; hook_of(f) makes one of a function");

 public:
  /// Throws UsageError where no parameter requires grad or an option is wrong, MismatchError where the models
  /// or the options of the ranks differ.
  explicit DistributedDataParallel(M& model, Comm& comm, DdpOptions options = {}, Hook hook = {})
      : model_(store(model)), state_(std::make_unique<State>()) {
    detail::SeenModel seen;
    const auto look = [&] { seen = detail::look_at(model, options); };
    if constexpr (alone)
      look();
    else
      detail::check_on_every_rank(comm, look);
    parameters_ = seen.tensors.parameters;
    state_->trained = seen.trained;
    state_->watched = detail::WatchedParameters(parameters_, options.ignored);
    if (options.param_dtype) state_->low_precision.emplace(parameters_, *options.param_dtype);
    if constexpr (!alone) detail::start_alike(seen, options, hook, comm);
    detail::require_some(seen.trained);
    if (options.buffer_dtype) detail::cast_buffers(seen.tensors.buffers, *options.buffer_dtype);
    detail::LowPrecisionParameters* low_precision = state_->low_precision ? &*state_->low_precision : nullptr;
    if constexpr (alone) {
      state_->reducer = std::make_unique<detail::NoReducer>(seen.trained, low_precision);
    } else {
      state_->buffers = detail::BufferSync(seen.tensors.buffers, options.broadcast_buffers);
      state_->policy = options.broadcast_buffers;
      state_->ignored = options.ignored;
      state_->comm = &comm;
      state_->reducer = std::make_unique<detail::Reducer<Comm, Hook>>(
          std::move(seen.trained), seen.sparse, comm, std::move(hook), options, low_precision);
    }
  }

  /// Forwards to the model, after `before_forward()`. With DdpOptions::param_dtype its arguments that are
  /// floating-point tensors (not what holds some) are cast to it, and without grad mode parameters are short
  /// for this forward alone.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) requires(!ParameterList<M>) {
    before_forward();
    if (!state_->low_precision) return forward(std::forward<Args>(args)...);
    std::optional<detail::LowPrecisionScope> scope;
    if (!c10::GradMode::is_enabled()) scope.emplace(*state_->low_precision);
    using LowPrecision = detail::LowPrecisionParameters;
    std::tuple<LowPrecision::Input<Args>...> inputs(
        state_->low_precision->input(std::forward<Args>(args))...);
    return std::apply(
        [&](auto&... input) -> decltype(auto) { return forward(static_cast<Args&&>(input)...); }, inputs);
  }

  /// What must precede each forward where the model is called directly. Collective where it has buffers:
  /// brings them together by DdpOptions::buffers, in a forward that follows one in training (grad mode on,
  /// outside `no_sync`), as Python does.
  ///
  /// With DdpOptions::param_dtype and grad mode on, parameters are in that type from here to the end of the
  /// next reduction, `forget()`, or the life of this object, after which they hold what they held before in
  /// their own, with gradients of that: then is the time for an optimizer and for checkpoints. Throws
  /// UsageError where one was changed in between (by LibTorch's own optimizers, on a GPU, it is not seen), or
  /// is frozen. Gradients of micro-batches add up in the short type, but where they are kept defined.
  void before_forward() {
    if (state_->low_precision && c10::GradMode::is_enabled()) {
      state_->low_precision->shorten(/*backward_follows=*/true);
      state_->reducer->hook_low_precision_gradients();
    }
    if constexpr (!alone) {
      if (std::exchange(state_->sync_due, c10::GradMode::is_enabled() && state_->reducer->no_sync_depth == 0))
        bring_buffers_together();
      state_->reducer->forward_begins();
    }
  }

  /// Brings the buffers of all ranks together now, so that an evaluation that follows is one model's.
  /// Collective.
  void sync_buffers() {
    if constexpr (!alone) {
      bring_buffers_together();
      state_->sync_due = false;
    }
  }

  /// Backward, and the gradients averaged over all ranks: on return each parameter's gradient is the average.
  /// Collective, outside `no_sync`. Whatever happens inside, the reduction ends on every rank and the next
  /// one works: what backward throws is rethrown here, while the other ranks throw PeerError; where a
  /// parameter got no gradient on some rank, every rank throws GradientError naming it, unless an option
  /// allows it. After either, no rank keeps a gradient. Where the other ranks take more than two seconds to
  /// come to a backward that threw here, the communicator is aborted instead, so that the error is seen: then
  /// nothing works on it any more.
  ///
  /// A loss that depends on several models, each wrapped by one of these, reduces all of them: this one while
  /// backward runs, the others after it. Every rank's loss must depend on the same ones; keep out of one with
  /// its `no_sync`, or freeze its parameters.
  ///
  /// `loss` is a scalar that requires grad. `create_graph` is refused with GradientError.
  void backward(const at::Tensor& loss, bool retain_graph = false, bool create_graph = false) {
    refuse(create_graph);
    run({.losses = loss}, [&] { loss.backward({}, retain_graph); });
  }

  /// The same for several losses in one backward, whose gradients add up.
  void backward(const std::vector<at::Tensor>& losses, bool retain_graph = false, bool create_graph = false) {
    refuse(create_graph);
    run({.losses = losses}, [&] { torch::autograd::backward(losses, {}, retain_graph); });
  }

  /// Backward of a sum over `count` samples (or tokens, or weights) of this rank: on return each gradient is
  /// that of the sum over all ranks divided by the count over all ranks, which is returned. Ranks may have
  /// different counts; one that has nothing gives an undefined `sum` and 0. Every rank calls this one, not
  /// `backward`, in that step; inside `no_sync` sums and counts add up, and the count of this rank so far is
  /// returned. The counts ride behind the last bucket, so that there is no further collective; for other
  /// hooks, where that bucket is of a narrow type, and among more than 256 ranks, they go first. Whole counts
  /// are summed exactly; one above 2^32 is refused with UsageError where the last bucket is float32. Where
  /// nothing was counted anywhere gradients are zeros.
  /// Gradients that the last reduction left must be gone (zero_grad): they are means, and adding to them is
  /// refused with GradientError.
  double backward_sum(const at::Tensor& sum, double count, bool retain_graph = false) {
    const auto work = [&] {
      if (!std::isfinite(count) || count < 0)
        throw UsageError(fmt::format("backward_sum got the count {}: give how many the sum is over", count));
      state_->reduced_gradients.recognize(state_->trained);
      if (sum.defined())
        sum.backward({}, retain_graph);
      else if (count != 0)
        throw UsageError("backward_sum got a count without a sum");
      state_->reduced_gradients.require_untouched(state_->trained, [&](std::size_t i) {
        if constexpr (alone)
          return state_->reduced_gradients.changed(state_->trained, i);
        else
          return state_->reducer->has_gradient(i);
      });
    };
    if constexpr (alone) {
      run({}, work);
      auto& state = *state_->reducer;
      state.count += count;
      if (state.no_sync_depth > 0) return state.count;
      const double total = std::exchange(state.count, 0);
      for (const NamedTensor& parameter : parameters_)
        if (at::Tensor& grad = parameter.tensor.mutable_grad(); grad.defined())
          total == 0 ? grad.zero_() : grad.mul_(1 / total);
      state_->reduced_gradients.note(state_->trained);
      return total;
    } else {
      run({.losses = sum, .count = count, .nothing = !sum.defined()}, work);
      auto& reducer = *state_->reducer;
      return reducer.no_sync_depth > 0 ? reducer.count_so_far() : reducer.total_count();
    }
  }

  /// This rank has no data in this step: it takes part in the reduction of the others' `backward` with zeros
  /// (what it accumulated under `no_sync` counts). Collective. Not for a loss over several wrapped models:
  /// its backward mixes their reductions in an order that a rank without the loss does not know.
  void backward_empty() {
    if constexpr (!alone) run({.losses = {}, .nothing = true}, [] {});
  }

  /// This rank cannot come to the backward of this step, for `failure`, which its forward or its data has
  /// thrown: the others' backward throws PeerError that tells it, as where this rank's own backward throws,
  /// and the communicator works on. `counted` where theirs is `backward_sum`. Collective, but does not
  /// throw. Not where the model's forward or backward meets the other ranks itself: there abort the
  /// communicator.
  void fail_backward(const std::exception_ptr& failure, bool counted = false) noexcept {
    if constexpr (alone)
      drop();
    else
      state_->reducer->fail_backward(failure, counted);
  }

  /// Forgets what backwards under `no_sync` have accumulated (counts, and which parameters took part), for a
  /// step that is given up between them; `zero_grad` forgets the gradients.
  void forget() {
    if (state_->low_precision) state_->low_precision->end_step();
    if constexpr (alone)
      state_->reducer->count = 0;
    else
      state_->reducer->forget();
  }

  /// While the guard that this returns lives, backward only accumulates on this rank; the first backward
  /// after it reduces the sum. Every rank must do the same. Where Python looks at whether the forward ran
  /// inside `no_sync`, here it is the backward that counts (for the buffers it is the forward). Guards nest;
  /// the guard must not outlive this object. With `enabled` false the guard does nothing.
  [[nodiscard]] auto no_sync(bool enabled = true) {
    struct Guard {
      explicit Guard(State* state) : state(state) {
        if (state) ++state->reducer->no_sync_depth;
      }
      Guard(Guard&& other) noexcept : state(std::exchange(other.state, nullptr)) {}
      Guard& operator=(Guard&&) = delete;
      ~Guard() {
        if (state) --state->reducer->no_sync_depth;
      }
      State* state;
    };
    return Guard(enabled ? state_.get() : nullptr);
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

  /// The communication hook, for its state; there is none with LocalComm.
  [[nodiscard]] Hook& hook() requires(!detail::alone<Comm>) { return state_->reducer->hook(); }

  /// The buckets in use, as indices into the parameters that require grad; empty for LocalComm.
  [[nodiscard]] detail::BucketPlan buckets() const {
    if constexpr (alone)
      return {};
    else
      return state_->reducer->plan();
  }

  /// Rank 0's order of ready gradients, by which buckets are filled after the first iterations, as indices
  /// into the parameters that require grad; empty where it is not known yet, and for LocalComm. Collective.
  /// A run that goes on with it has the bits of one that was never interrupted.
  [[nodiscard]] std::vector<std::size_t> bucket_order() {
    if constexpr (alone)
      return {};
    else
      return state_->reducer->bucket_order();
  }
  /// Fills buckets by an order that another run has found, from the next backward on; not under `no_sync`.
  /// The same on every rank. Throws CheckpointError for one that is not of this model's parameters.
  void set_bucket_order(const std::vector<std::size_t>& order) {
    const auto trained = static_cast<std::size_t>(
        std::count_if(parameters_.begin(), parameters_.end(),
                      [](const NamedTensor& item) { return item.tensor.requires_grad(); }));
    if (!detail::is_order_of(order, trained))
      throw CheckpointError(fmt::format(
          "the order of buckets names {} parameters, and the model trains {}: it is another model's",
          order.size(), trained));
    if constexpr (!alone) state_->reducer->set_bucket_order(order);
  }

  /// The step that followed the last reduction was not taken: a hook that remembers forgets what it did.
  void rollback() {
    if constexpr (!alone && StatefulHook<Hook>) state_->reducer->hook().rollback();
  }

  /// What the last reduction did: buckets, order, times, bytes. `table(ddp.report())` shows it. Empty for
  /// LocalComm.
  [[nodiscard]] DdpReport report() const {
    if constexpr (alone)
      return {};
    else
      return state_->reducer->report();
  }

 private:
  // A tensor by value: what a forward refers to may be an input that was cast.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    if constexpr (ScriptModule<M>)
      return model_.forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
    else if constexpr (std::same_as<
                           std::remove_cvref_t<decltype((*model_).forward(std::forward<Args>(args)...))>,
                           at::Tensor>)
      return at::Tensor((*model_).forward(std::forward<Args>(args)...));
    else
      return (*model_).forward(std::forward<Args>(args)...);
  }

  struct State {
    Comm* comm = nullptr;
    bool sync_due = true;
    detail::BufferSync buffers;
    BufferPolicy policy = BufferPolicy::none;
    std::vector<std::string> ignored;
    detail::WatchedParameters watched;
    std::vector<NamedTensor> trained;
    std::optional<detail::LowPrecisionParameters> low_precision;
    detail::ReducedGradientTracker reduced_gradients;
    std::unique_ptr<typename detail::ReducerFor<Comm, Hook>::type> reducer;
  };

  static auto store(M& model) {
    if constexpr (detail::ModuleImpl<M>)
      return &model;
    else
      return model;
  }

  void bring_buffers_together() {
    // A forward of TorchScript that assigns a buffer gives it another tensor.
    if constexpr (ScriptModule<M>)
      if (state_->policy != BufferPolicy::none)
        state_->buffers = detail::BufferSync(
            detail::without_ignored(tensors_of(model_), state_->ignored).buffers, state_->policy);
    state_->buffers.run(*state_->comm);
  }

  static void refuse(bool create_graph) {
    if (create_graph)
      throw GradientError(
          "ddp.backward with create_graph is refused: gradients of gradients would not be averaged "
          "over the ranks; take them with torch::autograd::grad and put the result into the loss");
  }

  template <class Run>
  void run(const detail::Contribution& contribution, Run&& backward) {
    if constexpr (alone) {
      state_->reducer->inside_backward = true;
      const Leave leave{state_->reducer->inside_backward};
      try {
        if (state_->low_precision) state_->low_precision->check_backward(contribution.losses);
        backward();
      } catch (...) {
        if (state_->reducer->no_sync_depth == 0) drop();
        throw;
      }
      if (state_->low_precision && state_->reducer->no_sync_depth == 0) state_->low_precision->end_step();
    } else {
      state_->reducer->backward(contribution, [&] {
        state_->watched.check(contribution.losses, [&] { return tensors_of(module()).parameters; });
        if (state_->low_precision) state_->low_precision->check_backward(contribution.losses);
        backward();
      });
    }
    if (state_->reducer->no_sync_depth == 0) state_->reduced_gradients.note(state_->trained);
  }

  struct Leave {
    bool& inside;
    ~Leave() { inside = false; }
  };

  // What a failure leaves: as the Reducer does it on several ranks.
  void drop() {
    for (const NamedTensor& parameter : parameters_) parameter.tensor.mutable_grad().reset();
    if (state_->low_precision) state_->low_precision->end_step();
    state_->reducer->count = 0;
  }

  std::conditional_t<detail::ModuleImpl<M>, M*, M> model_;
  std::vector<NamedTensor> parameters_;
  std::unique_ptr<State> state_;  // hooks point into it: it does not move
};

}  // namespace lockstep
