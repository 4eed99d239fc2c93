#include "lockstep/train/monitor.hpp"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/train/keep_last.hpp"
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
std::string bytes_of(const torch::nn::Module& module) {
  std::string bytes;
  for (const auto& tensor : module.parameters())
    bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  return bytes;
}
// A monitor of one value for each epoch.
lockstep::Monitor scripted(std::vector<double> values) {
  return [values](const lockstep::EpochReport& report) {
    return values.at(static_cast<std::size_t>(report.epoch));
  };
}
// The text of an error, which must be the same on every rank.
template <class Error, class Work>
std::string common_error(lockstep::GlooComm& comm, Work&& work) {
  const std::string text = text_of<Error>(work);
  for (const auto& other : comm.all_gather_bytes(text)) CHECK(other == text);
  return text;
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
    CHECK_THAT(said, ContainsSubstring("EarlyStopping stops after epoch 7: no improvement for 3 epochs on 1, "
                                       "the value of epoch 4"));
    CHECK_THAT(warned, ContainsSubstring("EarlyStopping: the monitored value of epoch 2 is nan"));
    CHECK_THAT(warned, ContainsSubstring("EarlyStopping: the monitored value of epoch 5 is inf"));
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
  const std::string text = common_error<lockstep::MismatchError>(
      folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, stopping); });
  const std::string other = common_error<lockstep::MismatchError>(
      folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, best); });
  if (world.size() == 1) {
    CHECK(text + other == "");
    return;
  }
  CHECK_THAT(text, ContainsSubstring("what EarlyStopping monitors differs between the ranks after epoch 0: "
                                     "the value is 0.25 on rank"));
  CHECK_THAT(text, ContainsSubstring(fmt::format("and 0.5 on rank {}", world.size() - 1)));
  CHECK_THAT(other, ContainsSubstring("what BestCheckpoint monitors differs"));
  lockstep::EarlyStopping impatient{.monitor = scripted({1, 1, 1}), .patience = 2 + world.rank()};
  CHECK_THAT(common_error<lockstep::MismatchError>(
                 folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, impatient); }),
             ContainsSubstring("patience is 2 on rank 0"));
  CHECK(!folder.has("best.pt"));
  // The trainer is usable.
  CHECK(std::isfinite(trainer->fit(samples(), cross_entropy_of).loss));
}

TEST_CASE("options of callbacks that make no sense are refused before the first epoch") {
  auto trainer = make_trainer(1);
  CommonFolder folder(test_world());
  const auto refused = [&](auto callback) {
    return common_error<lockstep::UsageError>(folder.comm,
                                              [&] { trainer->fit(samples(), cross_entropy_of, callback); });
  };
  const auto monitor = scripted({1});
  CHECK_THAT(refused(lockstep::EarlyStopping{.monitor = {}}), ContainsSubstring("has no monitor"));
  CHECK_THAT(refused(lockstep::EarlyStopping{.monitor = monitor, .patience = -1}),
             ContainsSubstring("a patience of -1"));
  CHECK_THAT(refused(lockstep::EarlyStopping{.monitor = monitor, .min_delta = nan}),
             ContainsSubstring("a min_delta of nan"));
  CHECK_THAT(refused(lockstep::BestCheckpoint{.monitor = monitor, .write = {}}),
             ContainsSubstring("BestCheckpoint has no write"));
  CHECK(trainer->step() == 0);
  const auto wrong = [](std::int64_t n, const char* pattern) {
    return text_of<lockstep::UsageError>([&] { lockstep::KeepLast(n, pattern, [](const auto&) {}); });
  };
  CHECK_THAT(wrong(0, "a-{}"), ContainsSubstring("n is 0"));
  for (const char* pattern : {"", "a", "a{}b{}", "{}/a", "{}/{}"})
    CHECK_THAT(wrong(1, pattern), ContainsSubstring("has one {}"));
  CHECK_THAT(text_of<lockstep::UsageError>([&] { lockstep::KeepLast(1, "a{}", nullptr); }),
             ContainsSubstring("has no write"));
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
  auto keep_model = lockstep::OnEpoch{[&](const auto&) { models.push_back(bytes_of(*trainer->model())); }};
  const std::string warned = written(2, [&] { trainer->fit(samples(), cross_entropy_of, keep_model, best); });
  CHECK(written_in == std::vector<std::int64_t>{1, 2, 4});
  CHECK(best.best.value == 1.0);
  CHECK(best.best.epoch == 4);
  if (test_world().rank() == 0)
    CHECK_THAT(warned, ContainsSubstring("BestCheckpoint: the monitored value of epoch 3 is nan"));
  auto other = make_trainer(1);
  other->load(folder / "best.pt");
  CHECK(bytes_of(*other->model()) == models[4]);
  CHECK(models[4] != models[5]);

  // A file that cannot be written is an error on every rank, and no best one.
  lockstep::BestCheckpoint nowhere{.monitor = [](const auto&) { return 0.5; },
                                   .write = [&] { trainer->save("/nowhere/at/all/best.pt"); }};
  CHECK_THAT(common_error<lockstep::CheckpointError>(
                 folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, nowhere); }),
             ContainsSubstring("could not write"));
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
    void fit(lockstep::KeepLast& keep) { trainer->fit(samples(), cross_entropy_of, stopping, best, keep); }
  };
  const auto keeping = [&](Run& run) {
    return lockstep::KeepLast(2, folder / "run-{}.ckpt", [&](const fs::path& path) {
      run.trainer->save_checkpoint(path, run.stopping, run.best);
    });
  };
  Run whole(values);
  auto keep_whole = keeping(whole);
  CHECK(!keep_whole.newest(folder.comm));
  whole.fit(keep_whole);
  CHECK(whole.trainer->epoch() == 5);
  CHECK(whole.written_in == std::vector<std::int64_t>{0, 1});
  CHECK(!folder.has("run-3.ckpt"));
  CHECK(keep_whole.newest(folder.comm) == folder / "run-5.ckpt");

  Run resumed(values);
  auto keep_resumed = keeping(resumed);
  resumed.trainer->load_checkpoint(folder / "run-4.ckpt", resumed.stopping, resumed.best);
  CHECK(resumed.stopping.state.wait_count == 2);
  CHECK(resumed.best.best.value == 4.0);
  resumed.fit(keep_resumed);
  CHECK(resumed.trainer->epoch() == 5);
  CHECK(resumed.written_in.empty());
  CHECK(bytes_of(*resumed.trainer->model()) == bytes_of(*whole.trainer->model()));

  // The last checkpoint is of a run that has stopped.
  Run stopped(values);
  auto keep_stopped = keeping(stopped);
  stopped.trainer->load_checkpoint(keep_stopped.newest(folder.comm).value(), stopped.stopping, stopped.best);
  stopped.fit(keep_stopped);
  CHECK(stopped.trainer->epoch() == 5);
  stopped.stopping.state = {};
  stopped.fit(keep_stopped);
  CHECK(stopped.trainer->epoch() == 10);

  // Parts in another order, or of another mode, are refused.
  CHECK_THAT(
      common_error<lockstep::CheckpointError>(
          folder.comm,
          [&] { stopped.trainer->load_checkpoint(folder / "run-9.ckpt", stopped.best, stopped.stopping); }),
      ContainsSubstring("BestCheckpoint"));
  stopped.best.mode = lockstep::MonitorMode::max;
  CHECK_THAT(
      common_error<lockstep::CheckpointError>(
          folder.comm,
          [&] { stopped.trainer->load_checkpoint(folder / "run-9.ckpt", stopped.stopping, stopped.best); }),
      ContainsSubstring("the saved BestCheckpoint has the mode min and this one max"));
}

