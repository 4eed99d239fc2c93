#pragma once

#include <ATen/core/Dict.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <string>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/detail/run_checkpoint.hpp"
#include "lockstep/train/trainer.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

/// A precision with a GradScaler, such as Fp16.
template <class P>
concept HasScaler = requires(const P& precision) {
  { precision.scaler() } -> std::same_as<const GradScaler&>;
};

/// Writes the file of save_state_dict.
template <class Run, class Precision>
void write_state_dict(Run run, const Precision& precision, const std::filesystem::path& path) {
  if (auto* sharded = dynamic_cast<ShardedState*>(&run.optimizer)) sharded->consolidate(0);
  agree_with_rank_zero<CheckpointError>(run.comm, [&] {
    c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
    file.insert("model", dict_of(state_dict(run.model)));
    file.insert("optimizer", state_dict(run.optimizer));
    if constexpr (HasScaler<Precision>) file.insert("scaler", state_dict(precision.scaler()));
    file.insert("epoch", run.position.epoch);
    file.insert("step", run.position.step);
    torch_save(c10::IValue(file), path);
  });
}

/// Restores a run from a file of write_state_dict. Collective. Every rank throws an equal CheckpointError.
/// Changes the model and the position last.
template <class Run, class Precision>
void read_state_dict(Run run, [[maybe_unused]] Precision& precision, const std::filesystem::path& path) {
  const c10::IValue value = torch_load(path, run.comm);
  std::string warning;
  agree<CheckpointError>(run.comm, [&] {
    const auto refuse = [&](const std::string& reason) {
      throw CheckpointError(formatted(
          "{} {}: save {{\"model\": model.state_dict(), \"optimizer\": optimizer.state_dict()}} with "
          "torch.save, or load a model alone by load_state_dict(trainer.model(), ...)",
          path.string(), reason));
    };
    if (!value.isGenericDict()) refuse("holds no dict");
    const c10::impl::GenericDict file = value.toGenericDict();
    std::string missing;
    for (const char* key : {"model", "optimizer"})
      if (!file.contains(key)) missing += formatted("{} \"{}\"", missing.empty() ? "" : " and", key);
    if (!missing.empty()) refuse("has no entry" + missing);
    const auto number = [&](const char* key, std::int64_t otherwise) {
      if (!file.contains(key)) return otherwise;
      const c10::IValue count = file.at(key);
      if (!count.isInt() || count.toInt() < 0 || count.toInt() > most_counted)
        refuse(formatted("has an entry \"{}\" that is no count", key));
      return count.toInt();
    };
    const std::int64_t epoch = number("epoch", run.position.epoch), step = number("step", run.position.step);
    std::string faults;  // of both, in one error
    const auto collect = [&faults](const auto& read) {
      try {
        read();
      } catch (const CheckpointError& error) {
        faults += (faults.empty() ? "" : "; ") + first_line(error);
      }
    };
    collect([&] { check_state_dict(run.model, file.at("model")); });
    const auto load_optimizer = [&](bool apply) {
      return load_optimizer_dict(run.optimizer, file.at("optimizer"), unique_parameters(run.model), apply);
    };
    collect([&] { warning = load_optimizer(/*apply=*/false); });
    if (!faults.empty()) throw CheckpointError(faults);
    if constexpr (HasScaler<Precision>)
      if (file.contains("scaler")) {
        GradScaler scaler = precision.scaler();
        load_state_dict(scaler, file.at("scaler"));
        torch::serialize::InputArchive archive = archive_of(part_bytes(scaler));
        precision.load(archive);
      }
    load_optimizer(/*apply=*/true);
    load_state_dict(run.model, file.at("model"));
    run.position.epoch = epoch;
    run.position.step = step;
    run.position.step_in_epoch = run.position.skipped = 0;
    run.position.fitting = false;
  });
  if (!warning.empty()) run.log.warning("{}: {}", path.string(), warning);
}

}  // namespace detail

/// Writes the state dicts of a Trainer's run for Python. `torch.load(path, weights_only=True)` returns a dict with
/// "model", "optimizer", "epoch" and "step", the numbers of completed epochs and steps, and with "scaler"
/// under Fp16; see state_dict. It holds neither generators nor the position in the data: call it in
/// an OnEpoch callback or outside of `fit`, and to resume in C++, use Trainer::save_checkpoint. The file is written
/// atomically. Collective. Throws CheckpointError, also if the optimizer has no Python counterpart, UsageError
/// inside a step, and the error of DistributedDataParallel::synchronize.
template <class... Policies>
void save_state_dict(Trainer<Policies...>& trainer, const std::filesystem::path& path) {
  const detail::CallScope scope("save_state_dict");
  detail::write_state_dict(detail::RunAccess::to_save(trainer, "save_state_dict", "OnEpoch"),
                           trainer.precision(), path);
}
/// Restores a file of save_state_dict, or one that Python wrote by torch.save with the same keys; "epoch", "step" and
/// "scaler" may be missing, and then stay as they are. The next `fit` starts with the first batch of the epoch after
/// the completed ones. Call it before `fit`. Collective. Throws UsageError inside `fit`. Throws CheckpointError,
/// which names every missing, unexpected and misshapen entry of the model and of the optimizer (of its states only if
/// they can be paired with its parameters), and then changes nothing.
template <class... Policies>
void load_state_dict(Trainer<Policies...>& trainer, const std::filesystem::path& path) {
  const detail::CallScope scope("load_state_dict");
  detail::RunAccess::restore(trainer, "load_state_dict",
                             [&](auto run) { detail::read_state_dict(run, trainer.precision(), path); });
}

}  // namespace lockstep::inline v0_1
