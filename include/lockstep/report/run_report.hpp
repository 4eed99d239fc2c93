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
#include "lockstep/world/world.hpp"

namespace lockstep {

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
/// It shows: the loss (rank 0's of the steps, at most 1024 of them, and the mean over all ranks of each
/// epoch); the values of `add_scalar`; samples/s of each rank; the mean time of a step by phase (see
/// StepPhase) on each rank; the phases and the buckets of the last step on each rank; which rank the others
/// waited for, and for how long; versions, hosts, threads and the command line.
///
/// The page is written after each epoch, and by the destructor if values were added since. The ranks gather
/// their parts at the end of each epoch: `on_epoch` is collective, so every rank passes it to `fit`. Each
/// file is whole: a kill leaves the page of the epoch before. The page of an earlier run, such as the one that
/// this run resumes, is kept: before it is replaced, rank 0 copies it to the next free name (report.1.html
/// beside report.html) and says so. If it cannot be written, rank 0 warns once and
/// the training continues. Refers to the communicator.
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
    const World& world = comm_.world();
    // In a group without world rank 0, the group's rank 0 logs.
    const Log log = world.rank() == 0 ? world.log : world.log.all();
    if (!std::exchange(kept_, true)) detail::keep_copy(path_, log);
    detail::write_or_warn(path_, page_->html(recorder_.losses()), log, warned_);
  }

  C& comm_;
  std::filesystem::path path_;
  detail::RunRecorder recorder_;
  std::optional<detail::RunPage> page_;  // on rank 0
  bool changed_ = false, kept_ = false, warned_ = false;
};

}  // namespace lockstep
