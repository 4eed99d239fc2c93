#pragma once

#include <torch/serialize.h>

#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/train/checkpoint.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/detail/optimizer_check.hpp"

namespace lockstep::inline v0_1::detail {

/// A trainer's position. Epochs and steps are counted over the trainer's whole life.
struct RunPosition {
  std::int64_t epoch = 0, step = 0;
  /// Completed steps of the current epoch.
  std::int64_t step_in_epoch = 0;
  /// Steps of the current epoch that the precision skipped.
  std::int64_t skipped = 0;
  /// Epoch and step at which the running `fit` began; its length is counted from there.
  std::int64_t first_epoch = 0, first_step = 0;
  bool fitting = false;
  /// Samples per rank and micro-batch, and micro-batches per step.
  std::int64_t batch_size = 0, accumulate = 0;
  /// Learning rates of the optimizer's groups before any schedule; empty without a schedule.
  std::vector<double> rates;
  /// Indices of the parameters that do not require grad. Unset if the checkpoint does not have them.
  std::optional<std::vector<std::int64_t>> frozen;

  void save(torch::serialize::OutputArchive& archive) const {
    each_count(*this, [&](const char* key, std::int64_t count) { archive.write(key, c10::IValue(count)); });
    archive.write("fitting", c10::IValue(static_cast<std::int64_t>(fitting)));
    archive.write("rates", c10::IValue(rates));
    if (frozen) archive.write("frozen", c10::IValue(*frozen));
  }
  void load(torch::serialize::InputArchive& archive) {
    RunPosition read;
    each_count(read, [&](const char* key, std::int64_t& count) { count = read_length(archive, key); });
    read.fitting = read_integer(archive, "fitting") != 0;
    read.rates = read_value(archive, "rates", &c10::IValue::isDoubleList).toDoubleVector();
    if (!std::all_of(read.rates.begin(), read.rates.end(),
                     [](double r) { return r >= 0 && std::isfinite(r); }))
      refuse_archive("rates");
    if (c10::IValue indices; archive.try_read("frozen", indices)) {
      if (indices.isIntList()) read.frozen = indices.toIntVector();
      if (!read.frozen || std::adjacent_find(read.frozen->begin(), read.frozen->end(),
                                             std::greater_equal()) != read.frozen->end())
        refuse_archive("frozen");
    }
    *this = read;
  }

 private:
  template <class Position, class Visit>
  static void each_count(Position& position, const Visit& visit) {
    visit("epoch", position.epoch);
    visit("step", position.step);
    visit("step_in_epoch", position.step_in_epoch);
    visit("skipped", position.skipped);
    visit("first_epoch", position.first_epoch);
    visit("first_step", position.first_step);
    visit("batch_size", position.batch_size);
    visit("accumulate", position.accumulate);
  }
};

/// Writes the data position of a running `fit`.
using SaveDataPosition = std::function<void(torch::serialize::OutputArchive&)>;

/// Marks a `fit` as running in a scope, and keeps its SaveDataPosition. What it resumes is kept until its first epoch.
class Fitting {
 public:
  Fitting(RunPosition& position, SaveDataPosition& kept, std::optional<RankState>& resumed,
          SaveDataPosition save)
      : position_(position), kept_(kept), resumed_(resumed) {
    position_.fitting = true;
    kept_ = std::move(save);
  }
  Fitting(const Fitting&) = delete;
  Fitting& operator=(const Fitting&) = delete;
  ~Fitting() {
    kept_ = nullptr;
    position_.fitting = false;
    position_.step_in_epoch = position_.skipped = 0;  // an abandoned epoch is restarted
    resumed_.reset();
  }

