#pragma once

#include <ATen/Context.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/data/distributed_sampler.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/log/progress.hpp"
#include "lockstep/precision/fp32.hpp"
#include "lockstep/train/epoch_shares.hpp"
#include "lockstep/train/evaluate.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/feed.hpp"
#include "lockstep/train/fwd.hpp"
#include "lockstep/train/given.hpp"
#include "lockstep/train/loss.hpp"
#include "lockstep/train/model_handle.hpp"
#include "lockstep/train/policies.hpp"
#include "lockstep/train/run_length.hpp"
#include "lockstep/train/shared_model_file.hpp"
#include "lockstep/train/step_gradients.hpp"
#include "lockstep/train/stream.hpp"
#include "lockstep/train/trainer_options.hpp"

namespace lockstep {

/// Trains one model on all ranks: owns the communicator, the model, its DistributedDataParallel and its
/// optimizer, and what people forget - the epoch of the sampler, the modes, the seeds, the rank that writes.
///
/// The policies are types; values of them (a model, a communicator with options, extras) follow the options
/// in any order, and what is not given is default-constructed, the communicator from the world. Every rank
/// makes the same trainers in the same order and calls the same functions on them. Used from one thread.
template <class Model, class SamplerType, class Comm, class PrecisionType, class... Extras>
class Trainer : detail::CheckedPolicies<Model, SamplerType, Comm, PrecisionType, Extras...> {
 public:
  /// Seeds the default generator with `options.seed` before a model is made and with `seed + rank`
  /// afterwards. Throws UsageError for options that cannot train, MismatchError where the ranks' models
  /// differ.
  template <class... Given>
  explicit Trainer(const World& world, const TrainerOptions& options = {}, Given... given)
      : world_(world),
        options_(validated(options)),
        comm_(detail::pick<Comm>([&]<class C>(std::type_identity<C>) { return C(world); }, given...)),
        model_(detail::pick<Model>(
            [&]<class M>(std::type_identity<M>) { return seeded_model<M>(options.seed); }, given...)),
        precision_(detail::pick<PrecisionType>(detail::MakeDefault{}, given...)),
        extras_(detail::pick<Extras>(detail::MakeDefault{}, given...)...),
        ddp_(model_.get(), comm_, options_.ddp, take_reduction()),
        parameters_(ddp_.parameters()),
        optimizer_(make_optimizer()) {
    static_assert((detail::one_of<Given, Model, Comm, PrecisionType, Extras...> && ...),
                  "lockstep: a Trainer was given a value of a type that is none of its policies");
    if constexpr ((Schedule<Extras> || ...))
      for (const auto& group : optimizer_->param_groups()) rates_.push_back(group.options().get_lr());
    each_extra([&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (GradientCheck<E>) extra.watch(ddp_.named_parameters());
    });
    at::manual_seed(options_.seed + static_cast<std::uint64_t>(world.rank()));
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Trains for the options' epochs or steps; called again, it goes on with the next epoch. `data` is a
  /// Dataset, shared out by the sampler, or a BatchStream. `loss` is a LossFunction, `hooks` are
  /// GradientHooks, StepHooks, EpochStartHooks and EpochHooks for this call, after those of the policies.
  /// Each step goes down the mean over all samples (or counts) that all ranks have in it; one in which
  /// nothing was counted changes nothing. Collective. Returns the last epoch's report. Throws MismatchError
  /// where the ranks would not train alike, DataError where there is nothing to train on.
  template <class D, class Loss, class... Hooks>
  EpochReport fit(D&& data, Loss&& loss, Hooks&&... hooks) {
    using Data = std::remove_reference_t<D>;
    constexpr bool trainable = Dataset<Data> || BatchStream<Data>;
    static_assert(
        trainable,
        "lockstep: fit trains on a dataset, which has size() and get(i) or get_batch(indices), or on a "
        "stream, whose next() returns a std::optional batch");
    if constexpr (trainable) {
      using Batch = BatchFrom<Data>;
      constexpr bool callable = std::invocable<Loss&, Model&, Batch&>;
      constexpr bool a_loss = LossFunction<Loss, Model, Batch>;
      constexpr bool all_hooks = (Hook<Hooks> && ...);
      static_assert(
          callable,
          "lockstep: the loss is called as loss(model, batch), with the Trainer's model and a batch of the "
          "dataset");
      static_assert(
          a_loss || !callable,
          "lockstep: the loss returns neither a tensor, the mean over the batch, nor a Mean{sum, count}");
      static_assert(all_hooks,
                    "lockstep: after the loss, fit takes hooks, such as OnStep{f}, OnEpochStart{f}, "
                    "OnEpoch{f} and OnGradients{f}");
      if constexpr (a_loss && all_hooks) return run(data, loss, hooks...);
    }
  }

  /// What the metrics are over all samples and ranks, of rank 0's model; see lockstep::evaluate.
  template <class D, class... Metrics>
  auto evaluate(D&& dataset, Metrics&&... metrics) {
    return lockstep::evaluate(model_.get(), comm_, dataset,
                              {.batch_size = options_.batch_size, .workers = options_.workers}, metrics...);
  }

  /// Writes the model of rank 0 to a file that `torch::load(model, path)` reads, whole or not at all; every
  /// rank returns when it is written, or throws CheckpointError. `require_writable(path)` asks before
  /// training.
  void save(const std::filesystem::path& path) { save_model(model_.module(), path, comm_); }
  /// Reads a saved model on rank 0, for all ranks. Throws CheckpointError, naming what does not fit.
  void load(const std::filesystem::path& path) { load_model(model_.module(), path, comm_); }

  [[nodiscard]] Model& model() { return model_.get(); }
  [[nodiscard]] torch::optim::Optimizer& optimizer() { return *optimizer_; }
  [[nodiscard]] Comm& comm() { return comm_; }
  /// For its report, and its communication hook.
  [[nodiscard]] auto& ddp() { return ddp_; }
  [[nodiscard]] const World& world() const { return world_; }
  /// Epochs and optimizer steps done so far.
  [[nodiscard]] std::int64_t epoch() const { return epoch_; }
  [[nodiscard]] std::int64_t step() const { return step_; }

 private:
  template <Dataset D, class Loss, class... Hooks>
  EpochReport run(D& dataset, Loss& loss, Hooks&... hooks) {
    const SamplerOptions split{options_.seed, options_.shuffle, options_.drop_last, options_.pad};
    DataLoader loader{DatasetView{dataset},
                      make_sampler<SamplerType>(dataset_size(dataset), comm_, split),
                      {.batch_size = static_cast<std::size_t>(options_.batch_size),
                       .workers = static_cast<std::size_t>(options_.workers)}};
    const std::vector<std::size_t> samples = samples_of_ranks(loader.sampler(), comm_);
    check_same_run(dataset, samples, options_, comm_);
    const EpochShares shares(samples, options_.batch_size, options_.accumulate);
    detail::LoaderFeed feed(loader, shares);
    return run_epochs(feed, RunLength(options_, shares.steps(), epoch_, step_), loss, hooks...);
  }

  template <BatchStream S, class Loss, class... Hooks>
  EpochReport run(S& stream, Loss& loss, Hooks&... hooks) {
    require_passes<S>(options_);
    check_same_plan("a stream", options_, comm_);
    detail::StreamFeed feed(stream, options_.accumulate);
    return run_epochs(feed, RunLength(options_, std::nullopt, epoch_, step_), loss, hooks...);
  }

  template <class Feed, class Loss, class... Hooks>
  EpochReport run_epochs(Feed& feed, const RunLength& length, Loss& loss, Hooks&... hooks) {
    EpochReport report{};
    while (!length.reached(epoch_, step_)) {
      const std::int64_t before = step_;
      const EpochPlan plan = length.plan(epoch_, step_);
      notify_all(plan, hooks...);
      report = run_epoch(feed, plan, loss, hooks...);
      if (step_ == before) throw DataError("the stream gave no rank a batch to train on");
      notify_all(report, hooks...);
      if (!Feed::repeats) break;
    }
    return report;
  }

  template <class Feed, class Loss, class... Hooks>
  EpochReport run_epoch(Feed& feed, const EpochPlan& plan, Loss& loss, Hooks&... hooks) {
    const auto begin = std::chrono::steady_clock::now();
    Progress progress(options_.progress ? world_.log : world_.log.at(Level::warning),
                      static_cast<std::size_t>(std::max<std::int64_t>(plan.steps, 0)),
                      {.title = fmt::format("epoch {}/{}", plan.epoch + 1, plan.epochs)});
    model_.module().train();
    feed.begin_epoch(plan.epoch);
    MeanMeter meter;
    for (std::int64_t done = 0; done != plan.steps; ++done) {
      if (!train_step(feed, loss, hooks...)) break;
      for (const LocalLoss& local : losses_) meter.add(local.reported, local.factor, local.count);
      notify_all(StepReport{plan.epoch, step_, done, plan.steps, losses_}, hooks...);
      progress.advance(feed.samples(comm_.size()),
                       progress.due() ? std::optional(meter.total().mean()) : std::nullopt);
      ++step_;
    }
    feed.end_epoch();
    ++epoch_;
    Total total = meter.total();
    sum_over_ranks(std::span(&total, 1), comm_);
    progress.finish(total.mean());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    return {plan.epoch, step_, total.mean(), elapsed.count()};
  }

  // False where no rank had any data left.
  template <class Feed, class Loss, class... Hooks>
  bool train_step(Feed& feed, Loss& loss, Hooks&... hooks) {
    feed.begin_step();
    set_rates();
    optimizer_->zero_grad();
    const double counted = detail::step_gradients(model_.get(), ddp_, precision_, feed, loss, losses_);
    if (counted == 0) return Feed::counts_beforehand || any_rank(feed.had_data(), comm_);
    show_gradients(hooks...);
    precision_.step(*optimizer_);
    return true;
  }

  template <class... Hooks>
  void show_gradients([[maybe_unused]] Hooks&... hooks) {
    constexpr bool checked = (GradientCheck<Extras> || ...);
    constexpr bool used = (GradientHook<Extras> || ...) || (GradientHook<Hooks> || ...);
    if constexpr (checked || used) {
      const Gradients gradients{epoch_, step_, parameters_, ddp_.named_parameters()};
      each_extra([&]<class E>([[maybe_unused]] E& extra) {
        if constexpr (GradientCheck<E>) extra.check(gradients, comm_);
      });
      if constexpr (used) {
        if constexpr (requires { precision_.unscale(*optimizer_); }) precision_.unscale(*optimizer_);
        notify_all(gradients, hooks...);
      }
    }
  }

  detail::ReductionOf<Extras...> take_reduction() {
    using Reduction = detail::ReductionOf<Extras...>;
    if constexpr (detail::one_of<Reduction, Extras...>)
      return std::move(std::get<Reduction>(extras_));
    else
      return Reduction();
  }

  template <class M>
  static M seeded_model(std::uint64_t seed) {
    static_assert(
        DefaultConstructibleModel<M>,
        "lockstep: this model has no default constructor: pass one to the Trainer after its options");
    at::manual_seed(seed);
    return M();
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() {
    std::unique_ptr<torch::optim::Optimizer> made;
    each_extra([&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (OptimizerFactory<E>) made = extra.make_optimizer(parameters_);
    });
    if (!made) made = std::make_unique<torch::optim::SGD>(parameters_, options_.lr);
    return made;
  }

  void set_rates() {
    each_extra([&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (Schedule<E>) {
        const double factor = extra.rate_factor(epoch_, step_);
        auto rate = rates_.begin();
        for (auto& group : optimizer_->param_groups()) group.options().set_lr(*rate++ * factor);
      }
    });
  }

  template <class Function>
  void each_extra(Function&& function) {
    std::apply([&](auto&... extra) { (function(extra), ...); }, extras_);
  }
  template <class Report, class... Hooks>
  void notify_all(const Report& report, Hooks&... hooks) {
    each_extra([&](auto& extra) { detail::notify(extra, report); });
    (detail::notify(hooks, report), ...);
  }

  using Kept = detail::KeptOf<Model, Comm, Extras...>;

  World world_;
  TrainerOptions options_;
  Comm comm_;
  typename Kept::Model model_;
  PrecisionType precision_;
  std::tuple<Extras...> extras_;
  typename Kept::Ddp ddp_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<double> rates_;      // of the optimizer's groups, before any schedule
  std::vector<LocalLoss> losses_;  // of the running step
  std::int64_t epoch_ = 0, step_ = 0;
};

/// `Trainer{world, options, Net(...)}`, then extras.
template <class M, class... Extras>
Trainer(const World&, TrainerOptions, M, Extras...)
    -> Trainer<M, DefaultSampler, DefaultComm, DefaultPrecision, Extras...>;

/// The same with policies by name, for extras that have none: `make_trainer<Net, MySampler>(world, options,
/// extras...)`.
template <class Model, class SamplerType = DefaultSampler, class Comm = DefaultComm,
          class PrecisionType = DefaultPrecision, class... Extras>
auto make_trainer(const World& world, const TrainerOptions& options, Extras... extras) {
  return Trainer<Model, SamplerType, Comm, PrecisionType, Extras...>(world, options, std::move(extras)...);
}

}  // namespace lockstep
