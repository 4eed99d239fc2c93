#pragma once

#include "lockstep/detail/linkage.hpp"
#include "lockstep/train/detail/archive.hpp"
#include "lockstep/train/monitor.hpp"

namespace lockstep {

LOCKSTEP_INLINE bool BestValue::improved_by(double other, MonitorMode mode, double min_delta) const {
  if (!std::isfinite(other)) return false;
  if (!value) return true;
  return mode == MonitorMode::min ? other + min_delta < *value : other - min_delta > *value;
}

}  // namespace lockstep

namespace lockstep::detail {

LOCKSTEP_INLINE void require_monitor(const Monitor& monitor, const std::string& owner) {
  if (!monitor)
    throw CollectiveError<UsageError>(detail::formatted(
        "{} has no monitor: give it a function of the EpochReport that returns the value to compare", owner));
}

LOCKSTEP_INLINE void save_best(torch::serialize::OutputArchive& archive, const std::string& owner,
                               const BestValue& best, MonitorMode mode) {
  archive.write(owner + "_max", c10::IValue(static_cast<std::int64_t>(mode == MonitorMode::max)));
  archive.write(owner + "_known", c10::IValue(static_cast<std::int64_t>(best.value.has_value())));
  archive.write(owner + "_value", c10::IValue(best.value.value_or(0)));
  archive.write(owner + "_epoch", c10::IValue(best.epoch));
}

LOCKSTEP_INLINE BestValue load_best(torch::serialize::InputArchive& archive, const std::string& owner,
                                    MonitorMode mode) {
  const auto name_of = [](bool max) { return max ? "max" : "min"; };
  const bool max = read_integer(archive, owner + "_max") != 0;
  if (max != (mode == MonitorMode::max))
    throw CheckpointError(
        detail::formatted("the saved {} has the mode {} and this one {}: give it the mode {}", owner,
                          name_of(max), name_of(!max), name_of(max)));
  BestValue best;
  const double value = read_number(archive, owner + "_value");
  best.epoch = read_integer(archive, owner + "_epoch");
  if (read_integer(archive, owner + "_known") != 0) best.value = value;
  return best;
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE void EarlyStopping::check_options() const {
  detail::require_monitor(monitor, "EarlyStopping");
  if (patience < 0)
    throw detail::CollectiveError<UsageError>(
        detail::formatted("EarlyStopping: a patience of {}: give a number of epochs, 0 or more", patience));
  if (!(min_delta >= 0))
    throw detail::CollectiveError<UsageError>(
        detail::formatted("EarlyStopping: a min_delta of {}: give a number, 0 or more", min_delta));
}
LOCKSTEP_INLINE void EarlyStopping::save(torch::serialize::OutputArchive& archive) const {
  detail::save_best(archive, "EarlyStopping", state.best, mode);
  archive.write("wait_count", c10::IValue(state.wait_count));
  archive.write("stopped", c10::IValue(static_cast<std::int64_t>(state.stopped)));
}
LOCKSTEP_INLINE void EarlyStopping::load(torch::serialize::InputArchive& archive) {
  const BestValue best = detail::load_best(archive, "EarlyStopping", mode);
  const std::int64_t wait_count = detail::read_length(archive, "wait_count");
  const bool stopped = detail::read_integer(archive, "stopped") != 0;
  state = {best, wait_count, stopped};
}

LOCKSTEP_INLINE void BestCheckpoint::check_options() const {
  detail::require_monitor(monitor, "BestCheckpoint");
  if (!write)
    throw detail::CollectiveError<UsageError>(
        "BestCheckpoint has no write: give it a function that calls Trainer::save or save_checkpoint");
}
LOCKSTEP_INLINE void BestCheckpoint::save(torch::serialize::OutputArchive& archive) const {
  detail::save_best(archive, "BestCheckpoint", best, mode);
}
LOCKSTEP_INLINE void BestCheckpoint::load(torch::serialize::InputArchive& archive) {
  best = detail::load_best(archive, "BestCheckpoint", mode);
}

}  // namespace lockstep
