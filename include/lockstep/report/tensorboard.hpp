#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/report/detail/append_file.hpp"
#include "lockstep/report/detail/step_meter.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

/// Options of TensorBoard.
struct TensorBoardOptions {
  /// The number of optimizer steps between two events of steps. An event reads the loss, which synchronizes with a GPU.
  std::int64_t every = 1;
  /// The first step of a resumed loop by hand: earlier values at it and later ones are no longer shown.
  std::optional<std::int64_t> purge_step = std::nullopt;
};

/// A callback of `Trainer::fit` by which rank 0 writes an event file that `tensorboard --logdir` shows. Needs
/// no TensorFlow and no protobuf.
///
/// ```cpp
/// lockstep::TensorBoard board{world, "runs/exp1"};
/// trainer.fit(train, loss, board);
/// board.add_scalar("test/accuracy", trainer.evaluate(test, lockstep::Accuracy{}), trainer.step() - 1);
/// ```
///
/// Tags of a step, at its zero-based number over the lifetime of the trainer: `train/loss` (the mean over
/// rank 0's samples), `train/lr` and `train/samples_per_second` (of all ranks, without callbacks). Tags of an
/// epoch, at the number of its last step: `epoch/loss` (the mean over all ranks' samples) and
/// `epoch/seconds`. Values are float32, as TensorBoard's are.
///
/// Each TensorBoard writes a new file; TensorBoard shows all files of a folder as one run. A Trainer's first step in
/// a folder that has event files, and a step whose number is below that of the step before it, start a session:
/// earlier values at that step and later ones are no longer shown. A loop by hand gives
/// TensorBoardOptions::purge_step. Each event is written at once, so that a killed run leaves whole events. If the
/// file cannot be written, rank 0 warns once and the training continues. Not collective.
///
/// Counterpart: torch.utils.tensorboard.SummaryWriter.
class TensorBoard {
 public:
  /// Creates the folder and the file on rank 0. Throws UsageError if `options.every` is below 1.
  TensorBoard(const World& world, const std::filesystem::path& folder, TensorBoardOptions options = {});

  /// Writes one value at a step, such as `trainer.step() - 1`, the last one: a run that is resumed after it
  /// begins with `trainer.step()`. A no-op on ranks other than 0.
  void add_scalar(std::string_view tag, double value, std::int64_t step);

  void on_profile(const StepReport& report, const StepProfile& profile);
  void on_epoch(const EpochReport& report);

 private:
  void start_session(std::int64_t step);
  void write(std::int64_t step, std::span<const std::pair<std::string_view, double>> values);

  detail::StepMeter meter_;
  detail::AppendFile file_;
  std::int64_t last_step_ = 0;
};

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/tensorboard-inl.hpp"
#endif
