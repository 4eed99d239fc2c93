#pragma once

// What the lockstep and the c10d::Reducer program share: models, data, the loop that is timed, and how it
// reports. The Python peer, python_ddp.py, does the same in the same order.

#include <time.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/world/launch.hpp"

namespace bench {

namespace nn = torch::nn;

struct ConvNetImpl : nn::Module {
  ConvNetImpl() {
    const auto layer = [](int in, int out) {
      return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 5).padding(2)), nn::BatchNorm2d(out),
                            nn::ReLU(), nn::MaxPool2d(2));
    };
    layer1 = register_module("layer1", layer(1, 16));
    layer2 = register_module("layer2", layer(16, 32));
    fc = register_module("fc", nn::Linear(7 * 7 * 32, 10));
  }
  torch::Tensor forward(const torch::Tensor& x) { return fc(layer2->forward(layer1->forward(x)).flatten(1)); }

  nn::Sequential layer1, layer2;
  nn::Linear fc{nullptr};
};
TORCH_MODULE(ConvNet);

/// convnet|linear STEPS WARMUP: that many timed steps on batches in memory; overlap STEPS WARMUP: lockstep's
/// own report of them; parameters STEPS WARMUP: the time for each of 10 to 6,000 small parameters; epoch FOLDER: one
/// epoch over MNIST's files there, after one to warm up.
/// `system` stands before: gloo, mpi (under mpirun, where it was built for that), or uncoupled for loops that do not talk.
struct Settings {
  std::string what;
  int steps = 0, warmup = 0;
  std::string folder;
  std::string system = {};
};

inline Settings settings(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  // launch's own words stand first: --nproc N
  if (words.size() > 2 && words[0] == "--nproc") words.erase(words.begin(), words.begin() + 2);
  std::string system;
  if (!words.empty() && (words[0] == "gloo" || words[0] == "mpi" || words[0] == "uncoupled")) {
    system = words[0];
    words.erase(words.begin());
  }
  if (words.size() == 2 && words[0] == "epoch") return {"epoch", 0, 0, words[1], system};
  if (words.size() == 3) return {words[0], std::stoi(words[1]), std::stoi(words[2]), "", system};
  throw lockstep::UsageError(
      "usage: [--nproc N] [gloo|mpi|uncoupled] convnet|linear|overlap|parameters STEPS WARMUP, or ... epoch "
      "FOLDER");
}

/// Seconds of the clock that all processes of the machine share.
inline double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The most memory this process had at once, in KiB. getrusage would count what its parent had before exec.
inline long peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (long kib = 0; word == "VmHWM:" && status >> kib) return kib;
  return -1;
}

/// One line a rank for the driver, which parses it.
inline void report(int rank, const std::string& numbers) {
  fmt::print("BENCH {{\"rank\": {}, {}, \"peak_kib\": {}}}\n", rank, numbers, peak_memory());
  std::fflush(stdout);
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// `step(data, target)` does one training step.
template <class Step>
void time_steps(int rank, const Settings& run, Step&& step) {
  torch::manual_seed(100 + rank);
  const bool linear = run.what == "linear";
  const auto data = linear ? torch::rand({32, 20}) : torch::rand({32, 1, 28, 28});
  const auto target = linear ? torch::rand({32, 1}) : torch::randint(10, {32});
  double first = 0;
  std::vector<double> times;
  for (int i = 0; i < run.warmup + run.steps; ++i) {
    const double begin = now();
    step(data, target);
    const double end = now();
    if (i == 0) first = end;
    if (i >= run.warmup) times.push_back(end - begin);
  }
  report(rank, fmt::format("\"first_step_at\": {:.6f}, \"step\": {:.9f}", first, median(times)));
}

/// The second of two epochs, loading included.
template <class Step>
void time_epoch(const lockstep::World& world, const Settings& run, Step&& step) {
  const lockstep::Mnist mnist = lockstep::load_mnist(run.folder);
  lockstep::DataLoader loader{
      mnist.train, lockstep::DistributedSampler{mnist.train.size(), world}, {.batch_size = 32}};
  double begin = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    begin = now();
    loader.set_epoch(static_cast<std::size_t>(epoch));
    for (auto& batch : loader) step(batch.data, batch.target);
  }
  report(world.rank(), fmt::format("\"epoch\": {:.6f}", now() - begin));
}

/// Runs what the settings say. `make_step(model, loss, rate)` gives the step of one system.
template <class MakeStep>
void measure(const lockstep::World& world, const Settings& run, MakeStep&& make_step) {
  torch::manual_seed(0);
  const auto squares = [](const torch::Tensor& out, const torch::Tensor& target) {
    return torch::mse_loss(out, target);
  };
  const auto cross_entropy = [](const torch::Tensor& out, const torch::Tensor& target) {
    return torch::cross_entropy_loss(out, target);
  };
  if (run.what == "linear")
    time_steps(world.rank(), run, make_step(nn::Linear(20, 1), squares, 1e-3));
  else if (run.what == "convnet")
    time_steps(world.rank(), run, make_step(ConvNet(), cross_entropy, 1e-2));
  else
    time_epoch(world, run, make_step(ConvNet(), cross_entropy, 1e-2));
}

}  // namespace bench
