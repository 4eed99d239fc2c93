#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/train/checkpoint.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/detail/model_handle.hpp"
#include "lockstep/train/metrics.hpp"
#include "lockstep/train/state_dict.hpp"

namespace lockstep::detail {

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
    each_count(read, [&](const char* key, std::int64_t& count) { count = read_integer(archive, key); });
    read.fitting = read_integer(archive, "fitting") != 0;
    c10::IValue rates_then;
    if (!archive.try_read("rates", rates_then) || !rates_then.isDoubleList()) refuse_archive("rates");
    read.rates = rates_then.toDoubleVector();
    if (c10::IValue indices; archive.try_read("frozen", indices) && indices.isIntList())
      read.frozen = indices.toIntVector();
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

/// Marks a `fit` as running in a scope, and keeps its SaveDataPosition.
class Fitting {
 public:
  Fitting(RunPosition& position, SaveDataPosition& kept, SaveDataPosition save)
      : position_(position), kept_(kept) {
    position_.fitting = true;
    kept_ = std::move(save);
  }
  Fitting(const Fitting&) = delete;
  Fitting& operator=(const Fitting&) = delete;
  ~Fitting() {
    kept_ = nullptr;
    position_.fitting = false;
    position_.step_in_epoch = position_.skipped = 0;  // an abandoned epoch is restarted
  }

 private:
  RunPosition& position_;
  SaveDataPosition& kept_;
};

/// The parts of a run that a checkpoint holds. `each_more(f)` calls `f(key, part)` for each further part that
/// is Checkpointed.
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

/// Collects this rank's state: generators, local buffers and, inside an epoch, the running
/// loss and the data position. If a loaded checkpoint has not been resumed yet, the last two come from it.
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
  return state;
}

/// Writes a checkpoint on rank 0. Collective and blocking. `own_state()` returns this rank's RankState. An
/// error on any rank is thrown on every rank.
template <class Run, class OwnState>
void write_checkpoint(Run run, const std::filesystem::path& path, OwnState&& own_state) {
  std::string own;
  agree<CheckpointError>(run.comm, [&] { own = own_state().bytes(); });
  const c10::IValue ddp = run.ddp.state();
  if (auto* sharded = dynamic_cast<ShardedState*>(&run.optimizer)) sharded->consolidate(0);
  const std::vector<std::string> ranks = gather_on_rank_zero(run.comm, std::move(own));
  agree_with_rank_zero<CheckpointError>(run.comm, [&] {
    torch::serialize::OutputArchive archive;
    CheckpointWriter writer(archive);
    writer.add(checkpoint_model, run.model);
    writer.add("optimizer", run.optimizer);
    writer.add("position", run.position);
    writer.add_ranks(ranks, pickle_state(ddp));
    run.each_more([&](const std::string& key, const auto& part) { writer.add(key, part); });
    write_file_atomically(path, bytes_of(archive));
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

/// Restores this rank's local buffers; a no-op if none were saved.
inline void restore_buffers(const torch::nn::Module& model, const std::vector<at::Tensor>& saved) {
  const std::vector<NamedTensor> buffers = unique_buffers(model);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < saved.size() && i < buffers.size(); ++i)
    at::Tensor(buffers[i].tensor).copy_(saved[i]);
}

/// Loads a checkpoint. Returns this rank's state, or nullopt if `path` does not exist on rank 0 and
/// `required` is false. Collective and blocking. Every rank throws an equal CheckpointError. Changes the
/// model and the position last, after everything that can fail. `freeze(indices)` freezes these parameters alone.
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
  std::optional<CheckpointReader> reader;
  MatchedTensors tensors;
  RunPosition position;
  RankState state;
  on_all([&] {
    auto model = reader.emplace(bytes).part(checkpoint_model);
    tensors = match_tensors(run.model, model);
    reader->read("position", position);
    state = state_of_rank(reader->ranks(), run.comm.rank(), run.comm.size());
    reader->read("optimizer", run.optimizer);
    run.each_more([&](const std::string& key, auto& part) { reader->read(key, part); });
  });
  if (position.frozen) freeze(*position.frozen);
  on_all([&] {
    run.ddp.load_state(unpickle_state(reader->ddp(), "ddp"));
    tensors.copy();
    restore_buffers(run.model, state.buffers);
    if (state.generator.defined()) set_default_generator_state(state.generator);
    // A run that moves to another type of device starts with that device's current generator.
    if (const at::Device device = device_of(run.model); !device.is_cpu() && state.device_generator.defined())
      set_default_generator_state(state.device_generator, device);
    restore_position(run.position, std::move(position), run.log);
  });
  return state;
}

}  // namespace lockstep::detail
