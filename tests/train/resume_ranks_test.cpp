// A run that goes on from a checkpoint of any of its callbacks ends as one that never stopped: its model, and what is reported
// of each epoch.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/precision/precision.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "train/common_folder.hpp"
#include "train/nets.hpp"

namespace resume_ranks_test {

// Without batch normalization, which refuses a batch of one sample.
struct DropNetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::dropout(torch::relu(hidden(x)), 0.2, is_training()));
  }
  torch::nn::Linear hidden = register_module("hidden", torch::nn::Linear(6, 8)),
                    last = register_module("last", torch::nn::Linear(8, 3));
};
TORCH_MODULE(DropNet);

// Where a checkpoint was saved: the callback, and its epoch or step.
using Place = std::pair<std::string, std::int64_t>;
// Loss, step and skipped steps of an epoch.
using Reported = std::map<std::int64_t, std::tuple<double, std::int64_t, std::int64_t>>;
struct Ended {
  std::string model;
  std::int64_t epoch = 0, step = 0;
  Reported reports = {};
};

// Batches that are read again in each epoch.
struct Batches {
  explicit Batches(int own) : rank(own) { set_epoch(0); }
  void set_epoch(std::size_t epoch) {
    data = three_classes(10, 100 * epoch + static_cast<std::uint64_t>(rank));
    at = 0;
  }
  std::optional<lockstep::Example> next() {
    if (at == 5) return std::nullopt;
    const std::size_t first = 2 * at++;
    return lockstep::Example{
        data.data().slice(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(first + 2)),
        data.target().slice(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(first + 2))};
  }
  int rank;
  std::size_t at = 0;
  lockstep::TensorDataset data = three_classes(1);
};

// Trains, and saves a checkpoint in each callback; then a new trainer goes on from each of these.
template <class Make, class Data>
void check_all_places(const Make& make, const Data& data, std::int64_t frozen_from = 99) {
  const auto& world = test_world();
  const CommonFolder folder(world);
  std::vector<Place> places;
  const auto path_of = [&](const Place& place) {
    return folder / (place.first + std::to_string(place.second));
  };
  const auto run = [&](const Place* from) {
    Ended ended;
    auto trainer = make();
    if (from) trainer->load_checkpoint(path_of(*from));
    const auto save = [&](const Place& place) {
      if (from) {  // a checkpoint of the same place is the same: its first callback is that of the resumed epoch
        trainer->save_checkpoint(folder / "again");
        return;
      }
      trainer->save_checkpoint(path_of(place));
      places.push_back(place);
    };
    auto given = data();
    trainer->fit(given, cross_entropy_of, lockstep::OnEpochStart{[&](const auto& plan) {
                   save({"start", plan.epoch});
                   if (from && plan.resumed) trainer->save_checkpoint(path_of({"resumed", plan.epoch}));
                 }},
                 lockstep::OnStep{[&](const auto& step) {
                   save({"step", step.step});
                 }},
                 lockstep::OnEpoch{[&](const auto& done) {
                   ended.reports[done.epoch] = {done.loss, done.step, done.skipped};
                   if (done.epoch + 1 == frozen_from)
                     for (auto& parameter : trainer->model()->hidden->parameters())
                       parameter.requires_grad_(false);
                   save({"end", done.epoch});
                 }});
    ended.model = parameter_bytes(*trainer->model());
    ended.epoch = trainer->epoch();
    ended.step = trainer->step();
    return ended;
  };
  const Ended whole = run(nullptr);
  for (const Place& place : places) {
    CAPTURE(place.first, place.second);
    const auto check = [&](const Place& from) {
      const Ended resumed = run(&from);
      CHECK(resumed.model == whole.model);
      CHECK(resumed.epoch == whole.epoch);
      CHECK(resumed.step == whole.step);
      if (place.first == "end" && place.second + 1 == whole.epoch) return;  // nothing was left
      for (const auto& [epoch, reported] : resumed.reports) CHECK(reported == whole.reports.at(epoch));
      CHECK(resumed.reports.contains(whole.epoch - 1));
    };
    check(place);
    if (place.first == "step" && place.second == whole.step / 2) {
      const auto inside =
          std::get<1>(whole.reports.begin()->second);  // the step at which the first epoch ended
      check(
          {"resumed", place.second / inside});  // saved by the run above, before the first step that it made
    }
  }
}

template <class... Extras>
auto maker(const lockstep::TrainerOptions& options, const Extras&... extras) {
  return [options, extras...] {
    torch::manual_seed(3);
    return std::make_unique<lockstep::Trainer<DropNet, Extras...>>(test_world(), options, extras...);
  };
}
const auto ten_samples_and_one = [] { return three_classes(10 * test_world().size() + 1); };

TEST_CASE("a run of epochs, where some ranks have a sample less") {
  check_all_places(maker({.epochs = 2, .batch_size = 5, .lr = 0.05, .pad = false, .progress = false}),
                   ten_samples_and_one);
}

TEST_CASE("a run of steps that ends inside an epoch") {
  check_all_places(maker({.steps = 4, .batch_size = 4, .lr = 0.05, .progress = false}), ten_samples_and_one);
}

TEST_CASE("a run that freezes parameters at the end of an epoch") {
  check_all_places(maker({.epochs = 3, .batch_size = 6, .lr = 0.05, .progress = false}), ten_samples_and_one,
                   1);
}

TEST_CASE("a run that skips steps") {
  check_all_places(maker({.epochs = 3, .batch_size = 6, .lr = 0.05, .progress = false},
                         lockstep::Fp16({.init_scale = 1e9, .growth_interval = 2})),
                   ten_samples_and_one);
}

TEST_CASE("a run on a stream, of epochs and of steps") {
  const auto stream = [] { return Batches(test_world().rank()); };
  check_all_places(maker({.epochs = 2, .lr = 0.05, .progress = false}), stream);
  check_all_places(maker({.steps = 3, .lr = 0.05, .progress = false}), stream);
}

TEST_CASE("a run that is to be shorter than what was saved trains nothing, and ends no epoch") {
  const CommonFolder folder(test_world());
  const auto data = ten_samples_and_one();
  const auto file = folder / "run";
  const auto make = [&](std::int64_t steps) {
    return maker({.steps = steps, .batch_size = 4, .lr = 0.05, .progress = false})();
  };
  auto trainer = make(9);
  trainer->fit(data, cross_entropy_of, lockstep::OnStep{[&](const auto& step) {
                 if (step.step == 4) trainer->save_checkpoint(file);
               }});
  auto shorter = make(2);
  shorter->load_checkpoint(file);
  const auto epoch = shorter->epoch();
  shorter->fit(data, cross_entropy_of);
  CHECK(shorter->step() == 5);
  CHECK(shorter->epoch() == epoch);
}

TEST_CASE("a number of epochs or steps that means without an end") {
  constexpr auto endless = std::numeric_limits<std::int64_t>::max();
  for (const bool steps : {false, true}) {
    lockstep::TrainerOptions options{.batch_size = 4, .lr = 0.05, .progress = false};
    (steps ? options.steps : options.epochs) = endless;
    lockstep::Trainer<DropNet> trainer(test_world(), options);
    auto stop = lockstep::OnEpoch{[](const auto&) { return lockstep::FitAction::stop; }};
    auto data = ten_samples_and_one();
    trainer.fit(data, cross_entropy_of, stop);
    trainer.fit(data, cross_entropy_of, stop);
    CHECK(trainer.epoch() == 2);
  }
}

}  // namespace resume_ranks_test
