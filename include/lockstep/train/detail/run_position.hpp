#pragma once

#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "lockstep/train/detail/archive.hpp"

namespace lockstep::detail {

/// A trainer's position. Epochs and steps are counted over the trainer's whole life.
struct RunPosition {
  std::int64_t epoch = 0, step = 0;
  /// Completed steps of the current epoch.
  std::int64_t step_in_epoch = 0;
  /// Steps of the current epoch that the precision skipped.
  std::int64_t skipped = 0;
  /// Epoch and step at which the running `fit` began; its length is counted from there.
  std::int64_t first_epoch = 0, first_step = 0;
  bool fitting = false;
  /// Samples per rank and micro-batch, and micro-batches per step.
  std::int64_t batch_size = 0, accumulate = 0;
  /// Learning rates of the optimizer's groups before any schedule; empty without a schedule.
  std::vector<double> rates;

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("epoch", c10::IValue(epoch));
    archive.write("step", c10::IValue(step));
    archive.write("step_in_epoch", c10::IValue(step_in_epoch));
    archive.write("skipped", c10::IValue(skipped));
    archive.write("first_epoch", c10::IValue(first_epoch));
    archive.write("first_step", c10::IValue(first_step));
    archive.write("fitting", c10::IValue(static_cast<std::int64_t>(fitting)));
    archive.write("batch_size", c10::IValue(batch_size));
    archive.write("accumulate", c10::IValue(accumulate));
    archive.write("rates", c10::IValue(rates));
  }
  void load(torch::serialize::InputArchive& archive) {
    RunPosition read;
    read.epoch = read_integer(archive, "epoch");
    read.step = read_integer(archive, "step");
    read.step_in_epoch = read_integer(archive, "step_in_epoch");
    read.skipped = read_integer(archive, "skipped");
    read.first_epoch = read_integer(archive, "first_epoch");
    read.first_step = read_integer(archive, "first_step");
    read.fitting = read_integer(archive, "fitting") != 0;
    read.batch_size = read_integer(archive, "batch_size");
    read.accumulate = read_integer(archive, "accumulate");
    c10::IValue rates_then;
    if (!archive.try_read("rates", rates_then) || !rates_then.isDoubleList()) refuse_archive("rates");
    read.rates = rates_then.toDoubleVector();
    *this = read;
  }
};

/// Writes the data position of a running `fit`.
using SaveDataPosition = std::function<void(torch::serialize::OutputArchive&)>;

/// Marks a `fit` as running in a scope, and keeps its SaveDataPosition.
class Fitting {
 public:
  Fitting(RunPosition& position, SaveDataPosition& kept, SaveDataPosition save)
      : position_(position), kept_(kept) {
    position_.fitting = true;
    kept_ = std::move(save);
  }
  Fitting(const Fitting&) = delete;
  Fitting& operator=(const Fitting&) = delete;
  ~Fitting() {
    kept_ = nullptr;
    position_.fitting = false;
    position_.step_in_epoch = position_.skipped = 0;  // an abandoned epoch is restarted
  }

 private:
  RunPosition& position_;
  SaveDataPosition& kept_;
};

}  // namespace lockstep::detail
