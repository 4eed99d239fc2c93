#pragma once

#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/extras.hpp"

namespace lockstep::inline v0_1 {

/// Returns the value that EarlyStopping and BestCheckpoint compare, after each epoch: `report.loss`, or the
/// result of an evaluation. Called on every rank, and returns the same value; it may call collectives.
using Monitor = std::function<double(const EpochReport&)>;

/// Whether a smaller or a larger value of a Monitor is better.
enum class MonitorMode { min, max };

namespace detail {

/// The best value of a Monitor so far, std::nullopt before the first finite one, and its zero-based epoch.
struct BestValue {
  std::optional<double> value = std::nullopt;
  std::int64_t epoch = 0;

  /// Returns whether `other` is better by more than `min_delta`. Any finite value is better than none. NaN
  /// and infinite values never are.
  [[nodiscard]] bool improved_by(double other, MonitorMode mode, double min_delta = 0) const {
    if (!std::isfinite(other)) return false;
    if (!value) return true;
    return mode == MonitorMode::min ? other + min_delta < *value : other - min_delta > *value;
  }
};

}  // namespace detail

namespace detail {
inline const char* text_of(MonitorMode mode) {
  return mode == MonitorMode::min ? "min" : "max";
}

/// Throws UsageError unless `monitor` has a function.
inline void require_monitor(const Monitor& monitor, const std::string& owner) {
  if (!monitor)
    throw UsageError(formatted(
        "{} has no monitor: give it a function of the EpochReport that returns the value to compare", owner));
}

/// Writes and reads the fields of a BestValue, and the mode, which must not change. `owner` is part of the
/// keys, so that a checkpoint's parts are not mixed up.
inline void save_best(torch::serialize::OutputArchive& archive, const std::string& owner,
                      const BestValue& best, MonitorMode mode) {
  archive.write(owner + "_max", c10::IValue(static_cast<std::int64_t>(mode == MonitorMode::max)));
  archive.write(owner + "_known", c10::IValue(static_cast<std::int64_t>(best.value.has_value())));
  archive.write(owner + "_value", c10::IValue(best.value.value_or(0)));
  archive.write(owner + "_epoch", c10::IValue(best.epoch));
}
inline BestValue load_best(torch::serialize::InputArchive& archive, const std::string& owner,
                           MonitorMode mode) {
  const MonitorMode saved = read_integer(archive, owner + "_max") != 0 ? MonitorMode::max : MonitorMode::min;
  if (saved != mode)
    throw CheckpointError(formatted("the saved {} has the mode {} and this one {}: give it the mode {}",
                                    owner, text_of(saved), text_of(mode), text_of(saved)));
  BestValue best{.epoch = read_integer(archive, owner + "_epoch")};
  const double value = read_number(archive, owner + "_value");
  if (read_integer(archive, owner + "_known") != 0) best.value = value;
  return best;
}

/// Returns the logger of a group: that of its rank 0, whichever rank of the world it is.
template <class C>
Log log_of(const C& comm) {
  return comm.rank() == 0 && comm.world().rank() != 0 ? comm.world().log.all() : comm.world().log;
}

/// Calls the Monitor of `owner` and returns its value. Compares the value, the best value and `deciding`, the
/// options and the state, over the ranks, so that all ranks decide alike. Collective. Throws MismatchError.
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
      detail::formatted("what {} monitors differs between the ranks after epoch {}", owner, report.epoch + 1),
      "monitor the result of Trainer::evaluate, or a value that is reduced over the ranks, with "
      "equal options on every rank");
  if (!std::isfinite(value))
    log_of(comm).warning("{}: the monitored value of epoch {} is {}, which counts as no improvement", owner,
                         report.epoch + 1, value);
  return value;
}
}  // namespace detail

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
/// callback that saves. Once it has stopped a run, it stops each further `fit` before its first epoch;
/// `stopping.state = {}` starts afresh.
/// Counterpart: lightning.pytorch.callbacks.EarlyStopping. A value that is not finite is no improvement.
struct EarlyStopping {
  Monitor monitor;
  /// Epochs without an improvement after which `fit` stops.
  std::int64_t patience = 3;
  /// An improvement is better than the best value by more than this.
  double min_delta = 0;
  MonitorMode mode = MonitorMode::min;

