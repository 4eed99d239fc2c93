#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "lockstep/report/detail/append_file.hpp"
#include "lockstep/report/detail/step_meter.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

/// Options of CsvLog and JsonLines.
struct MetricsOptions {
  /// The number of optimizer steps between two rows. A row reads the loss, which synchronizes with a GPU.
  std::int64_t every = 1;
};

namespace detail {

enum class MetricsFormat { csv, json };

/// What CsvLog and JsonLines have in common.
class MetricsLog {
 public:
  MetricsLog(const World& world, const std::filesystem::path& path, MetricsOptions options,
             MetricsFormat format);

  void on_profile(const StepReport& report, const StepProfile& profile);
  void on_epoch(const EpochReport& report);
  /// Writes a row with one value of the program's own, such as an accuracy. `step` is any position that the
  /// program counts by. A no-op on ranks other than 0.
  void add_scalar(std::string_view tag, double value, std::int64_t step);

 private:
  struct Row;

  void write(const Row& row);

  MetricsFormat format_;
  StepMeter meter_;
  AppendFile file_;
};

}  // namespace detail

/// A callback of `Trainer::fit` by which rank 0 writes one row for each step, epoch and `add_scalar` to a CSV file:
///
/// ```cpp
/// lockstep::CsvLog csv{world, "runs/exp1/metrics.csv"};
/// trainer.fit(train, loss, csv);
/// csv.add_scalar("accuracy", trainer.evaluate(test, lockstep::Accuracy{}), trainer.step());
/// ```
///
/// The columns, empty where a row has no such value:
///
/// | column | of a step | of an epoch |
/// |---|---|---|
/// | `time` | seconds since 1970 | the same |
/// | `event` | `step` (`scalar`: a row of `add_scalar`, in `step`, `tag` and `value`) | `epoch` |
/// | `epoch` | its epoch, zero-based | the epoch, zero-based |
/// | `step` | zero-based, over the lifetime of the trainer | the number of steps completed |
/// | `loss` | the mean over rank 0's samples | the mean over all ranks' samples |
/// | `lr` | the learning rate of the first parameter group | |
/// | `samples_per_second` | of all ranks, since the last row of a step, without callbacks | |
/// | `seconds` | of the step on rank 0 | of the epoch on rank 0 |
/// | `skipped` | | steps that the precision skipped |
///
/// Values that are not finite are `nan`, `inf` and `-inf`. An existing file is appended to, without a second
/// header; a last line that a kill has torn is removed first. A file whose first line is not that header is
/// left unchanged; rank 0 warns as for a file that cannot be written. After a resume from an older
/// checkpoint the repeated steps have two rows, of which the last one counts.
///
/// Each row is written at once, so that a killed run leaves whole rows. If the file cannot be written, rank 0
/// warns once and the training continues. Not collective.
class CsvLog : public detail::MetricsLog {
 public:
  /// Opens the file on rank 0, and creates its folders. Throws UsageError if `options.every` is below 1.
  CsvLog(const World& world, const std::filesystem::path& path, MetricsOptions options = {})
      : MetricsLog(world, path, options, detail::MetricsFormat::csv) {}
};

/// The same as CsvLog, with one JSON object in each line (JSON Lines) instead of a row. Keys are CsvLog's
/// columns; a key without a value is left out. Values that are not finite are the strings "NaN", "Infinity"
/// and "-Infinity", which Python's `float` reads. A file whose last line has no newline and does not begin as
/// those of JsonLines do is left unchanged; rank 0 warns as for a file that cannot be written.
class JsonLines : public detail::MetricsLog {
 public:
  /// Opens the file on rank 0, and creates its folders. Throws UsageError if `options.every` is below 1.
  JsonLines(const World& world, const std::filesystem::path& path, MetricsOptions options = {})
      : MetricsLog(world, path, options, detail::MetricsFormat::json) {}
};

}  // namespace lockstep::inline v0_1

#ifndef LOCKSTEP_COMPILED
#include "lockstep/report/detail/metrics_files-inl.hpp"
#endif
