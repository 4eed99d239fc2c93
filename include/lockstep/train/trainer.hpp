#pragma once

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/train/detail/micro_batch_source.hpp"
#include "lockstep/train/detail/policies.hpp"
#include "lockstep/train/detail/run_checkpoint.hpp"
#include "lockstep/train/detail/run_length.hpp"
#include "lockstep/train/evaluate.hpp"
#include "lockstep/train/peak_memory.hpp"

namespace lockstep::inline v0_1::inline LOCKSTEP_DEVICES {

/// Trains one model data-parallel on all ranks. Owns the communicator, the model, its DistributedDataParallel
/// and its optimizer. Calls the sampler's set_epoch, switches the module's training mode, seeds the
/// generators, and lets rank 0 write files and logs.
///
/// The policies are distinguished by their concepts and may be in any order: a Model, which is required, a
/// Sampler (default: DistributedSampler), a Communicator (CpuComm), a Precision (Fp32), and the extras: an
/// OptimizerFactory (SGD), a Schedule, a GradientCheck, a CommunicationHook (AllReduceHook).
///
/// The arguments after the options determine them. A value is moved into the Trainer. For
/// `std::in_place_type<T>` the Trainer constructs the policy itself: a model after seeding, a communicator
/// from the world, a sampler for each dataset, any other policy by its default constructor.
///
///   Trainer trainer{world, options, std::in_place_type<Net>, std::in_place_type<EvaluationSampler>,
///                   Fp16(), MakeOptimizer{make}};
///
/// `Trainer<Net, DistributedSampler, CpuComm, Fp32, Extras...>` names them explicitly. Callbacks are not
/// policies but arguments of `fit`. The model moves to the communicator's device. Every rank constructs the
/// same trainers in the same order and calls the same functions on them. Not thread-safe.
template <class... Policies>
class Trainer : detail::CheckedPolicies<Policies...> {
  using Types = detail::PolicyTypes<Policies...>;
  using Model = typename Types::Model;
  using SamplerType = typename Types::Sampler;
  using Comm = typename Types::Comm;
  using PrecisionType = typename Types::Precision;
  using Hook = typename Types::Hook;
  using Extras = typename Types::Extras;

 public:
  /// Seeds the default generators of CPU and GPUs: with `options.seed` before a model is constructed, with
  /// `seed + rank` afterwards. If the ranks' models differ in their values, warns and uses rank 0's. Collective.
  /// Throws UsageError for invalid options and MismatchError if the models differ otherwise.
  template <class... Given>
  explicit Trainer(const World& world, const TrainerOptions& options = {}, Given... given)
      : Trainer(detail::CallScope("the constructor of Trainer"), world, options, given...) {}
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Trains for the options' epochs or steps. A second call continues with the next epoch. Collective.
  ///
  /// 1. `data` is a Dataset or a BatchStream. The sampler partitions a Dataset among the ranks, and its
  ///    batches are copied to the model's device.
  /// 2. `loss` is a LossFunction. Each step descends the mean over all samples (or counts) of all ranks. A
  ///    step in which nothing was counted changes nothing.
  /// 3. `callbacks` are for this call. Those of one event run in their order. One that returns
  ///    FitAction::stop ends this call on every rank.
  /// 4. An exception that a callback, a schedule or the optimizer throws on every rank within two seconds
  ///    ends this call only. On some ranks it aborts the communicator: the other ranks throw PeerError.
  /// 5. An exception of the loss or the backward on some ranks is thrown there, and as PeerError on the other
  ///    ranks, before the optimizer steps. On GPUs the other ranks learn of it in their next step, or at the end
  ///    of the epoch, and the communicator is aborted (DistributedDataParallel::backward).
  ///
  /// Parameters may be frozen and unfrozen by `requires_grad_` between epochs, on every rank; the optimizer keeps its
  /// state and leaves frozen ones as they are. Checkpoints hold which are frozen. Throws MismatchError if the ranks
  /// differ, UsageError in the next step if `requires_grad_` was called within an epoch, or with a StatefulHook.
  ///
  /// Returns the report of the last epoch. If the call trains no epoch, its loss is NaN, its `seconds` is 0, and
  /// its `epoch` and `step` are the trainer's. Throws MismatchError if the ranks' options or data differ,
  /// DataError if there is nothing to train on.
  template <class D, class Loss, class... Callbacks>
  EpochReport fit(D&& data, Loss&& loss, Callbacks&&... callbacks) {
    using Checked = detail::CheckedFit<Model, Comm, std::remove_reference_t<D>, Loss,
                                       std::remove_reference_t<Callbacks>...>;
    const detail::CallScope scope("Trainer::fit");
    if constexpr (Types::complete()) {  // otherwise a sentence of CheckedPolicies is the only error
      if constexpr (Checked::good()) return run(data, loss, callbacks...);
    }
  }

