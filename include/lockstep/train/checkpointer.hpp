#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/detail/temporary_file.hpp"
#include "lockstep/train/detail/archive_copy.hpp"
#include "lockstep/train/monitor.hpp"
#include "lockstep/train/trainer.hpp"

namespace lockstep::inline v0_1 {

/// When a Checkpointer saves, beside the end of the last epoch: after each epoch if none of the first three options is given.
struct CheckpointerOptions {
  std::optional<std::int64_t> every_steps = {};   ///< after each so many optimizer steps
  std::optional<std::int64_t> every_epochs = {};  ///< after each so many epochs
  std::optional<std::chrono::milliseconds> interval =
      {};                 ///< after a step, once this time has passed since the last
  std::int64_t keep = 2;  ///< the number of checkpoints that stay, the newest
};

/// A callback of `fit` that saves checkpoints while training goes on: rank 0 copies the state of the run to memory, and a
/// thread of it writes the copy. Training waits for the copy alone, unless the file before is still being written.
///
/// ```cpp
/// lockstep::Checkpointer checkpoints{trainer, "checkpoints", {.every_steps = 1000}};
/// checkpoints.load_latest();
/// trainer.fit(data, loss, checkpoints);
/// ```
///
/// The files are those of Trainer::save_checkpoint, `folder`/step-00001000.ckpt after 1000 steps. Each is written beside its
/// place, synced and renamed, and only then are old ones removed: a run that is killed leaves a whole one at any moment.
///
/// Pass it after other callbacks, and before a StopOnSignal. On rank 0 the copy takes the memory of the model and the optimizer
/// once more, on their device, which the first save allocates; while a file is written, its bytes lie in memory as well.
///
/// Where rank 0 cannot write a file, the next save() or wait() throws CheckpointError on every rank. `fit` waits at the end of
/// its last epoch; call wait() where a callback may stop it sooner. The destructor waits for the file, and logs its error.
/// Counterpart: torch.distributed.checkpoint.async_save, and Lightning's ModelCheckpoint.
template <class Trained, Checkpointed... Parts>
class Checkpointer {
 public:
  /// `parts`: see Trainer::save_checkpoint. Those that are variables, and the trainer, must outlive this object. Throws UsageError
  /// for an option below 1. Not collective: the folder is made by the first save.
  Checkpointer(Trained& trainer, std::filesystem::path folder, CheckpointerOptions options = {},
               Parts&&... parts)
      : trainer_(trainer),
        folder_(std::move(folder)),
        options_(options),
        parts_(std::forward<Parts>(parts)...) {
    const auto require = [](const char* name, std::optional<std::int64_t> value) {
      if (value.value_or(1) < 1)
        throw UsageError(
            detail::formatted("CheckpointerOptions::{} is {}: it must be 1 or more", name, *value));
    };
    require("every_steps", options.every_steps);
    require("every_epochs", options.every_epochs);
    require("interval", options.interval ? std::optional(options.interval->count()) : std::nullopt);
    require("keep", options.keep);
    if (!options.every_steps && !options.interval && !options.every_epochs) options_.every_epochs = 1;
  }
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;
  ~Checkpointer() {
    if (writing_.valid()) try {
        writing_.get();
      } catch (const std::exception& error) {
        detail::log_of(comm()).error("{}", error.what());
      }
  }

  /// Loads the newest checkpoint of the folder that is whole, and returns whether there is one. Those after it, which are damaged,
  /// are renamed to NAME.damaged, with a warning. Collective; call it before `fit`. Throws CheckpointError as
  /// Trainer::load_checkpoint, if there are checkpoints and none is whole, or if one cannot be read.
  bool load_latest() {
    const detail::CallScope scope("Checkpointer::load_latest");
    wait();
    const std::string path = agree_with_rank_zero<CheckpointError>(
        comm(), [&] { return of_files([&] { return newest_whole().string(); }); });
    if (!path.empty()) std::apply([&](auto&... part) { trainer_.load_checkpoint(path, part...); }, parts_);
    owns_folder_ = true;
    return !path.empty();
  }