 private:
  RunPosition& position_;
  SaveDataPosition& kept_;
  std::optional<RankState>& resumed_;
};

/// The parts of a run in a checkpoint. `each_more(f)` calls `f(key, part)` for each further Checkpointed part.
template <class Ddp, class Comm, class EachMore>
struct CheckpointedRun {
  torch::nn::Module& model;
  torch::optim::Optimizer& optimizer;
  RunPosition& position;
  Ddp& ddp;
  Comm& comm;
  const Log& log;
  EachMore each_more;
};
// clang before 17 does not deduce the template arguments of an aggregate.
template <class Ddp, class Comm, class EachMore>
CheckpointedRun(torch::nn::Module&, torch::optim::Optimizer&, RunPosition&, Ddp&, Comm&, const Log&, EachMore)
    -> CheckpointedRun<Ddp, Comm, EachMore>;

/// Collects this rank's state. If a loaded checkpoint has not been resumed yet, the running loss and the data
/// position come from it.
template <class Run>
RankState own_state(Run& run, bool local_buffers, MeanMeter& meter, NamedMeters& parts,
                    const SaveDataPosition& save_data_position_, const std::optional<RankState>& loaded) {
  RankState state;
  if (loaded) {
    state.loss = loaded->loss;
    state.parts = loaded->parts;
    state.data_position = loaded->data_position;
  } else if (run.position.step_in_epoch > 0) {
    state.loss = meter.total();
    for (auto& [name, part] : parts) state.parts.push_back(part.total());
    torch::serialize::OutputArchive archive;
    save_data_position_(archive);
    state.data_position = bytes_of(archive);
  }
  state.generator = default_generator_state();
  if (const at::Device device = device_of(run.model); !device.is_cpu())
    state.device_generator = default_generator_state(device);
  if (local_buffers)
    for (const NamedTensor& buffer : unique_buffers(run.model)) state.buffers.push_back(buffer.tensor);
  run.each_more([&]<class Part>(const std::string&, [[maybe_unused]] Part& part) {
    if constexpr (PerRankPart<Part>) state.own_parts.push_back(part_bytes(part));
  });
  return state;
}

/// Takes a checkpoint: calls `take(archive)` on rank 0 with what its file is to hold, which refers to the run's tensors.
/// Collective. `own_state()` returns this rank's RankState. An error on any rank is thrown on every rank.
template <class Run, class OwnState, class Take>
void take_checkpoint(Run run, OwnState&& own_state, Take&& take) {
  std::string own;
  agree<CheckpointError>(run.comm, [&] { own = own_state().bytes(); });
  const c10::IValue ddp = run.ddp.state();
  if (auto* sharded = dynamic_cast<ShardedState*>(&run.optimizer)) sharded->consolidate(0);
  const std::vector<std::string> ranks = gather_on_rank_zero(run.comm, std::move(own));
  agree_with_rank_zero<CheckpointError>(run.comm, [&] {
    torch::serialize::OutputArchive archive;
    archive.write("format", c10::IValue(checkpoint_format));
    write_part(archive, checkpoint_model, run.model);
    write_part(archive, "optimizer", run.optimizer);
    write_part(archive, "position", run.position);
    write_ranks(archive, ranks);
    const std::vector<char> pickled = torch::pickle_save(ddp);
    write_bytes(archive, "ddp", {pickled.data(), pickled.size()});
    run.each_more([&]<class Part>([[maybe_unused]] const std::string& key, [[maybe_unused]] Part& part) {
      if constexpr (!PerRankPart<Part>) write_part(archive, key, part);
    });
    take(archive);
  });
}

/// Restores a run's position. Keeps the trainer's own batch size and accumulation, with a warning if they
/// differ, and its own rates if their number differs.
inline void restore_position(RunPosition& position, RunPosition saved, const Log& log) {
  if (saved.batch_size != position.batch_size || saved.accumulate != position.accumulate)
    log.warning("the checkpoint was saved with batch size {} and accumulate {}; this run uses {} and {}",
                saved.batch_size, saved.accumulate, position.batch_size, position.accumulate);
  saved.batch_size = position.batch_size;
  saved.accumulate = position.accumulate;
  if (saved.rates.size() != position.rates.size()) saved.rates = position.rates;
  saved.frozen = position.frozen;
  position = std::move(saved);
}

/// Returns functions that restore the optimizers, the further parts, generators and the wrapper.
template <class Run>
std::vector<std::function<void()>> undo_of(Run& run) {
  std::vector<std::function<void()>> undo;
  const auto keep = [&]<class Part>(Part& part) {
    constexpr bool optimizes = std::derived_from<Part, torch::optim::Optimizer>;
    if constexpr (optimizes)
      if (auto* sharded = dynamic_cast<ShardedState*>(&part)) {
        undo.push_back(sharded->snapshot());
        return;
      }
    undo.push_back([&part, bytes = part_bytes(part)] {
      torch::serialize::InputArchive archive = archive_of(bytes), states;
      if constexpr (optimizes)  // an archive of torch::optim's has all states, but its load keeps others too
        if (archive.try_read("state", states)) part.state().clear();
      part.load(archive);
    });
  };
  keep(run.optimizer);
  run.each_more([&](const std::string&, auto& part) { keep(part); });
  undo.push_back([state = default_generator_state()] { set_default_generator_state(state); });
  if (const at::Device device = device_of(run.model); !device.is_cpu())
    undo.push_back(
        [device, state = default_generator_state(device)] { set_default_generator_state(state, device); });
  undo.emplace_back(run.ddp.snapshot());
  return undo;
}

/// Throws CheckpointError unless the checkpoint has the run's PerRank parts, of as many ranks.
template <class Run>
void require_own_parts(Run& run, const std::vector<RankState>& ranks) {
  std::size_t parts = 0;
  run.each_more([&]<class Part>(const std::string&, Part&) { parts += PerRankPart<Part> ? 1 : 0; });
  for (const RankState& rank : ranks)
    if (const std::size_t saved = rank.own_parts.size(); saved != parts)
      throw CheckpointError(formatted(
          "it has {} parts of each rank's own (PerRank), and {} are to be loaded: load the parts that it has",
          saved, parts));
  if (parts > 0 && ranks.size() != static_cast<std::size_t>(run.comm.size()))
    throw CheckpointError(formatted(
        "it was saved on {} ranks, and this run has {}: a part of each rank's own (PerRank) needs as many",
        ranks.size(), run.comm.size()));
}

/// Loads a checkpoint. Returns this rank's state, or nullopt if `path` does not exist on rank 0 and
/// `required` is false. Collective. Every rank throws an equal CheckpointError, after which the run is that of
/// before. `freeze(indices)` freezes these parameters alone.
template <class Run, class Freeze>
std::optional<RankState> read_checkpoint(Run run, const std::filesystem::path& path, bool required,
                                         Freeze&& freeze) {
  const std::string bytes = agree_with_rank_zero<CheckpointError>(
      run.comm, [&] { return required || std::filesystem::exists(path) ? read_file(path) : std::string(); });
  if (bytes.empty()) return std::nullopt;
  // Every rank must have finished a part before any begins the next, which may call collectives.
  const auto on_all = [&](auto&& read) {
    agree<CheckpointError>(run.comm, [&] { reading_file(path.string(), bytes, read); });
  };
  torch::serialize::InputArchive archive;
  MatchedTensors tensors;
  RunPosition position;
  RankState state;
  std::vector<std::function<void()>> undo;
  const std::vector<std::int64_t> frozen = run.position.frozen.value_or(std::vector<std::int64_t>());
  try {
    on_all([&] {
      archive = checkpoint_of(bytes);
      torch::serialize::InputArchive model = read_archive(archive, checkpoint_model);
      tensors = match_tensors(run.model, model);
      read_part(archive, "position", position);
      const auto parameters = static_cast<std::int64_t>(run.ddp.named_parameters().size());
      if (position.frozen && !position.frozen->empty() &&
          (position.frozen->front() < 0 || position.frozen->back() >= parameters))
        refuse_archive("position.frozen");
      const std::vector<RankState> ranks = read_ranks(archive);
      state = state_of_rank(ranks, run.comm.rank(), run.comm.size());
      require_own_parts(run, ranks);
      const std::vector<NamedTensor> buffers = unique_buffers(run.model);
      for (std::size_t i = 0; i < state.buffers.size(); ++i) {
        if (i >= buffers.size() || state.buffers[i].sizes() != buffers[i].tensor.sizes())
          refuse_archive(formatted("buffer_{}", i));
        tensors.pairs.emplace_back(buffers[i].tensor, state.buffers[i]);  // after those of rank 0
      }
      undo = undo_of(run);
      read_part(archive, "optimizer", run.optimizer);
      check_states(run.optimizer);
      run.each_more([&, own = std::size_t{0}]<class Part>(const std::string& key, Part& part) mutable {
        if constexpr (PerRankPart<Part>) {
          torch::serialize::InputArchive inner = archive_of(state.own_parts[own++]);
          part.load(inner);
        } else {
          read_part(archive, key, part);
          if constexpr (std::derived_from<Part, torch::optim::Optimizer>) check_states(part);
        }
      });
    });
    if (position.frozen) {
      undo.insert(undo.begin(), [&] { freeze(frozen); });  // which may construct the wrapper anew
      freeze(*position.frozen);
    }
    on_all([&] {
      if (state.generator.defined()) set_default_generator_state(state.generator);
      // A run that moves to another type of device starts with that device's current generator.
      if (const at::Device device = device_of(run.model);
          !device.is_cpu() && state.device_generator.defined())
        set_default_generator_state(state.device_generator, device);
    });
    on_all([&] {
      const std::string pickled = read_bytes(archive, "ddp");
      check_archive(pickled);
      const c10::IValue state = torch::pickle_load({pickled.begin(), pickled.end()});
      state.visit([](const c10::IValue& part) {
        if (part.isTensor() && !in_storage(part.toTensor())) refuse_archive("ddp");
        return false;
      });
      run.ddp.load_state(state);
    });
    tensors.copy();
    restore_position(run.position, std::move(position), run.log);
  } catch (const std::exception&) {
    for (const auto& restore : undo) try {
        restore();
      } catch (const std::exception&) {  // a part that cannot load what it has saved keeps what it has
      }
    throw;
  }
  return state;
}

/// The run of a Trainer for functions outside of it, such as those of interchange/.
struct RunAccess {
  /// Returns the run, to be saved by the function `name`, which may be called in `callbacks`. Throws as save_checkpoint.
  template <class T>
  static auto to_save(T& trainer, const char* name, const char* callbacks) {
    trainer.prepare_save(name, callbacks);
    return trainer.checkpointed_run();
  }
  /// See detail::take_checkpoint. Throws as save_checkpoint.
  template <class T, class Take, class... Parts>
  static void take_checkpoint(T& trainer, const char* name, Take&& take, const Parts&... parts) {
    trainer.take_checkpoint(name, take, parts...);
  }
  /// Calls `restore(run)` in the function `name`. Throws as load_checkpoint.
  template <class T, class Restore>
  static void restore(T& trainer, const char* name, Restore&& restore) {
    trainer.forbid_inside_fit(name);
    restore(trainer.checkpointed_run());
    trainer.resumed_.reset();
  }
};

}  // namespace lockstep::inline v0_1::detail