  /// Evaluates the metrics over all samples and ranks, in the trainer's precision; see lockstep::evaluate.
  /// Without DdpOptions::syncs_buffers each rank gets its own buffers back afterwards. Collective.
  template <class D, class... Metrics>
  auto evaluate(D&& dataset, Metrics&&... metrics) {
    using Checked =
        detail::CheckedEvaluation<Model, std::remove_reference_t<D>, std::remove_reference_t<Metrics>...>;
    if constexpr (!Types::complete()) {  // a sentence of CheckedPolicies is the only error
      return detail::NotMeasured{};
    } else if constexpr (!Checked::good()) {
      return detail::NotMeasured{};
    } else {
      const detail::CallScope scope("Trainer::evaluate");
      ddp_.synchronize();
      return precision_.forward([&] {
        return lockstep::evaluate(model_.get(), comm_, dataset,
                                  {.batch_size = options_.batch_size,
                                   .num_workers = options_.num_workers,
                                   .restore_buffers = !options_.ddp.syncs_buffers()},
                                  metrics...);
      });
    }
  }

  /// Writes a checkpoint from which training resumes bitwise: model, optimizer, state of the communication
  /// hook, generators, data position and `parts`. The file is written atomically. Collective. Every rank returns
  /// once the file is written, or throws CheckpointError. Throws UsageError inside a step, and the error of
  /// DistributedDataParallel::synchronize, so that no NaN of a failed backward is saved. Between epochs, parameters that
  /// were frozen or unfrozen since take effect, as at the start of an epoch, with its errors.
  template <Checkpointed... Parts>
  void save_checkpoint(const std::filesystem::path& path, const Parts&... parts) {
    const detail::CallScope scope("Trainer::save_checkpoint");
    take_checkpoint(
        "save_checkpoint", [&](auto& archive) { write_file_atomically(path, detail::bytes_of(archive)); },
        parts...);
  }
  /// Restores a checkpoint of save_checkpoint into a trainer that was constructed with the same arguments.
  /// Call it before `fit`. If the checkpoint was saved inside a `fit`, the next `fit` resumes the saved one:
  /// on the same number of ranks it ends at the same epoch and step, with bitwise equal results. On another
  /// number of ranks, no sample of the epoch is lost or repeated. Collective. Throws UsageError inside `fit`.
  /// Throws CheckpointError, which names the mismatch, and then changes nothing.
  template <Checkpointed... Parts>
  void load_checkpoint(const std::filesystem::path& path, Parts&&... parts) {
    const detail::CallScope scope("Trainer::load_checkpoint");
    read_run("load_checkpoint", path, /*required=*/true, parts...);
  }
  /// Calls load_checkpoint if the file exists on rank 0, and returns whether it does. Collective. Throws
  /// MismatchError if another rank calls load_checkpoint.
  template <Checkpointed... Parts>
  bool load_checkpoint_if_exists(const std::filesystem::path& path, Parts&&... parts) {
    const detail::CallScope scope("Trainer::load_checkpoint_if_exists");
    return read_run("load_checkpoint_if_exists", path, /*required=*/false, parts...);
  }

