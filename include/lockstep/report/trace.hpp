#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/report/detail/append_file.hpp"
#include "lockstep/report/detail/trace_recorder.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/step_profile.hpp"

namespace lockstep::inline v0_1 {

/// Options of Trace. The traced steps are [from, to), zero-based, over the lifetime of the trainer. The first
/// steps of a run are unlike the later ones: buckets are rebuilt, and memory is allocated.
struct TraceOptions {
  /// The first traced step, and the first one after them.
  std::int64_t from = 10, to = 20;
};

/// A callback of `Trainer::fit` by which rank 0 writes a Chrome trace of some steps on all ranks, which
/// https://ui.perfetto.dev and chrome://tracing open.
///
/// ```cpp
/// lockstep::Trace trace{trainer.comm(), "runs/exp1/trace.json", {.from = 10, .to = 20}};
/// trainer.fit(train, loss, trace);
/// ```
///
/// Each rank is a process with three kinds of lanes: the steps; their phases (see StepPhase); and the buckets,
/// from launch to completion (see BucketReport::completed). Buckets in flight at one time have lanes of their
/// own. The ranks of one host share a clock; the times of different hosts are compared by their wall clocks.
///
/// Collective after the last traced step, and after an epoch in which steps were traced but not the last one.
/// Rank 0 then writes the file atomically. If that fails, rank 0 warns once and the training continues. If
/// `fit` ends before step `from`, no file is written, and the destructor of rank 0 warns. Every rank passes it
/// to `fit` with equal options. Refers to the communicator.
template <Communicator C>
class Trace {
 public:
  /// Throws UsageError unless 0 <= from < to.
  Trace(C& comm, std::filesystem::path path, TraceOptions options = {})
      : comm_(comm), path_(std::move(path)), options_(options) {
    if (options.from < 0 || options.from >= options.to)
      throw UsageError(detail::formatted(
          "TraceOptions: the steps [{}, {}) are none: from must be 0 or more, and to greater", options.from,
          options.to));
  }

  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  /// Warns on rank 0 if no step of [from, to) was run, unless an exception is in flight. Not collective.
  ~Trace() {
    if (!last_ || first_ >= options_.to || !recorder_.empty() || comm_.rank() != 0 ||
        std::uncaught_exceptions() > thrown_)
      return;
    try {
      const Log log = detail::group_log(comm_.world());
      log.warning(
          "no trace '{}' was written: no step of [{}, {}) was run, the steps were {} to {}; set from and "
          "to in TraceOptions",
          path_.string(), options_.from, options_.to, first_, *last_);
    } catch (...) {  // the training may be unwinding
    }
  }

  /// Collective after the last traced step.
  void on_profile(const StepReport& report, const StepProfile& profile) {
    if (!last_) first_ = report.step;
    last_ = report.step;
    if (report.step < options_.from || report.step >= options_.to) return;
    recorder_.add(report, profile);
    if (report.step + 1 == options_.to) write("Trace::on_profile");
  }
  /// Collective if steps were traced since the file was written.
  void on_epoch(const EpochReport&) {
    if (recorder_.size() > written_) write("Trace::on_epoch");
  }

 private:
  void write(const char* call) {
    const detail::CallScope scope(call);
    written_ = recorder_.size();
    std::int64_t origin = recorder_.origin();
    for (const std::string& there : comm_.all_gather_bytes(std::to_string(origin)))
      origin = std::min<std::int64_t>(origin, std::stoll(there));
    const auto events = comm_.all_gather_bytes(recorder_.events(comm_.rank(), origin));
    if (comm_.rank() != 0) return;
    detail::write_or_warn(path_, detail::trace_file(events), detail::group_log(comm_.world()), warned_);
  }

  C& comm_;
  std::filesystem::path path_;
  TraceOptions options_;
  detail::TraceRecorder recorder_;
  std::size_t written_ = 0;
  std::int64_t first_ = 0;
  std::optional<std::int64_t> last_;  // the first and the last step that was run
  int thrown_ = std::uncaught_exceptions();
  bool warned_ = false;
};

}  // namespace lockstep::inline v0_1
