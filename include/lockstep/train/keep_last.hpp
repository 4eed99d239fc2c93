#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/monitor.hpp"

namespace lockstep {

/// A callback of `fit` that saves a checkpoint after each epoch in a file of its own, and keeps the last `n`.
///
/// ```cpp
/// lockstep::KeepLast checkpoints(3, "runs/epoch-{}.ckpt", [&](const std::filesystem::path& path) {
///   trainer.save_checkpoint(path, stopping, best);
/// });
/// if (const auto path = checkpoints.newest(trainer.comm())) trainer.load_checkpoint(*path, stopping, best);
/// trainer.fit(data, loss, measure, stopping, best, checkpoints);
/// ```
///
/// In the pattern, `{}` is the number of completed epochs. After the new file is whole, rank 0 removes the
/// file that is `n` epochs older, and those before it that follow each other. No other file is removed. A
/// file that cannot be removed is a warning. Before the first epoch, rank 0 creates the folder; a path that
/// cannot be written ends `fit` there. Pass it to `fit` after the callbacks whose state it saves.
class KeepLast {
 public:
  /// `write(path)` is called on every rank; it saves the run by Trainer::save_checkpoint. Throws UsageError
  /// if `n` is below 1, or if the file name of `pattern` does not have one `{}`.
  KeepLast(std::int64_t n, const std::filesystem::path& pattern,
           std::function<void(const std::filesystem::path&)> write);

  /// Returns the path of the checkpoint after `epochs` completed epochs.
  [[nodiscard]] std::filesystem::path path_of(std::int64_t epochs) const;

  /// Returns the path of the checkpoint with the most completed epochs, std::nullopt if there is none. Rank
  /// 0 reads the folder and broadcasts the result. Collective. Every rank throws the same CheckpointError
  /// if the folder cannot be read.
  template <Communicator C>
  [[nodiscard]] std::optional<std::filesystem::path> newest(C& comm) const {
    const detail::CallScope scope("KeepLast::newest");
    const std::string found = agree_with_rank_zero<CheckpointError>(comm, [&] { return newest_here(); });
    if (found.empty()) return std::nullopt;
    return found;
  }

  /// Creates the folder on rank 0 before the first epoch. Called by `fit`. Collective once. Every rank throws
  /// the same UsageError if the checkpoint of that epoch cannot be written.
  template <Communicator C>
  void on_epoch_start(const EpochPlan& plan, C& comm) {
    if (checked_) return;
    const detail::CallScope scope("KeepLast::on_epoch_start");
    agree_with_rank_zero<UsageError>(comm, [&] { prepare(plan.epoch + 1); });
    checked_ = true;
  }

  /// Saves a checkpoint, then removes the older ones. Called by `fit`. Collective. Passes on an exception of
  /// `write`.
  template <Communicator C>
  void on_epoch(const EpochReport& report, C& comm) {
    const std::int64_t epochs = report.epoch + 1;
    write_(path_of(epochs));
    if (comm.rank() == 0) remove_older(epochs, detail::log_of(comm));
  }

 private:
  [[nodiscard]] std::string newest_here() const;
  void prepare(std::int64_t epochs) const;
  void remove_older(std::int64_t epochs, const Log& log) const;

  std::int64_t n_;
  std::filesystem::path folder_;
  std::string before_, after_;  // the file name around the number
  std::function<void(const std::filesystem::path&)> write_;
  bool checked_ = false;
};

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/train/detail/keep_last-inl.hpp"
#endif