  /// Writes rank 0's model atomically to a file that `torch::load(model, path)` reads. Collective. Every rank
  /// returns once the file is written, or throws CheckpointError.
  void save(const std::filesystem::path& path) {
    const detail::CallScope scope("Trainer::save");
    ddp_.synchronize();
    save_model(model_.module(), path, comm_);
  }
  /// Reads a saved model, or the model alone of a checkpoint, on rank 0 and copies it to all ranks. To resume,
  /// call load_checkpoint. Collective. Throws CheckpointError, which names each tensor that does not fit, and
  /// UsageError inside `fit`.
  void load(const std::filesystem::path& path) {
    const detail::CallScope scope("Trainer::load");
    forbid_inside_fit("load");
    load_model(model_.module(), path, comm_);
  }

  /// Returns the model as it was passed: a module holder stays one.
  [[nodiscard]] Model& model() { return model_.get(); }
  [[nodiscard]] torch::optim::Optimizer& optimizer() { return *optimizer_; }  ///< Returns the optimizer.
  [[nodiscard]] Comm& comm() { return comm_; }                                ///< Returns the communicator.
  [[nodiscard]] PrecisionType& precision() { return precision_; }             ///< Returns the precision.
  [[nodiscard]] auto& ddp() { return ddp_; }  ///< Returns the wrapper of the model.
  [[nodiscard]] const World& world() const { return world_; }
  /// Returns the number of completed epochs.
  [[nodiscard]] std::int64_t epoch() const { return position_.epoch; }
  /// Returns the number of completed steps, including those that the precision skipped.
  [[nodiscard]] std::int64_t step() const { return position_.step; }

 private:
  friend detail::RunAccess;

  // The scope lives through the member initializers, whose collectives it names.
  template <class... Given>
  Trainer(const detail::CallScope&, const World& world, const TrainerOptions& options, Given&... given)
      : world_(world),
        options_(detail::validated_beside(Types::has(detail::PolicyKind::optimizer), options)),
        comm_(detail::pick<Comm>([&]<class C>(std::type_identity<C>) { return C(world); }, given...)),
        model_(detail::placed(detail::pick<Model>(detail::MakeSeeded{options.seed}, given...), comm_)),
        precision_(detail::pick<PrecisionType>(detail::MakeDefault{}, given...)),
        extras_(detail::make_extras(std::type_identity<Extras>{}, given...)),
        ddp_(compared_model(), comm_, options_.ddp, detail::take_hook<Hook>(extras_)),
        optimizer_(detail::create_optimizer(extras_, ddp_.named_parameters(), options_)),
        step_(model_.get(), ddp_, comm_, *optimizer_, precision_, options_.ddp,
              detail::ClearGradients::set_to_none) {
    static_assert((detail::checked_value<Given, Policies...>() && ...));
    position_.batch_size = options_.batch_size;
    position_.accumulate = options_.accumulate;
    position_.frozen = frozen();
    follow_groups();
    watch_gradients();
    at::manual_seed(options_.seed + static_cast<std::uint64_t>(world.rank()));
  }

  // Returns the model, for DistributedDataParallel, which overwrites the other ranks' values with rank 0's.
  Model& compared_model() {
    detail::warn_of_unequal_values(model_.module(), options_.ddp, comm_, world_);
    return model_.get();
  }

  void prepare_save(const char* name, const char* callbacks) {
    forbid_in_rank_zero_scope(name);
    if (step_.running())
      throw detail::CollectiveError<UsageError>(
          detail::formatted("{} was called during a step: call it in an {} callback", name, callbacks));
    ddp_.synchronize();
  }
  template <class Take, class... Parts>
  void take_checkpoint(const char* name, Take&& take, const Parts&... parts) {
    prepare_save(name, "OnStep or OnEpoch");
    if (position_.step_in_epoch == 0) follow_requires_grad();
    auto run = checkpointed_run(parts...);
    detail::take_checkpoint(
        run,
        [&] {
          if (save_data_position_ && !resumed_) position_.skipped = skipped_.count();
          return own_state(run, !options_.ddp.syncs_buffers(), meter_, parts_, save_data_position_, resumed_);
        },
        take);
  }
  void forbid_inside_fit(const char* name) const {
    forbid_in_rank_zero_scope(name);
    if (save_data_position_)
      throw detail::CollectiveError<UsageError>(detail::formatted("{} inside fit: call it before", name));
  }