TEST_CASE("KeepLast removes a checkpoint only after a newer one is whole, and nothing else") {
  CommonFolder folder(test_world());
  auto trainer = make_trainer(5);
  const bool first = folder.comm.rank() == 0;
  const std::vector<std::string> foreign{"run-x.ckpt", "run-07.ckpt", "run-1.ckpt.old", "arun-1.ckpt",
                                         "run-.ckpt"};
  if (first)
    for (const auto& name : foreign) std::ofstream(folder / name) << "mine";
  std::int64_t failing = 4;
  lockstep::KeepLast keep(2, folder / "run-{}.ckpt", [&](const fs::path& path) {
    if (trainer->epoch() == 4) {
      CHECK(folder.has("run-2.ckpt"));
      CHECK(folder.has("run-3.ckpt"));
    }
    trainer->save_checkpoint(trainer->epoch() == failing ? "/nowhere/at/all" : path);
  });
  CHECK_THAT(common_error<lockstep::CheckpointError>(
                 folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, keep); }),
             ContainsSubstring("could not write"));
  CHECK(!folder.has("run-1.ckpt"));
  CHECK(folder.has("run-2.ckpt"));
  CHECK(folder.has("run-3.ckpt"));
  CHECK(keep.newest(folder.comm) == folder / "run-3.ckpt");

  failing = 0;
  auto resumed = make_trainer(5);
  trainer.swap(resumed);
  trainer->load_checkpoint(folder / "run-3.ckpt");
  trainer->fit(samples(), cross_entropy_of, keep);
  CHECK(trainer->epoch() == 5);
  for (const int epochs : {2, 3}) CHECK(!folder.has(fmt::format("run-{}.ckpt", epochs)));
  for (const int epochs : {4, 5}) CHECK(folder.has(fmt::format("run-{}.ckpt", epochs)));
  for (const auto& name : foreign) CHECK(folder.has(name));
  CHECK(keep.newest(folder.comm) == folder / "run-5.ckpt");

  // The folder is created, and one that cannot be is an error before an epoch is trained.
  const auto kept_in = [&](const fs::path& there) {
    return lockstep::KeepLast(1, there / "run-{}.ckpt",
                              [&](const fs::path& path) { trainer->save_checkpoint(path); });
  };
  trainer = make_trainer(1);
  auto created = kept_in(folder / "runs" / "one");
  trainer->fit(samples(), cross_entropy_of, created);
  CHECK(created.newest(folder.comm) == folder / "runs" / "one" / "run-1.ckpt");
  trainer = make_trainer(1);
  auto in_the_way = kept_in(folder / "run-5.ckpt" / "runs");
  CHECK_THAT(common_error<lockstep::UsageError>(
                 folder.comm, [&] { trainer->fit(samples(), cross_entropy_of, in_the_way); }),
             ContainsSubstring("KeepLast: cannot save to '") &&
                 ContainsSubstring("run-1.ckpt': Not a directory; give a path in a folder"));
  CHECK(trainer->step() == 0);

  // A checkpoint that cannot be removed is a warning. This one is a folder with a file in it.
  if (first) {
    fs::remove(folder / "run-4.ckpt");
    fs::create_directories(folder / "run-4.ckpt" / "full");
  }
  lockstep::KeepLast one(1, folder / "run-{}.ckpt", [](const auto&) {});
  lockstep::EpochReport report{};
  report.epoch = 4;
  const std::string warned = written(2, [&] { one.on_epoch(report, folder.comm); });
  if (first) CHECK_THAT(warned, ContainsSubstring("run-4.ckpt' cannot be removed: Directory not empty"));
  folder.comm.barrier();
}

}  // namespace monitor_ranks_test
