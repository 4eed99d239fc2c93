#pragma once

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <string>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/detail/run_checkpoint.hpp"
#include "lockstep/train/state_dict.hpp"

namespace lockstep::detail {

/// A precision with a GradScaler, such as Fp16.
template <class P>
concept HasScaler = requires(const P& precision) {
  { precision.scaler() } -> std::same_as<const GradScaler&>;
};

/// Writes a run's state dicts on rank 0. Collective. An error on any rank is thrown on every rank.
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
      if (!file.at(key).isInt()) refuse(formatted("has an entry \"{}\" that is no int", key));
      return file.at(key).toInt();
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
    collect([&] {
      warning = load_optimizer_dict(run.optimizer, file.at("optimizer"), unique_parameters(run.model));
    });
    if (!faults.empty()) throw CheckpointError(faults);
    if constexpr (HasScaler<Precision>)
      if (file.contains("scaler")) {
        GradScaler scaler = precision.scaler();
        load_state_dict(scaler, file.at("scaler"));
        torch::serialize::OutputArchive written;
        scaler.save(written);
        torch::serialize::InputArchive archive = archive_of(bytes_of(written));
        precision.load(archive);
      }
    load_state_dict(run.model, file.at("model"));
    run.position.epoch = epoch;
    run.position.step = step;
    run.position.step_in_epoch = run.position.skipped = 0;
    run.position.fitting = false;
  });
  if (!warning.empty()) run.log.warning("{}: {}", path.string(), warning);
}

}  // namespace lockstep::detail