  template <class... Parts>
  bool read_run(const char* name, const std::filesystem::path& path, bool required, Parts&... parts) {
    forbid_inside_fit(name);
    follow_groups();
    std::optional<detail::RankState> read = read_checkpoint(
        checkpointed_run(parts...), path, required, [&](const std::vector<std::int64_t>& indices) {
          for (std::int64_t i = 0; const NamedTensor& parameter : ddp_.named_parameters())
            parameter.tensor.set_requires_grad(!std::binary_search(indices.begin(), indices.end(), i++));
          follow_requires_grad();
        });
    const bool found = read.has_value();
    if (found) resumed_ = std::move(read);
    return found;
  }

  // The indices of the parameters that do not require grad.
  std::vector<std::int64_t> frozen() const {
    std::vector<std::int64_t> indices;
    for (std::size_t i = 0; i < ddp_.named_parameters().size(); ++i)
      if (!ddp_.named_parameters()[i].tensor.requires_grad()) indices.push_back(static_cast<std::int64_t>(i));
    return indices;
  }

  void watch_gradients() {
    each_extra([&]<class E>([[maybe_unused]] E& extra) {
      if constexpr (GradientCheck<E>) extra.watch(ddp_.named_parameters());
    });
  }

  // Constructs the DistributedDataParallel again if a parameter was frozen or unfrozen since. Collective.
  void follow_requires_grad() {
    std::vector<std::int64_t> now = frozen();
    if (!any_rank(comm_, now != position_.frozen)) return;
    check_same_model(comm_, ddp_.named_parameters(), {});
    if constexpr (StatefulHook<Hook>) {
      throw detail::CollectiveError<UsageError>(
          "a parameter was frozen or unfrozen, and the communication hook of this Trainer has state for each "
          "parameter: freeze parameters before the Trainer is constructed, or use a hook without state");
    } else {
      ddp_.synchronize();
      DdpOptions options = options_.ddp;
      options.init_sync = false;  // the ranks' own buffers stay
      if constexpr (requires { ddp_.hook(); })
        ddp_ = typename Kept::Ddp(model_.get(), comm_, options, std::move(ddp_.hook()));
      else
        ddp_ = typename Kept::Ddp(model_.get(), comm_, options);
      watch_gradients();
      position_.frozen = std::move(now);
    }
  }

  // Takes the rates of groups that were added to the optimizer since.
  void follow_groups() {
    if constexpr (Types::has(detail::PolicyKind::schedule)) {
      const auto& groups = optimizer_->param_groups();
      while (position_.rates.size() < groups.size())
        position_.rates.push_back(groups[position_.rates.size()].options().get_lr());
    }
  }

  // Constructs the sampler from the dataset if its type can be, and otherwise from the length.
  template <class D>
  auto sampler_for(D& dataset) {
    const SamplerOptions split{.seed = options_.seed,
                               .shuffle = options_.shuffle,
                               .drop_last = options_.drop_last,
                               .pad = options_.pad};
    if constexpr (std::constructible_from<SamplerType, D&, const Comm&, SamplerOptions>)
      return SamplerType(dataset, comm_, split);
    else
      return make_sampler<SamplerType>(dataset_size(dataset), comm_, split);
  }

  template <Dataset D, class Loss, class... Callbacks>
  EpochReport run(D& dataset, Loss& loss, Callbacks&... callbacks) {
    auto loader = detail::aborting(comm_, [&] {
      return DataLoader{
          detail::DatasetView{dataset},
          sampler_for(dataset),
          {.batch_size = options_.batch_size, .num_workers = options_.num_workers, .pin_memory = true}};
    });
    detail::check_same_run(dataset, detail::samples_of_ranks(loader.sampler(), comm_), options_, comm_);
    auto saved = saved_data_position();
    detail::LoaderMicroBatchSource source(loader, detail::device_of(model_.module()), options_.batch_size,
                                          options_.accumulate, comm_, saved ? &*saved : nullptr);
    const std::int64_t steps = source.partition().steps();
    // On another number of ranks, the rest of the epoch takes another number of steps.
    position_.step_in_epoch = saved ? steps - source.first_partition().steps() : 0;
    for (const detail::EpochPartition* partition : {&source.first_partition(), &source.partition()})
      detail::require_equal_forwards(model_.module(), *partition);
    return run_epochs(source, steps, loss, callbacks...);
  }

