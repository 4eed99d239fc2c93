// What a step of lockstep's optimizers costs beside torch::optim's, for 10 and for 300 small parameters:
// weights, and as many biases of 10 elements. The two are timed in turn in one process, one thread each.
//
// usage: bench_optimizers [rounds = 15] [elements of a weight = 1024]

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/optim/optimizers.hpp"

namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using Parameters = std::vector<torch::Tensor>;

Parameters make_parameters(int count, std::int64_t elements) {
  Parameters parameters;
  for (int i = 0; i < count; ++i) {
    parameters.push_back(torch::randn({i % 2 == 0 ? elements : 10}).requires_grad_());
    parameters.back().mutable_grad() = torch::randn_like(parameters.back());
  }
  return parameters;
}

// Microseconds a step, of some steps in a row.
double time_step(torch::optim::Optimizer& optimizer, int steps) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) optimizer.step();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / steps;
}

struct Contest {
  std::string name;
  Optimizer ours, theirs;
  std::vector<double> ratios, our_times, their_times;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<Contest> contests(int count, std::int64_t elements) {
  const auto parameters = [&] { return make_parameters(count, elements); };
  using lockstep::Implementation;
  std::vector<Contest> all;
  const auto add = [&](const char* name, Optimizer ours, Optimizer theirs) {
    all.push_back({name, std::move(ours), std::move(theirs), {}, {}, {}});
  };
  const auto sgd = torch::optim::SGDOptions(0.01);
  const auto momentum = torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(1e-4);
  for (const auto kind : {Implementation::automatic, Implementation::fused}) {
    const bool fused = kind == Implementation::fused;
    if (!fused)
      add("SGD", std::make_unique<lockstep::SGD>(parameters(), lockstep::SGDOptions{.lr = 0.01}),
          std::make_unique<torch::optim::SGD>(parameters(), sgd));
    add(fused ? "SGD-momentum-fused" : "SGD-momentum",
        std::make_unique<lockstep::SGD>(
            parameters(),
            lockstep::SGDOptions{.lr = 0.01, .momentum = 0.9, .weight_decay = 1e-4, .implementation = kind}),
        std::make_unique<torch::optim::SGD>(parameters(), momentum));
    add(fused ? "Adam-fused" : "Adam",
        std::make_unique<lockstep::Adam>(parameters(), lockstep::AdamOptions{.implementation = kind}),
        std::make_unique<torch::optim::Adam>(parameters()));
    add(fused ? "AdamW-fused" : "AdamW",
        std::make_unique<lockstep::AdamW>(parameters(), lockstep::AdamWOptions{.implementation = kind}),
        std::make_unique<torch::optim::AdamW>(parameters()));
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const std::int64_t elements = argc > 2 ? std::atoll(argv[2]) : 1024;
  if (rounds < 1 || elements < 1) {
    fmt::print(stderr, "usage: bench_optimizers [rounds] [elements of a weight]\n");
    return 2;
  }
  at::set_num_threads(1);
  for (const int count : {10, 300}) {
    auto all = contests(count, elements);
    const int steps = std::max(1, 6000 / count);
    for (auto& contest : all) {
      time_step(*contest.ours, 3);
      time_step(*contest.theirs, 3);
    }
    for (int round = 0; round < rounds; ++round)
      for (auto& contest : all) {
        contest.our_times.push_back(time_step(*contest.ours, steps));
        contest.their_times.push_back(time_step(*contest.theirs, steps));
        contest.ratios.push_back(contest.our_times.back() / contest.their_times.back());
      }
    std::vector<double> overall(static_cast<std::size_t>(rounds), 0);
    int kinds = 0;
    for (const auto& contest : all) {
      const auto [low, high] = std::minmax_element(contest.ratios.begin(), contest.ratios.end());
      fmt::print("RATIO optimizer-{} lockstep/torch::optim {:.2f} ({:.2f}-{:.2f}) {}: {:.1f} us, {:.1f} us\n",
                 count, median(contest.ratios), *low, *high, contest.name, median(contest.our_times),
                 median(contest.their_times));
      if (contest.name.ends_with("-fused")) continue;
      ++kinds;
      for (std::size_t round = 0; round < overall.size(); ++round) overall[round] += contest.ratios[round];
    }
    // The defaults, whose bits are those of Python's: the mean over the four in each round.
    for (double& sum : overall) sum /= kinds;
    const auto [low, high] = std::minmax_element(overall.begin(), overall.end());
    fmt::print("RATIO optimizer-{} lockstep/torch::optim {:.2f} ({:.2f}-{:.2f})\n", count, median(overall),
               *low, *high);
  }
  return 0;
}