  /// Saves the run, and returns once its state is copied. Waits for the file before. Collective, also in callbacks of `fit` as
  /// save_checkpoint. Throws CheckpointError on every rank if that file could not be written, if there is no memory for the
  /// copy, or for a folder that holds another run's checkpoints or later ones than this step.
  void save() {
    const detail::CallScope scope("Checkpointer::save");
    wait();
    const auto take = [&](torch::serialize::OutputArchive& archive) {
      of_files([&] { prepare(); });
      copy_.detach(archive);
      writing_ =
          std::async(std::launch::async, [this, archive = std::move(archive), path = next()]() mutable {
            write_file_atomically(path, detail::bytes_of(archive));
            of_files([this] { rotate(); });
          });
    };
    std::apply(
        [&](const auto&... part) {
          detail::RunAccess::take_checkpoint(trainer_, "Checkpointer::save", take, part...);
        },
        parts_);
    saved_ = Clock::now();
  }

  /// Blocks until what was saved is written. Collective. Throws CheckpointError on every rank if that has failed.
  void wait() {
    const detail::CallScope scope("Checkpointer::wait");
    agree_with_rank_zero<CheckpointError>(comm(), [&] {
      if (writing_.valid()) writing_.get();
    });
  }

  void on_epoch_start(const EpochPlan& plan) {
    ends_ = plan.epoch + 1 == plan.epochs;
    // A stream plans each epoch of a number of steps as the last one.
    last_step_ = plan.steps && !plan.resumed ? trainer_.step() + *plan.steps : 0;
    polled_ = Clock::now();
    polled_step_ = next_poll_ = trainer_.step();
  }
  void on_step(const StepReport& report) {
    const std::int64_t step = report.step + 1;
    const bool due = options_.every_steps && step % *options_.every_steps == 0;
    if (due || (options_.interval && interval_is_over(step))) save();
  }
  void on_epoch(const EpochReport& report) {
    const bool last = ends_ && report.step >= last_step_;
    const bool due = options_.every_epochs && (report.epoch + 1) % *options_.every_epochs == 0;
    if (due || last) save();
    if (last) wait();
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Path = std::filesystem::path;
  static constexpr std::string_view begin_of_name = "step-", end_of_name = ".ckpt";

  [[nodiscard]] auto& comm() { return trainer_.comm(); }
  template <class Work>
  static auto of_files(const Work& work) try {
    return work();
  } catch (const std::filesystem::filesystem_error& error) {
    throw CheckpointError(error.what());
  }
  [[nodiscard]] Path next() const {
    return folder_ / detail::formatted("{}{:08}{}", begin_of_name, trainer_.step(), end_of_name);
  }
  /// Returns the files of the folder by their steps. `end`: of the names.
  [[nodiscard]] std::map<std::int64_t, Path> files(std::string_view end = end_of_name) const {
    std::map<std::int64_t, Path> found;
    std::error_code error;
    const std::filesystem::directory_iterator entries(folder_, error);
    if (error && error != std::errc::no_such_file_or_directory)
      throw CheckpointError(
          detail::formatted("cannot read the folder '{}': {}", folder_.string(), error.message()));
    for (const auto& entry : entries) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(begin_of_name) || !name.ends_with(end)) continue;
      const char *first = name.data() + begin_of_name.size(), *last = name.data() + name.size() - end.size();
      std::int64_t step = 0;
      if (const auto read = std::from_chars(first, last, step); read.ptr == last && read.ec == std::errc{})
        found[step] = entry.path();
    }
    return found;
  }
  [[nodiscard]] Path newest_whole() const {
    remove_temporary_files();
    std::vector<Path> damaged;
    std::string faults;
    const auto known = files();
    for (auto file = known.rbegin(); file != known.rend(); ++file) {
      const Path& path = file->second;
      const std::string bytes = std::filesystem::file_size(path) > 0 ? read_file(path) : std::string();
      try {
        detail::check_archive(bytes);
      } catch (const CheckpointError& error) {
        faults += detail::formatted("{}'{}': {}", faults.empty() ? "" : "; ", path.string(), error.what());
        damaged.push_back(path);
        continue;
      }
      for (const Path& one : damaged) std::filesystem::rename(one, one.string() + ".damaged");
      if (!faults.empty())
        detail::log_of(trainer_.comm())
            .warning("loads '{}', and renames to NAME.damaged: {}", path.string(), faults);
      return path;
    }
    if (!faults.empty()) throw CheckpointError("no checkpoint is whole: " + faults);
    return {};
  }
  void prepare() {
    const auto refuse = [this](const char* what) {
      throw CheckpointError(detail::formatted(
          "'{}' has checkpoints {}, which new ones would replace: call load_latest() before fit, or give "
          "another folder",
          folder_.string(), what));
    };
    std::filesystem::create_directories(folder_);
    const auto known = files();
    if (!owns_folder_ && !known.empty()) refuse("of another run");
    if (!known.empty() && known.rbegin()->first > trainer_.step()) refuse("of later steps");
    if (!std::exchange(owns_folder_, true)) remove_temporary_files();
  }
  // A killed run may leave one, which only a writer of the same name removes.
  void remove_temporary_files() const {
    const std::string suffix = detail::TemporaryFile::suffix;
    for (const auto& [step, path] : files(std::string(end_of_name) + suffix)) {
      const std::string name = path.string();
      detail::TemporaryFile(name.substr(0, name.size() - suffix.size()), std::chrono::seconds(1));
    }
  }
  void rotate() const {
    auto known = files();
    for (auto file = known.begin(); std::ssize(known) > options_.keep; file = known.erase(file)) {
      std::error_code gone;
      std::filesystem::remove(file->second, gone);
    }
  }
  // Returns whether the interval is over by rank 0's clock. To poll it costs a collective: the next time is when half of what
  // is left will have passed at the present pace.
  bool interval_is_over(std::int64_t step) {
    if (step < next_poll_) return false;
    const std::string more = agree_with_rank_zero(comm(), [&] {
      const auto now = Clock::now();
      const std::chrono::duration<double> left = *options_.interval - (now - saved_);
      const auto pace = (now - polled_) / static_cast<double>(std::max<std::int64_t>(step - polled_step_, 1));
      polled_ = now;
      return std::to_string(
          left.count() <= 0 ? 0 : static_cast<std::int64_t>(std::clamp(left / pace / 2, 1.0, 1e3)));
    });
    const std::int64_t steps = std::atoll(more.c_str());
    polled_step_ = step;
    next_poll_ = step + std::max<std::int64_t>(steps, 1);
    return steps == 0;
  }

  Trained& trainer_;
  const Path folder_;
  CheckpointerOptions options_;
  std::tuple<Parts...> parts_;
  detail::ArchiveCopy copy_;
  bool owns_folder_ = false;  // what it holds is of this run
  Clock::time_point saved_ = Clock::now(), polled_ = saved_;
  std::int64_t polled_step_ = 0, next_poll_ = 0, last_step_ = 0;
  bool ends_ = false;          // with this epoch
  std::future<void> writing_;  // its destructor waits
};

/// Keeps references to parts that are variables, and the others themselves, such as PerRank{part}.
template <class Trained, class... Parts>
Checkpointer(Trained&, std::filesystem::path, CheckpointerOptions, Parts&&...)
    -> Checkpointer<Trained, Parts...>;
template <class Trained>
Checkpointer(Trained&, std::filesystem::path) -> Checkpointer<Trained>;

}  // namespace lockstep::inline v0_1