  template <BatchStream S, class Loss, class... Callbacks>
  EpochReport run(S& stream, Loss& loss, Callbacks&... callbacks) {
    if (!RepeatableStream<S> && options_.epochs.value_or(1) > 1)
      throw UsageError(detail::formatted(
          "epochs is {}, and this stream has one pass: give it a set_epoch(e) that starts the pass anew, "
          "or give steps",
          *options_.epochs));
    detail::check_same_plan("a stream", options_, comm_);
    auto saved = saved_data_position();
    detail::StreamMicroBatchSource source(stream, detail::CollectiveForwardCheck(model_.module(), comm_),
                                          options_.accumulate, comm_.size(), saved ? &*saved : nullptr);
    if (!saved) position_.step_in_epoch = 0;
    return run_epochs(source, std::nullopt, loss, callbacks...);
  }

  // The data position of a checkpoint that was saved inside an epoch.
  std::optional<torch::serialize::InputArchive> saved_data_position() const {
    if (!resumed_ || resumed_->data_position.empty()) return std::nullopt;
    return detail::archive_of(resumed_->data_position);
  }

  template <class Source, class Loss, class... Callbacks>
  EpochReport run_epochs(Source& source, std::optional<std::int64_t> steps_in_epoch, Loss& loss,
                         Callbacks&... callbacks) {
    if (!(resumed_ && position_.fitting)) {
      position_.first_epoch = position_.epoch;
      position_.first_step = position_.step;
    }
    const detail::RunLength length(options_, steps_in_epoch, position_.first_epoch, position_.first_step);
    skipped_ = detail::SkippedSteps(position_.skipped);
    const detail::Fitting fitting(position_, save_data_position_, resumed_,
                                  [&source](auto& archive) { source.save(archive); });
    EpochReport report{.epoch = position_.epoch,
                       .step = position_.step,
                       .loss = std::numeric_limits<double>::quiet_NaN(),
                       .seconds = 0};
    const auto inside_epoch = [&] { return resumed_ && !resumed_->data_position.empty(); };
    while (!length.reached(position_.epoch, position_.step) ||
           (inside_epoch() && length.ends_at(position_.step))) {
      EpochPlan plan = length.plan(position_.epoch, position_.step - position_.step_in_epoch);
      plan.resumed = inside_epoch();
      if (notify_all(plan, callbacks...)) break;
      follow_requires_grad();
      follow_groups();
      ddp_.record_completions((ProfileCallback<Callbacks> || ...));
      const std::int64_t before = position_.step - position_.step_in_epoch;
      bool stopped = false;
      report = run_epoch(source, plan, stopped, loss, callbacks...);
      if (report.step == before)
        throw DataError(
            "the stream gave no rank a batch to train on: give at least one rank a batch per epoch");
      stopped |= notify_all(report, callbacks...);
      if (stopped || !Source::repeats) break;
    }
    detail::compare_calls(comm_);  // no report of ranks whose calls differ
    return report;
  }

