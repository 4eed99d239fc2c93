#include "lockstep/train/monitor.hpp"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "support/text_of.hpp"
#include "support/written.hpp"
#include "train/common_folder.hpp"
#include "train/nets.hpp"

namespace monitor_ranks_test {

namespace {

namespace fs = std::filesystem;
using lockstep::FitAction;
const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();

auto make_trainer(std::int64_t epochs) {
  return std::make_unique<lockstep::Trainer<TinyNet>>(
      test_world(),
      lockstep::TrainerOptions{.epochs = epochs, .batch_size = 4, .lr = 0.05, .seed = 3, .progress = false});
}
lockstep::TensorDataset samples() {
  return three_classes(test_world().size() * 8);  // two steps an epoch
}
// A monitor of one value for each epoch.
lockstep::Monitor scripted(std::vector<double> values) {
  return [values](const lockstep::EpochReport& report) {
    return values.at(static_cast<std::size_t>(report.epoch));
  };
}
void says(const std::string& text, const std::string& words) {
  CHECK_THAT(text, ContainsSubstring(words));
}
// `work` throws one error with these words on every rank.
template <class Error, class Work>
void refuses(lockstep::CpuComm& comm, Work&& work, const std::string& words) {
  const std::string text = text_of<Error>(work);
  says(text, words);
  for (const auto& other : comm.all_gather_bytes(text)) CHECK(other == text);
}

// A stream that does not end.
struct Endless {
  std::optional<lockstep::Example> next() {
    const auto data = three_classes(4);
    return lockstep::Example{data.data(), data.target()};
  }
};

}  // namespace

TEST_CASE("a callback that stops on one rank stops fit on every rank") {
  const auto& world = test_world();
  const bool culprit = world.rank() == world.size() - 1;
  const auto data = samples();
  SECTION("after a step, which ends the epoch") {
    auto trainer = make_trainer(4);
    std::vector<std::int64_t> epochs, after;
    const auto report =
        trainer->fit(data, cross_entropy_of, lockstep::OnStep{[&](const lockstep::StepReport& step) {
                       return culprit && step.step == 2 ? FitAction::stop : FitAction::proceed;
                     }},
                     lockstep::OnStep{[&](const auto& step) { after.push_back(step.step); }},
                     lockstep::OnEpoch{[&](const auto& epoch) { epochs.push_back(epoch.epoch); }});
    CHECK(report.epoch == 1);
    CHECK(report.step == 3);
    CHECK(std::isfinite(report.loss));
    CHECK(after == std::vector<std::int64_t>{0, 1, 2});
    CHECK(epochs == std::vector<std::int64_t>{0, 1});
    CHECK(trainer->epoch() == 2);
    CHECK(lockstep::any_rank(trainer->comm(), culprit));
    CHECK(!lockstep::any_rank(trainer->comm(), false));
    // The next call starts the next epoch.
    CHECK(trainer->fit(data, cross_entropy_of).step == 3 + 4 * 2);
    CHECK(trainer->epoch() == 6);
  }
  SECTION("of a stream that does not end") {
    auto trainer = make_trainer(1);
    Endless stream;
    const auto report =
        trainer->fit(stream, cross_entropy_of, lockstep::OnStep{[&](const lockstep::StepReport& step) {
                       return culprit && step.step == 2 ? FitAction::stop : FitAction::proceed;
                     }});
    CHECK(report.step == 3);
    CHECK(std::isfinite(report.loss));
  }
  SECTION("after an epoch, or before one") {
    auto trainer = make_trainer(4);
    CHECK(trainer
              ->fit(data, cross_entropy_of, lockstep::OnEpoch{[&](const lockstep::EpochReport& epoch) {
                      return culprit && epoch.epoch == 1 ? FitAction::stop : FitAction::proceed;
                    }})
              .epoch == 1);
    CHECK(trainer->epoch() == 2);
    CHECK(trainer
              ->fit(data, cross_entropy_of, lockstep::OnEpochStart{[&](const lockstep::EpochPlan& plan) {
                      return culprit && plan.epoch == 3 ? FitAction::stop : FitAction::proceed;
                    }})
              .epoch == 2);
    CHECK(trainer->epoch() == 3);
    CHECK(trainer->step() == 6);
  }
}

TEST_CASE("EarlyStopping stops after `patience` epochs without an improvement") {
  const auto stopped_after = [&](lockstep::EarlyStopping stopping) {
    auto trainer = make_trainer(8);
    trainer->fit(samples(), cross_entropy_of, stopping);
    return std::tuple(trainer->epoch(), stopping.state.best.value, stopping.state.best.epoch);
  };
  using Result = std::tuple<std::int64_t, std::optional<double>, std::int64_t>;
  std::string said, warned;
  Result result;
  warned = written(2, [&] {
    said = written(1, [&] {
      result = stopped_after({.monitor = scripted({3, 2, nan, 2, 1, infinity, 1, 1})});
    });
  });
  CHECK(result == Result{8, 1.0, 4});
  if (test_world().rank() == 0) {
    says(said, "EarlyStopping stops after epoch 8: no improvement for 3 epochs on 1, the value of epoch 5");
    says(warned, "EarlyStopping: the monitored value of epoch 3 is nan");
    says(warned, "EarlyStopping: the monitored value of epoch 6 is inf");
  } else {
    CHECK(said + warned == "");
  }
  CHECK(stopped_after({.monitor = scripted({1, 0.95, 0.9, 0.8}), .patience = 2, .min_delta = 0.1}) ==
        Result{3, 1.0, 0});
  CHECK(stopped_after(
            {.monitor = scripted({1, 2, 3, 2.5, 2.5}), .patience = 2, .mode = lockstep::MonitorMode::max}) ==
        Result{5, 3.0, 2});
  CHECK(stopped_after({.monitor = scripted({nan, nan}), .patience = 2}) == Result{2, std::nullopt, 0});
  CHECK(stopped_after({.monitor = scripted({1, 0, 0}), .patience = 0}) == Result{3, 0.0, 1});
}

TEST_CASE("ranks that monitor different values are an error that names them on every rank") {
  const auto& world = test_world();
  CommonFolder folder(test_world());
  auto trainer = make_trainer(2);
  const lockstep::Monitor own = [&](const auto&) { return world.rank() == world.size() - 1 ? 0.5 : 0.25; };
  lockstep::EarlyStopping stopping{.monitor = own};
  lockstep::BestCheckpoint best{.monitor = own, .write = [&] { trainer->save(folder / "best.pt"); }};
  if (world.size() == 1) {
    CHECK_NOTHROW(trainer->fit(samples(), cross_entropy_of, stopping, best));
    return;
  }
  const auto refused = [&](auto& callback, const std::string& words) {
    refuses<lockstep::MismatchError>(
        folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, callback); }, words);
  };
  refused(stopping,
          "what EarlyStopping monitors differs between the ranks after epoch 1: the value is 0.25 on rank");
  refused(best, fmt::format("and 0.5 on rank {}", world.size() - 1));
  lockstep::EarlyStopping impatient{.monitor = scripted({1, 1, 1}), .patience = 2 + world.rank()};
  refused(impatient, "patience is 2 on rank 0");
  CHECK(!folder.has("best.pt"));
  // The trainer is usable.
  CHECK(std::isfinite(trainer->fit(samples(), cross_entropy_of).loss));
}

