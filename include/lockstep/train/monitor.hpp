#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/own_error.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep {

/// Returns the value that EarlyStopping and BestCheckpoint compare, after each epoch: `report.loss`, or the
/// result of an evaluation. Called on every rank; it may call collectives. It returns the same value on every
/// rank, as Trainer::evaluate does.
using Monitor = std::function<double(const EpochReport&)>;

/// Whether a smaller or a larger value of a Monitor is better.
enum class MonitorMode { min, max };

/// The best value of a Monitor so far, and its zero-based epoch.
struct BestValue {
  /// std::nullopt before the first finite value.
  std::optional<double> value = std::nullopt;
  /// The zero-based epoch of `value`.
  std::int64_t epoch = 0;

  /// Returns whether `other` is better by more than `min_delta`. Any finite value is better than none. NaN
  /// and infinite values never are.
  [[nodiscard]] bool improved_by(double other, MonitorMode mode, double min_delta = 0) const;
};

}  // namespace lockstep

namespace lockstep::detail {

/// Throws UsageError, on every rank, unless `monitor` has a function.
void require_monitor(const Monitor& monitor, const std::string& owner);

/// Writes and reads the fields of a BestValue, and the mode, which must not change. `owner` is part of the
/// keys, so that a checkpoint's parts are not mixed up.
void save_best(torch::serialize::OutputArchive& archive, const std::string& owner, const BestValue& best,
               MonitorMode mode);
BestValue load_best(torch::serialize::InputArchive& archive, const std::string& owner, MonitorMode mode);

/// Returns the logger of a group: that of its rank 0, whichever rank of the world it is.
template <class C>
Log log_of(const C& comm) {
  return comm.rank() == 0 && comm.world().rank() != 0 ? comm.world().log.all() : comm.world().log;
}

/// Calls the Monitor of `owner` and returns its value. Compares the value, the best value and `deciding`, the
/// options and the state, over the ranks, so that all ranks decide alike; the exchange is of `call`.
/// Collective. Throws the same MismatchError on every rank if one of them differs. Warns if the value is not
/// finite.
template <Communicator C>
double monitored_value(const Monitor& monitor, const std::string& owner, const char* call,
                       const EpochReport& report, const BestValue& best, const NamedValues& deciding,
                       C& comm) {
  const double value = monitor(report);
  const CallScope scope(call);  // the monitor may call collectives of its own
  // All NaNs are equal, whatever their bits.
  NamedValues values{{"the value", std::isnan(value) ? "nan" : detail::formatted("{}", value)},
                     {"the best value", best.value ? detail::formatted("{}", *best.value) : "none"}};
  values.insert(values.end(), deciding.begin(), deciding.end());
  require_equal(
      comm, values,
      detail::formatted("what {} monitors differs between the ranks after epoch {}", owner, report.epoch),
      "monitor the result of Trainer::evaluate, or a value that is reduced over the ranks, with "
      "equal options on every rank");
  if (!std::isfinite(value))
    log_of(comm).warning("{}: the monitored value of epoch {} is {}, which counts as no improvement", owner,
                         report.epoch, value);
  return value;
}

inline std::string text_of(MonitorMode mode) {
  return mode == MonitorMode::min ? "min" : "max";
}

}  // namespace lockstep::detail

namespace lockstep {

/// A callback of `fit` that stops it when a value has not improved for `patience` epochs: on every rank after
/// the same epoch. Throws UsageError before the first epoch for an invalid option, MismatchError if the ranks
/// monitor different values.
///
/// ```cpp
/// double accuracy = 0;
/// lockstep::OnEpoch measure{[&](const auto&) { accuracy = trainer.evaluate(test, lockstep::Accuracy{}); }};
/// lockstep::EarlyStopping stopping{.monitor = [&](const auto&) { return accuracy; },
///                                  .patience = 5,
///                                  .mode = lockstep::MonitorMode::max};
/// trainer.fit(data, loss, measure, stopping);
/// ```
///
/// To survive a checkpoint, pass it to save_checkpoint and load_checkpoint as a part, and to `fit` before the
/// callback that saves. Once it has stopped a run, it stops each further `fit`, also after load_checkpoint,
/// before its first epoch; `stopping.state = {}` starts afresh.
///
/// Counterpart: lightning.pytorch.callbacks.EarlyStopping, with its defaults. A value that is not finite is
/// no improvement; Lightning stops at once.
struct EarlyStopping {
  Monitor monitor;
  /// Number of epochs without an improvement after which `fit` stops. 0 means the same as 1.
  std::int64_t patience = 3;
  /// An improvement is better than the best value by more than this.
  double min_delta = 0;
  MonitorMode mode = MonitorMode::min;