  template <class Source, class Loss, class... Callbacks>
  EpochReport run_epoch(Source& source, const EpochPlan& plan, bool& stopped, Loss& loss,
                        Callbacks&... callbacks) {
    const auto begin = std::chrono::steady_clock::now();
    std::int64_t& done = position_.step_in_epoch;
    Progress progress(options_.progress ? world_.log : world_.log.at(Level::warning),
                      static_cast<std::size_t>(std::max<std::int64_t>(plan.steps.value_or(done) - done, 0)),
                      {.title = detail::formatted("epoch {}/{}", plan.epoch + 1, plan.epochs)});
    model_.module().train();
    detail::aborting(comm_, [&] { source.begin_epoch(plan.epoch); });
    const auto so_far = std::exchange(resumed_, std::nullopt).value_or(detail::RankState{});
    skipped_ = detail::SkippedSteps(position_.skipped);
    meter_ = MeanMeter();
    meter_.add(so_far.loss);
    using Parts =
        detail::LossParts<std::remove_cvref_t<std::invoke_result_t<Loss&, Model&, typename Source::Batch&>>>;
    parts_ = Parts::meters();
    for (std::size_t i = 0; i < std::min(parts_.size(), so_far.parts.size()); ++i)
      parts_[i].second.add(so_far.parts[i]);
    auto descended = [&](Model& model, typename Source::Batch& batch) {
      return Parts::take(std::invoke(loss, model, batch), batch, parts_);
    };
    constexpr bool profiled = (ProfileCallback<Callbacks> || ...);
    [[maybe_unused]] std::conditional_t<profiled, detail::StepTimer, detail::NoStepTimer> timer;
    while (!(plan.steps && done >= *plan.steps) && !stopped) {
      if constexpr (profiled) timer.begin();
      const double counted = step_.run(source, descended, {position_.epoch, position_.step, position_.rates},
                                       extras_, callbacks..., timer);
      if (counted == 0 && !Source::counts_beforehand && !any_rank(comm_, source.had_data())) break;
      skipped_.add(step_.stepped());
      for (const LocalLoss& local : step_.losses())
        meter_.add(local.reported, local.factor, local.count, position_.step);
      const StepReport report{plan.epoch,      position_.step++,  done++, plan.steps, step_.losses(),
                              step_.stepped(), step_.total_norm()};
      stopped = notify_all(report, callbacks...);
      if constexpr (profiled) {
        const DdpReport reduction = ddp_.report();
        const StepProfile profile = timer.profile(reduction, source.samples(comm_.size()),
                                                  optimizer_->param_groups().at(0).options().get_lr());
        const detail::CallScope program{detail::ServedCall{}};
        detail::aborting(comm_, [&] { (detail::notify(callbacks, report, profile), ...); });
      }
      if constexpr (!Source::counts_beforehand) warn_in_stream(plan.epoch);
      progress.advance(source.samples(comm_.size()),
                       progress.due() ? std::optional(meter_.total().mean()) : std::nullopt);
    }
    source.end_epoch();
    ddp_.synchronize();
    compare_parameters();
    ++position_.epoch;
    done = 0;
    const std::int64_t skipped = skipped_.count();
    skipped_ = detail::SkippedSteps(position_.skipped = 0);
    std::vector<Total> totals{meter_.total()};
    for (auto& [name, part] : parts_) totals.push_back(part.total());
    sum_over_ranks(std::span(totals), comm_);
    if (!std::isfinite(totals[0].sum)) warn_of_loss(plan.epoch);
    EpochReport report{plan.epoch, position_.step, totals[0].mean(), 0, skipped, peak_memory()};
    std::string named;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      report.losses.emplace_back(parts_[i].first, totals[i + 1]);
      named += detail::formatted(", {} {:.4f}", parts_[i].first, totals[i + 1].mean());
    }
    progress.finish(report.loss, named);
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return report;
  }

  // A checkpoint also holds the extras, the precision and `parts` if they model Checkpointed.
  template <class... Parts>
  auto checkpointed_run(Parts&... parts) {
    auto each_more = [this, &parts...](auto&& function) {
      int extra_number = 0, part_number = 0;
      this->each_extra([&]<class E>([[maybe_unused]] E& extra) {
        if constexpr (Checkpointed<E>) function(detail::formatted("extra_{}", extra_number), extra);
        ++extra_number;
      });
      if constexpr (Checkpointed<PrecisionType>) function(std::string("precision"), precision_);
      (function(detail::formatted("part_{}", part_number++), parts), ...);
    };
    return detail::CheckpointedRun{model_.module(), *optimizer_, position_, ddp_,
                                   comm_,           world_.log,  each_more};
  }

