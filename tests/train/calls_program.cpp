// What tests/train/calls_fault_test.cpp starts: a mistake in the control flow, by which rank 0 and rank 1 are
// in different public calls, or rank 1 is in none.
//
// usage: calls_program [--nproc 2] MODE
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/optim/averaging.hpp"
#include "lockstep/report/run_report.hpp"
#include "lockstep/train/trainer.hpp"
#include "lockstep/world/launch.hpp"
#include "train/regression.hpp"

namespace {

using Sequential = torch::nn::Sequential;

Sequential make_net(bool buffers) {
  Sequential net(torch::nn::Linear(3, 64), torch::nn::Linear(64, 1));
  if (buffers) net->push_back(torch::nn::BatchNorm1d(1));
  net->to(torch::kDouble);
  return net;
}

// What rank 1 does instead of constructing a Trainer.
void come_late(const lockstep::World& world, const std::string& mode) {
  if (mode == "start: return before the rendezvous") {
    if (world.rank() == 1) return;
  } else if (mode == "start: save") {
    if (world.rank() == 1) {
      lockstep::CpuComm comm{world};
      lockstep::save_model(*make_net(false), "/nowhere/model.pt", comm);
    }
  } else {
    static_cast<void>(world.store());  // both ranks are there
    if (world.rank() == 1 && mode == "start: return before the communicator") return;
    if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::minutes(1));
  }
  const lockstep::Trainer trainer{world, {.progress = false}, make_net(false)};
}

void train_two(const lockstep::World& world) {
  lockstep::Trainer one{world, {.progress = false}, make_net(false)};
  lockstep::Trainer other{world, {.progress = false}, make_net(false)};
  const auto data = curve(16);
  if (world.rank() == 0) one.fit(data, squared_error);
  other.evaluate(data, [](const torch::Tensor& output, const auto&) { return output.sum(); });
}

void train(const lockstep::World& world, const std::string& mode) {
  const bool page_here = mode == "evaluate after a page on rank 0";
  lockstep::Trainer trainer{
      world, {.epochs = page_here ? 1 : 3, .batch_size = 2, .progress = false}, make_net(true)};
  const auto data = curve(16);
  const auto evaluate = [&] {
    trainer.evaluate(data, [](const torch::Tensor& output, const auto&) {
      return lockstep::Mean{output.sum(), 1};
    });
  };
  if (mode == "load or load if it exists") {
    if (world.rank() == 0) trainer.load_checkpoint("/nowhere/run.ckpt");
    trainer.load_checkpoint_if_exists("/nowhere/run.ckpt");
  }
  if (page_here) {
    lockstep::RunReport page{trainer.comm(), "/nowhere/report.html"};
    world.rank() == 0 ? trainer.fit(data, squared_error, page) : trainer.fit(data, squared_error);
    evaluate();
  }
  if (mode == "evaluate in a callback")
    trainer.fit(data, squared_error, lockstep::OnEpoch{[&](const auto&) {
                  if (world.rank() == 0) evaluate();
                }});
  trainer.fit(data, squared_error);
  if (mode == "evaluate or save") world.rank() == 0 ? evaluate() : trainer.save_checkpoint("/nowhere/run.pt");
  if (world.rank() == 0) evaluate();
  trainer.fit(data, squared_error);
}

void train_by_hand(const lockstep::World& world, const std::string& mode) {
  auto net = make_net(mode == "skip a backward");
  lockstep::CpuComm comm{world};
  lockstep::DistributedDataParallel ddp{net, comm};
  for (int step = 0; step < 6; ++step) {
    const bool here = world.rank() == (mode == "exit on rank 0" ? 0 : 1) && step == 3;
    if (here && mode.starts_with("break")) break;
    if (here && mode.starts_with("exit")) std::exit(0);
    const auto loss = ddp(torch::ones({2, 3}, torch::kDouble)).sum();
    if (here && mode.starts_with("skip a backward")) continue;
    ddp.backward(loss);
  }
  if (mode == "break, then average" && world.rank() == 1)
    lockstep::average_parameters({torch::ones({1 << 12})}, comm);
  if (mode == "break, then save") lockstep::save_model(*net, "/nowhere/model.pt", comm);
}

// Rank 1 reduces as many bytes of another dtype, which Gloo adds all the same. Then a result is written or returned.
void use_wrong_result(const lockstep::World& world, const std::string& mode) {
  lockstep::GlooComm comm{world};
  const auto reduce = [&](lockstep::GlooComm& comm) {
    comm.all_reduce(torch::ones({4}, world.rank() == 1 ? torch::kInt : torch::kFloat)).synchronize();
  };
  torch::manual_seed(1);
  auto net = make_net(false);
  const auto data = curve(16);
  if (mode.starts_with("reduce, then save ")) {
    reduce(comm);
    lockstep::save_model(*net, mode.substr(18), comm);
  } else if (mode == "reduce, then evaluate") {
    lockstep::evaluate(net, comm, data, {.batch_size = 16}, [&](const torch::Tensor& output, const auto&) {
      reduce(comm);
      return output.sum();
    });
  } else {
    lockstep::Trainer trainer{world, {.epochs = 1, .progress = false}, net, std::move(comm)};
    trainer.fit(data, squared_error, lockstep::OnEpoch{[&](const auto&) { reduce(trainer.comm()); }});
  }
  std::puts("used");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argv[argc - 1];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    if (mode.starts_with("start"))
      come_late(world, mode);
    else if (mode.starts_with("reduce"))
      use_wrong_result(world, mode);
    else if (mode == "two trainers")
      train_two(world);
    else if (mode.starts_with("evaluate") || mode.starts_with("load"))
      train(world, mode);
    else
      train_by_hand(world, mode);
  });
}