TEST_CASE("options of callbacks that make no sense are refused before the first epoch") {
  auto trainer = make_trainer(1);
  CommonFolder folder(test_world());
  const auto refused = [&](auto callback, const char* words) {
    refuses<lockstep::UsageError>(
        folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, callback); }, words);
  };
  const auto monitor = scripted({1});
  refused(lockstep::EarlyStopping{.monitor = {}}, "has no monitor");
  refused(lockstep::EarlyStopping{.monitor = monitor, .patience = -1}, "a patience of -1");
  refused(lockstep::EarlyStopping{.monitor = monitor, .min_delta = nan}, "a min_delta of nan");
  refused(lockstep::BestCheckpoint{.monitor = monitor, .write = {}}, "BestCheckpoint has no write");
  CHECK(trainer->step() == 0);
}

TEST_CASE("a monitor that one rank does not have ends fit on every rank", "[2+]") {
  auto trainer = make_trainer(1);
  lockstep::EarlyStopping stopping{.monitor = scripted({1})};
  if (test_world().rank() == 1) stopping.monitor = nullptr;
  try {
    trainer->fit(samples(), cross_entropy_of, stopping);
    FAIL("it has not thrown");
  } catch (const lockstep::UsageError&) {
    CHECK(test_world().rank() == 1);
  } catch (const lockstep::CommunicationError&) {
    CHECK(test_world().rank() != 1);
  }
}