  template <class Function>
  void each_extra(Function&& function) {
    std::apply([&](auto&... extra) { (function(extra), ...); }, extras_);
  }
  // Calls the callbacks and returns whether one of them asks to stop, on any rank.
  template <class Report, class... Callbacks>
  bool notify_all(const Report& report, Callbacks&... callbacks) {
    bool stop = false;
    {
      const detail::CallScope program{detail::ServedCall{}};
      detail::aborting(comm_, [&] { ((stop |= detail::asks_to_stop(callbacks, report, comm_)), ...); });
    }
    if constexpr ((detail::can_stop<Callbacks, Report, Comm> || ...)) return any_rank(comm_, stop);
    return false;
  }

  void compare_parameters() {
    if constexpr (!requires { requires Hook::ranks_diverge; }) {
      if (!options_.compare_parameters) return;
      const double distance = check_same_parameters(comm_, ddp_.named_parameters());
      if (distance > 0 && !std::exchange(warned_of_rounding_, true))
        world_.log.warning(
            "the parameters of the ranks differ by rounding, {:.1g} of their norm at most: "
            "processors of different kinds compute so",
            distance);
    }
  }

  // Logs on which rank and in which step the loss was first not finite. Collective.
  void warn_of_loss(std::int64_t epoch) {
    if (std::exchange(warned_of_loss_, true)) return;
    const std::optional<std::int64_t> own = meter_.first_not_finite();
    const std::vector<std::string> all = agree(comm_, [&] {
      return own ? std::to_string(*own) + (warned_in_stream_ ? " warned" : "") : std::string();
    });
    std::optional<std::pair<std::int64_t, std::size_t>> first;
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      if (!all[rank].empty())
        if (const std::pair found{static_cast<std::int64_t>(std::stoll(all[rank])), rank};
            !first || found < *first)
          first = found;
    if (comm_.rank() != 0 || (first && all[first->second].ends_with("warned"))) return;
    const std::string where = first ? detail::formatted("on rank {} in step {}",
                                                        detail::RankNames(comm_)(first->second), first->first)
                                    : std::string("before this run was resumed");
    // In a group without world rank 0, the group's rank 0 logs.
    warn_of_loss(world_.rank() == 0 ? world_.log : world_.log.all(), epoch, where);
  }

  // A stream's epoch may never end: each rank warns of its own loss, once the meter has read it.
  void warn_in_stream(std::int64_t epoch) {
    if (warned_of_loss_ || warned_in_stream_ || !meter_.known_not_finite()) return;
    warned_in_stream_ = true;
    warn_of_loss(world_.log.all(), epoch,
                 detail::formatted("on rank {} in step {}", world_.rank(), *meter_.known_not_finite()));
  }

  static void warn_of_loss(const Log& log, std::int64_t epoch, const std::string& where) {
    log.warning(
        "the loss of epoch {} is not finite, first {}: lower the learning rate, look at the data of that "
        "step, or add the extra CheckFinite, which stops before such a step",
        epoch + 1, where);
  }

  using Kept = detail::MemberTypes<Types>;

  World world_;
  TrainerOptions options_;
  Comm comm_;
  typename Kept::Model model_;
  PrecisionType precision_;
  Extras extras_;
  typename Kept::Ddp ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  typename Kept::Step step_;
  MeanMeter meter_;  // of the running epoch
  detail::NamedMeters parts_;
  detail::RunPosition position_;
  std::optional<detail::RankState> resumed_;     // of a loaded checkpoint, until an epoch takes it up
  detail::SaveDataPosition save_data_position_;  // saves the data position, inside `fit`
  detail::SkippedSteps skipped_;                 // of the running epoch
  bool warned_of_rounding_ = false;
  bool warned_of_loss_ = false, warned_in_stream_ = false;
};

/// Deduces the policies: `Trainer{world, options, Net(...), extras...}`.
template <class... Given>
Trainer(const World&, TrainerOptions, Given...) -> Trainer<typename detail::PolicyOfArgument<Given>::type...>;

}  // namespace lockstep::inline v0_1::inline LOCKSTEP_DEVICES
