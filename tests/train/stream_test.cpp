// Streams: nobody knows their length, ranks run out at different times, and all stop at the same step.
#include <deque>

#include "lockstep/comm/cpu_comm.hpp"
#include "support/ranks.hpp"
#include "train/regression.hpp"

namespace stream_test {

namespace {

using Indices = std::vector<std::size_t>;

// Batches of `data`, by their indices; can be read again.
struct Batches {
  lockstep::TensorDataset data;
  std::vector<Indices> all;
  std::deque<Indices> left{};
  int asked_after_the_end = -1;

  void set_epoch(std::size_t) {
    left.assign(all.begin(), all.end());
    asked_after_the_end = -1;
  }
  std::optional<lockstep::Example> next() {
    if (left.empty()) {
      ++asked_after_the_end;
      return std::nullopt;
    }
    const Indices indices = std::move(left.front());
    left.pop_front();
    return data.get_batch(indices);
  }
};

// The same with one pass.
struct Once {
  Batches batches;
  std::optional<lockstep::Example> next() { return batches.next(); }
};

static_assert(lockstep::RepeatableStream<Batches>);
static_assert(lockstep::BatchStream<Once> && !lockstep::RepeatableStream<Once>);
static_assert(!lockstep::BatchStream<lockstep::TensorDataset>);

// Rank r has 2r + 1 batches, or 5 - 2r, of sizes that differ.
Batches uneven(int rank, bool first_has_most) {
  Batches stream{curve(200), {}};
  std::size_t next = static_cast<std::size_t>(rank) * 40;
  const int batches = first_has_most ? std::max(0, 5 - 2 * rank) : 2 * rank + 1;
  for (int b = 0; b < batches; ++b) {
    Indices indices;
    for (int i = 0; i < 1 + (b + rank) % 4; ++i) indices.push_back(next++);
    stream.all.push_back(indices);
  }
  return stream;
}

double train_alone(torch::nn::Sequential& net, bool first_has_most, std::int64_t accumulate, int epochs) {
  auto optimizer = momentum_sgd.function(net->parameters());
  double sum = 0, count = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    sum = count = 0;
    std::vector<Batches> ranks;
    for (int r = 0; r < test_world().size(); ++r) {
      ranks.push_back(uneven(r, first_has_most));
      ranks.back().set_epoch(0);
    }
    while (true) {
      Indices joined;
      for (auto& stream : ranks)
        for (std::int64_t micro = 0; micro < accumulate && !stream.left.empty(); ++micro) {
          joined.insert(joined.end(), stream.left.front().begin(), stream.left.front().end());
          stream.left.pop_front();
        }
      if (joined.empty()) break;
      const auto samples = static_cast<double>(joined.size());
      sum += step_alone(net, optimizer, ranks[0].data, joined) * samples;
      count += samples;
    }
  }
  return sum / count;
}

}  // namespace

TEST_CASE("ranks whose streams end at different times train as one process on all of them") {
  const bool first_has_most = GENERATE(true, false), counted = GENERATE(true, false);
  const std::int64_t accumulate = GENERATE(1, 2, 3);
  CAPTURE(first_has_most, counted, accumulate);
  const auto start = tanh_network(2, 4, 5);
  auto together = copy_of(start), alone = copy_of(start);
  const lockstep::TrainerOptions options{.epochs = 2, .accumulate = accumulate, .progress = false};
  lockstep::Trainer trainer{test_world(), options, together, momentum_sgd};
  Batches stream = uneven(test_world().rank(), first_has_most);
  std::int64_t steps = 0;
  lockstep::OnStep count{[&](const lockstep::StepReport& step) {
    CHECK(!step.steps_in_epoch);
    CHECK(step.local.empty() == std::isnan(step.loss()));
    ++steps;
  }};
  const auto report =
      counted ? trainer.fit(stream, summed_squared_error, count) : trainer.fit(stream, squared_error, count);
  const double expected = train_alone(alone, first_has_most, accumulate, 2);
  CHECK(distance(together, alone) < 1e-6);
  CHECK(std::abs(report.loss - expected) <= 1e-6 * expected);
  CHECK(stream.asked_after_the_end == 0);  // who has said that it is over is not asked again
  // All stop at the same step.
  for (const auto& other : trainer.comm().all_gather_bytes(std::to_string(steps)))
    CHECK(other == std::to_string(steps));
  CHECK(report.step == steps);
}

TEST_CASE("a stream that cannot be read again has one pass, and may be given up before its end") {
  auto net = tanh_network(1, 3, 5);
  lockstep::Trainer trainer{test_world(), {.epochs = 2, .progress = false}, net};
  Once two_epochs{uneven(test_world().rank(), true)};
  two_epochs.batches.set_epoch(0);
  CHECK_THROWS_AS(trainer.fit(two_epochs, squared_error), lockstep::UsageError);
  CHECK(trainer.step() == 0);

  lockstep::Trainer steps{test_world(), {.steps = 2, .progress = false}, tanh_network(1, 3, 5)};
  CHECK(steps.fit(two_epochs, squared_error).step == 2);
  CHECK(steps.fit(two_epochs, squared_error).step == 4);
  CHECK(steps.fit(two_epochs, squared_error).step == 5);  // rank 0 had five batches
}

TEST_CASE("a stream of nothing is an error on every rank") {
  lockstep::Trainer trainer{test_world(), {.progress = false}, tanh_network(1, 3, 5)};
  Batches nothing{curve(5), {}};
  CHECK_THROWS_AS(trainer.fit(nothing, squared_error), lockstep::DataError);
  Batches empty{curve(5), {{}, {}}};  // batches of no samples are passed over
  CHECK_THROWS_AS(trainer.fit(empty, squared_error), lockstep::DataError);
}

TEST_CASE("a step in which nothing was counted changes nothing, and does not end a stream") {
  auto net = tanh_network(1, 3, 5);
  const auto start = copy_of(net);
  lockstep::Trainer trainer{test_world(), {.progress = false}, net, momentum_sgd};
  Batches stream{curve(40), {{0, 1}, {2, 3}, {4, 5}, {6}}};
  std::vector<double> moved;
  int batch_number = 0;
  trainer.fit(
      stream,
      [&](auto& model, const auto& batch) {
        const bool counts = batch_number++ != 1;  // the second: masked out, not even a graph
        if (!counts) return lockstep::Mean{torch::full({}, std::nan(""), torch::kDouble), 0};
        return summed_squared_error(model, batch);
      },
      lockstep::OnStep{[&, before = copy_of(start)](const auto& report) mutable {
        moved.push_back(distance(net, before));
        before = copy_of(net);
        CHECK(std::isnan(report.loss()) == (report.step == 1));
      }});
  REQUIRE(moved.size() == 4);
  CHECK(moved[0] > 0);
  CHECK(moved[1] == 0);  // momentum included
  CHECK(moved[2] > 0);
  CHECK(moved[3] > 0);
}

}  // namespace stream_test