  /// The state that a checkpoint stores.
  struct State {
    /// The best value so far.
    BestValue best = {};
    /// Number of epochs since the best value.
    std::int64_t wait_count = 0;
    /// True once it has stopped a run.
    bool stopped = false;
  };
  State state = {};

  /// Returns FitAction::stop if the run has been stopped. Called by `fit`. Throws UsageError for an invalid
  /// option.
  template <Communicator C>
  FitAction on_epoch_start(const EpochPlan& plan, C& comm) const {
    check_options();
    if (!state.stopped) return FitAction::proceed;
    detail::log_of(comm).info("EarlyStopping has stopped this run before epoch {}", plan.epoch);
    return FitAction::stop;
  }

  /// Compares the monitor's value with the best one, and returns FitAction::stop after `patience` epochs
  /// without an improvement. Called by `fit`. Collective. Throws MismatchError if the ranks' values differ.
  template <Communicator C>
  FitAction on_epoch(const EpochReport& report, C& comm) {
    const double value =
        detail::monitored_value(monitor, "EarlyStopping", "EarlyStopping::on_epoch", report, state.best,
                                {{"mode", detail::text_of(mode)},
                                 {"min_delta", detail::formatted("{}", min_delta)},
                                 {"patience", std::to_string(patience)},
                                 {"wait_count", std::to_string(state.wait_count)}},
                                comm);
    if (state.best.improved_by(value, mode, min_delta)) {
      state = {{value, report.epoch}, 0, false};
      return FitAction::proceed;
    }
    if (++state.wait_count < patience) return FitAction::proceed;
    state.stopped = true;
    if (state.best.value)
      detail::log_of(comm).info(
          "EarlyStopping stops after epoch {}: no improvement for {} epochs on {}, the value of epoch {}",
          report.epoch, state.wait_count, *state.best.value, state.best.epoch);
    else
      detail::log_of(comm).info("EarlyStopping stops after epoch {}: no value of {} epochs was finite",
                                report.epoch, state.wait_count);
    return FitAction::stop;
  }

  void save(torch::serialize::OutputArchive& archive) const;
  /// Throws CheckpointError if the archive is of another `mode` or of no EarlyStopping.
  void load(torch::serialize::InputArchive& archive);

 private:
  void check_options() const;
};

/// A callback of `fit` that calls `write` after each epoch whose value is the best so far, on every rank.
///
/// ```cpp
/// lockstep::BestCheckpoint best{.monitor = [&](const auto&) { return accuracy; },
///                               .write = [&] { trainer.save("best.pt"); },
///                               .mode = lockstep::MonitorMode::max};
/// trainer.fit(data, loss, measure, best);
/// ```
///
/// `write` saves the model by `Trainer::save`, or the run by `Trainer::save_checkpoint`: rank 0 writes the
/// file atomically. If `write` throws, the best value stays that of the previous file. To
/// survive a checkpoint, pass it to save_checkpoint and load_checkpoint as a part, and to `fit` before the
/// callback that saves. Throws UsageError before the first epoch if a function is missing, MismatchError if
/// the ranks monitor different values.
///
/// Counterpart: lightning.pytorch.callbacks.ModelCheckpoint with save_top_k=1.
struct BestCheckpoint {
  Monitor monitor;
  std::function<void()> write;
  MonitorMode mode = MonitorMode::min;

  /// The best value so far, which a checkpoint holds.
  BestValue best = {};

  /// Throws UsageError if a function is missing. Called by `fit`.
  void on_epoch_start(const EpochPlan&) const { check_options(); }

  /// Calls `write` if the monitor's value is the best so far. Called by `fit`. Collective. Throws
  /// MismatchError if the ranks' values differ.
  template <Communicator C>
  void on_epoch(const EpochReport& report, C& comm) {
    const double value = detail::monitored_value(monitor, "BestCheckpoint", "BestCheckpoint::on_epoch",
                                                 report, best, {{"mode", detail::text_of(mode)}}, comm);
    if (!best.improved_by(value, mode)) return;
    const BestValue before = best;
    best = {value, report.epoch};  // a checkpoint that `write` saves holds it
    try {
      write();
    } catch (...) {
      best = before;
      throw;
    }
  }

  void save(torch::serialize::OutputArchive& archive) const;
  /// Throws CheckpointError if the archive is of another `mode` or of no BestCheckpoint.
  void load(torch::serialize::InputArchive& archive);

 private:
  void check_options() const;
};

}  // namespace lockstep

#ifndef LOCKSTEP_COMPILED
#include "lockstep/train/detail/monitor-inl.hpp"
#endif