TEST_CASE("BestCheckpoint writes the model of the best epoch") {
  CommonFolder folder(test_world());
  auto trainer = make_trainer(6);
  std::vector<std::string> models;
  std::vector<std::int64_t> written_in;
  lockstep::BestCheckpoint best{.monitor = scripted({nan, 3, 2, nan, 1, 5}), .write = [&] {
                                  trainer->save(folder / "best.pt");
                                  written_in.push_back(trainer->epoch() - 1);
                                }};
  auto keep_model =
      lockstep::OnEpoch{[&](const auto&) { models.push_back(parameter_bytes(*trainer->model())); }};
  const std::string warned = written(2, [&] { trainer->fit(samples(), cross_entropy_of, keep_model, best); });
  CHECK(written_in == std::vector<std::int64_t>{1, 2, 4});
  CHECK(best.best.value == 1.0);
  CHECK(best.best.epoch == 4);
  if (test_world().rank() == 0) says(warned, "BestCheckpoint: the monitored value of epoch 4 is nan");
  auto other = make_trainer(1);
  other->load(folder / "best.pt");
  CHECK(parameter_bytes(*other->model()) == models[4]);
  CHECK(models[4] != models[5]);

  // A file that cannot be written is an error on every rank, and no best one.
  lockstep::BestCheckpoint nowhere{.monitor = [](const auto&) { return 0.5; },
                                   .write = [&] { trainer->save("/nowhere/at/all/best.pt"); }};
  refuses<lockstep::CheckpointError>(
      folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, nowhere); }, "could not write");
  CHECK(!nowhere.best.value);
}

TEST_CASE("EarlyStopping and BestCheckpoint go on from a checkpoint as if nothing had been between") {
  CommonFolder folder(test_world());
  const std::vector<double> values{5, 4, 4.5, 4.2, 4.1, 9, 0, 0, 0, 0};
  struct Run {
    std::unique_ptr<lockstep::Trainer<TinyNet>> trainer = make_trainer(10);
    lockstep::EarlyStopping stopping;
    std::vector<std::int64_t> written_in = {};
    lockstep::BestCheckpoint best;
    Run(const std::vector<double>& script)
        : stopping{.monitor = scripted(script)}, best{.monitor = scripted(script), .write = [this] {
                                                        written_in.push_back(trainer->epoch() - 1);
                                                      }} {}
    Run(const Run&) = delete;
    void fit(const CommonFolder& folder) {
      trainer->fit(samples(), cross_entropy_of, stopping, best,
                   lockstep::OnEpoch{[&](const lockstep::EpochReport& report) {
                     trainer->save_checkpoint(folder / fmt::format("run-{}.ckpt", report.epoch + 1), stopping,
                                              best);
                   }});
    }
  };
  Run whole(values);
  whole.fit(folder);
  CHECK(whole.trainer->epoch() == 5);
  CHECK(whole.written_in == std::vector<std::int64_t>{0, 1});

  Run resumed(values);
  resumed.trainer->load_checkpoint(folder / "run-4.ckpt", resumed.stopping, resumed.best);
  CHECK(resumed.stopping.state.wait_count == 2);
  CHECK(resumed.best.best.value == 4.0);
  resumed.fit(folder);
  CHECK(resumed.trainer->epoch() == 5);
  CHECK(resumed.written_in.empty());
  CHECK(parameter_bytes(*resumed.trainer->model()) == parameter_bytes(*whole.trainer->model()));

  // The last checkpoint is of a run that has stopped.
  Run stopped(values);
  stopped.trainer->load_checkpoint(folder / "run-5.ckpt", stopped.stopping, stopped.best);
  stopped.fit(folder);
  CHECK(stopped.trainer->epoch() == 5);
  stopped.stopping.state = {};
  stopped.fit(folder);
  CHECK(stopped.trainer->epoch() == 10);

  // Parts in another order, or of another mode, are refused.
  const auto refused = [&](auto& first, auto& second, const char* words) {
    refuses<lockstep::CheckpointError>(
        folder.comm, [&] { stopped.trainer->load_checkpoint(folder / "run-9.ckpt", first, second); }, words);
  };
  refused(stopped.best, stopped.stopping, "BestCheckpoint");
  stopped.best.mode = lockstep::MonitorMode::max;
  refused(stopped.stopping, stopped.best, "the saved BestCheckpoint has the mode min and this one max");
}

}  // namespace monitor_ranks_test
