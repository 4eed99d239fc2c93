#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/report/detail/append_file.hpp"
#include "lockstep/report/detail/run_recorder.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"

namespace lockstep::inline v0_1 {

/// Options of RunReport.
struct RunReportOptions {
  /// The heading of the page.
  std::string title = "lockstep run";
};

/// A callback of `Trainer::fit` by which rank 0 writes an HTML page about the run. The page needs no network
/// and no other file.
///
/// ```cpp
/// lockstep::RunReport page{trainer.comm(), "runs/exp1/report.html"};
/// trainer.fit(train, loss, lockstep::OnEpoch{[&](const auto& epoch) {
///   page.add_scalar("accuracy", trainer.evaluate(test, lockstep::Accuracy{}), epoch.step);
/// }}, page);
/// ```
///
/// It shows: the loss (rank 0's of at most 1024 steps, and the mean over all ranks of each epoch); the values
/// of `add_scalar`; of each rank samples/s, the mean time of a step by StepPhase, and the phases and buckets of
/// the last step; which rank the others waited for, and for how long; versions, hosts, threads, command line.
///
/// The page is written after each epoch, and by the destructor if values were added since. `on_epoch` gathers
/// the parts of the ranks: every rank passes the report to `fit`. The file is replaced atomically. The page of
/// an earlier run is kept under the next free name (report.1.html beside report.html), which rank 0 logs. If
/// the page cannot be written, rank 0 warns once and the training continues. Refers to the communicator.
///
/// A step's loss is read from the device on rank 0, which synchronizes with a GPU.
template <Communicator C>
class RunReport {
 public:
  /// `path` is the page that rank 0 writes.
  RunReport(C& comm, std::filesystem::path path, RunReportOptions options = {})
      : comm_(comm), path_(std::move(path)) {
    if (comm.rank() == 0) page_.emplace(std::move(options.title), comm.world(), comm.size());
  }
  RunReport(const RunReport&) = delete;
  RunReport& operator=(const RunReport&) = delete;
  /// Writes the page if values were added since the last epoch. Not collective.
  ~RunReport() {
    try {
      if (changed_) write();
    } catch (...) {  // the training may be unwinding
    }
  }

  void on_profile(const StepReport& report, const StepProfile& profile) {
    recorder_.step(report, profile, /*loss=*/comm_.rank() == 0);
  }
  /// Gathers the parts of all ranks, and writes the page. Collective.
  void on_epoch(const EpochReport& report) {
    const detail::CallScope scope("RunReport::on_epoch");
    const auto ranks = comm_.all_gather_bytes(recorder_.take_epoch(comm_.world()));
    if (!page_) return;
    page_->add_epoch(report, ranks);
    write();
  }
  /// Adds one value to the curve of its tag, at a step. A no-op on ranks other than 0. Not collective.
  void add_scalar(std::string_view tag, double value, std::int64_t step) {
    if (!page_) return;
    page_->add_scalar(tag, value, step);
    changed_ = true;
  }

 private:
  void write() {
    changed_ = false;
    const Log log = detail::group_log(comm_.world());
    if (!std::exchange(kept_, true)) detail::keep_copy(path_, log);
    detail::write_or_warn(path_, page_->html(recorder_.losses()), log, warned_);
  }

  C& comm_;
  std::filesystem::path path_;
  detail::RunRecorder recorder_;
  std::optional<detail::RunPage> page_;  // on rank 0
  bool changed_ = false, kept_ = false, warned_ = false;
};

}  // namespace lockstep::inline v0_1