  /// The state that a checkpoint stores.
  struct State {
    detail::BestValue best = {};  ///< So far.
    std::int64_t wait_count = 0;  ///< Epochs since the best value.
    bool stopped = false;         ///< Whether it has ended a `fit`.
  };
  State state = {};

  template <Communicator C>
  FitAction on_epoch_start(const EpochPlan& plan, C& comm) const {
    detail::require_monitor(monitor, "EarlyStopping");
    if (patience < 0)
      throw UsageError(
          detail::formatted("EarlyStopping: a patience of {}: give a number of epochs, 0 or more", patience));
    if (!(min_delta >= 0))
      throw UsageError(
          detail::formatted("EarlyStopping: a min_delta of {}: give a number, 0 or more", min_delta));
    if (!state.stopped) return FitAction::proceed;
    detail::log_of(comm).info("EarlyStopping has stopped this run before epoch {}", plan.epoch + 1);
    return FitAction::stop;
  }

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
          report.epoch + 1, state.wait_count, *state.best.value, state.best.epoch + 1);
    else
      detail::log_of(comm).info("EarlyStopping stops after epoch {}: no value of {} epochs was finite",
                                report.epoch + 1, state.wait_count);
    return FitAction::stop;
  }

  void save(torch::serialize::OutputArchive& archive) const {
    detail::save_best(archive, "EarlyStopping", state.best, mode);
    archive.write("wait_count", c10::IValue(state.wait_count));
    archive.write("stopped", c10::IValue(static_cast<std::int64_t>(state.stopped)));
  }
  /// Throws CheckpointError if the archive is of another `mode` or of no EarlyStopping.
  void load(torch::serialize::InputArchive& archive) {
    state = {detail::load_best(archive, "EarlyStopping", mode), detail::read_length(archive, "wait_count"),
             detail::read_integer(archive, "stopped") != 0};
  }
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
/// If `write` throws, the best value stays that of the previous file. To survive a checkpoint, pass it to
/// save_checkpoint and load_checkpoint as a part, and to `fit` before the callback that saves. Throws UsageError
/// before the first epoch if a function is missing, MismatchError if the ranks monitor different values.
///
/// Counterpart: lightning.pytorch.callbacks.ModelCheckpoint with save_top_k=1.
struct BestCheckpoint {
  Monitor monitor;
  std::function<void()> write;
  MonitorMode mode = MonitorMode::min;
  detail::BestValue best = {};  ///< So far; saved and loaded with a checkpoint.

  void on_epoch_start(const EpochPlan&) const {
    detail::require_monitor(monitor, "BestCheckpoint");
    if (!write)
      throw UsageError(
          "BestCheckpoint has no write: give it a function that calls Trainer::save or save_checkpoint");
  }

  template <Communicator C>
  void on_epoch(const EpochReport& report, C& comm) {
    const double value = detail::monitored_value(monitor, "BestCheckpoint", "BestCheckpoint::on_epoch",
                                                 report, best, {{"mode", detail::text_of(mode)}}, comm);
    if (!best.improved_by(value, mode)) return;
    const detail::BestValue before = best;
    best = {value, report.epoch};  // a checkpoint that `write` saves holds it
    try {
      write();
    } catch (...) {
      best = before;
      throw;
    }
  }

  void save(torch::serialize::OutputArchive& archive) const {
    detail::save_best(archive, "BestCheckpoint", best, mode);
  }
  /// Throws CheckpointError if the archive is of another `mode` or of no BestCheckpoint.
  void load(torch::serialize::InputArchive& archive) {
    best = detail::load_best(archive, "BestCheckpoint", mode);
  }
};

}  // namespace lockstep::inline v0_1
