// The training that is measured, in lockstep: over CpuComm, over GlooComm, over MpiComm, or two loops that do not talk.
#include "common.hpp"
#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#ifdef LOCKSTEP_BENCH_MPI
#include "lockstep/comm/mpi_comm.hpp"
#endif
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"

namespace {

template <class Model, class Comm>
struct Training {
  Training(Model given, Comm& comm, double rate, const lockstep::DdpOptions& options = {})
      : model(given), ddp(model, comm, options), optimizer(ddp.parameters(), rate) {}

  Model model;
  lockstep::DistributedDataParallel<Model, Comm> ddp;
  torch::optim::SGD optimizer;
};

// The time in which buckets travel, and the part of it that backward does not hide: the medians of the steps.
template <class Comm>
void time_overlap(const lockstep::World& world, Comm& comm, const bench::Settings& run) {
  torch::manual_seed(0);
  // Three buckets: this network would fit into one.
  Training<bench::ConvNet, Comm> training(bench::ConvNet(), comm, 1e-2, {.bucket_cap_mb = {1.0 / 32}});
  torch::manual_seed(100 + world.rank());
  const auto data = torch::rand({32, 1, 28, 28});
  const auto target = torch::randint(10, {32});
  std::vector<double> exposed, whole;
  for (int i = 0; i < run.warmup + run.steps; ++i) {
    training.optimizer.zero_grad();
    training.ddp.backward(torch::cross_entropy_loss(training.ddp(data), target));
    training.optimizer.step();
    if (i < run.warmup) continue;
    const lockstep::DdpReport report = training.ddp.report();
    exposed.push_back(report.communication - report.overlap);
    whole.push_back(report.communication);
  }
  bench::report(world.rank(), fmt::format("\"exposed\": {:.9f}, \"communication\": {:.9f}",
                                          bench::median(exposed), bench::median(whole)));
}

// `count` parameters of small layers. The identity keeps activations and gradients of so deep a network normal.
torch::nn::Sequential small_layers(int count) {
  torch::nn::Sequential layers;
  for (int i = 0; i < count / 2; ++i) {
    torch::nn::Linear layer(4, 4);
    torch::nn::init::eye_(layer->weight);
    layers->push_back(layer);
  }
  return layers;
}

// The time of a step for each of `count` parameters: of the bare loop, and what DistributedDataParallel adds.
// The two take turns, so that both meet the same load of the machine; the fastest step is the one that met none. The
// ranks start each step together: a rank that is late by its bare loop must not count as waiting.
template <class Comm>
void time_parameters(const lockstep::World& world, Comm& comm, const bench::Settings& run, int count) {
  auto bare = small_layers(count);
  torch::optim::SGD bare_optimizer(bare->parameters(), 0);
  Training<torch::nn::Sequential, Comm> training(small_layers(count), comm, 0);
  const auto data = torch::full({4, 4}, 1.0 + world.rank());
  std::vector<double> alone, reduced;
  for (int i = 0; i < run.warmup + run.steps; ++i) {
    comm.barrier();
    const double begin = bench::now();
    bare_optimizer.zero_grad();
    bare->forward(data).sum().backward();
    bare_optimizer.step();
    const double bare_end = bench::now();
    comm.barrier();
    const double middle = bench::now();
    training.optimizer.zero_grad();
    training.ddp.backward(training.ddp(data).sum());
    training.optimizer.step();
    const double end = bench::now();
    if (i < run.warmup) continue;
    alone.push_back(bare_end - begin);
    reduced.push_back(end - middle);
  }
  const auto fastest = [](const std::vector<double>& times) { return *std::ranges::min_element(times); };
  bench::report(world.rank(),
                fmt::format("\"parameters\": {}, \"bare\": {:.9f}, \"added\": {:.9f}, "
                            "\"fastest_bare\": {:.9f}, \"fastest_added\": {:.9f}",
                            count, bench::median(alone) / count,
                            (bench::median(reduced) - bench::median(alone)) / count, fastest(alone) / count,
                            (fastest(reduced) - fastest(alone)) / count));
}

template <class Comm>
void train(const lockstep::World& world, const bench::Settings& run) {
  Comm comm{world};
  if (run.what == "overlap") {
    time_overlap(world, comm, run);
  } else if (run.what == "parameters") {
    for (const int count : {10, 100, 1000, 6000}) time_parameters(world, comm, run, count);
  } else {
    bench::measure(world, run, [&](auto model, auto loss, double rate) {
      auto training = std::make_shared<Training<decltype(model), Comm>>(model, comm, rate);
      return [training, loss](const auto& data, const auto& target) {
        auto value = loss(training->ddp(data), target);
        training->optimizer.zero_grad();
        training->ddp.backward(value);
        training->optimizer.step();
      };
    });
  }
  comm.shutdown();
}

// What a step costs without any lockstep: each rank trains alone.
void train_uncoupled(const lockstep::World& world, const bench::Settings& run) {
  bench::measure(world, run, [&](auto model, auto loss, double rate) {
    auto optimizer = std::make_shared<torch::optim::SGD>(model->parameters(), rate);
    return [model, optimizer, loss](const auto& data, const auto& target) mutable {
      auto value = loss(model->forward(data), target);
      optimizer->zero_grad();
      value.backward();
      optimizer->step();
    };
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "draw") {
    lockstep::draw_digits_into(argv[2], 8000, 2000);  // for machines without real ones
    return 0;
  }
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    const bench::Settings run = bench::settings(argc, argv);
    if (run.system == "uncoupled")
      train_uncoupled(world, run);
    else if (run.system == "gloo")
      train<lockstep::GlooComm>(world, run);
#ifdef LOCKSTEP_BENCH_MPI
    else if (run.system == "mpi")
      train<lockstep::MpiComm>(world, run);
#endif
    else
      train<lockstep::CpuComm>(world, run);
  });
}
