// What tests/train/faults_test.cpp starts: rank 1 fails where the others wait for it, and every rank catches
// its error. Rank 1 then lives on for a while, so that nobody learns of it by its end.
//
// usage: train_fault_program --nproc N MODE
//        train_fault_program "save in FOLDER"
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/hooks/hook.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/zero_redundancy.hpp"
#include "lockstep/train/checkpointer.hpp"
#include "lockstep/train/trainer.hpp"
#include "lockstep/world/launch.hpp"
#include "support/meeting.hpp"
#include "support/mib.hpp"
#include "train/regression.hpp"

namespace {

using Sequential = torch::nn::Sequential;

/// Throws on its rank where it is asked for anything.
struct Broken {
  lockstep::TensorDataset all;
  bool breaks;
  [[nodiscard]] std::size_t size() const { return all.size(); }
  [[nodiscard]] lockstep::Example get_batch(c10::ArrayRef<std::size_t> indices) const {
    if (breaks) throw lockstep::DataError("a file is gone");
    return all.get_batch(indices);
  }
};

void train(const lockstep::World& world, const std::string& mode) {
  const bool culprit = world.rank() == 1;
  Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 1));
  net->to(torch::kDouble);
  lockstep::Trainer<Sequential, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32> trainer(
      world, {.epochs = 1, .batch_size = 2, .progress = false}, net);
  if (mode != "data") lockstep::convert_sync_batchnorm(trainer.model(), trainer.comm());
  const Broken data{curve(static_cast<std::size_t>(8 * world.size())), culprit && mode == "data"};
  if (mode == "nothing")  // a sum over nothing whose backward the others wait for
    trainer.fit(data, [&](Sequential& model, const auto& batch) {
      const auto loss = squared_error(model, batch);
      return culprit ? lockstep::Mean{loss * std::nan(""), 0} : lockstep::Mean{loss, 2};
    });
  else
    trainer.fit(data, [&](Sequential& model, const auto& batch) {
      if (culprit && mode == "loss") throw lockstep::DataError("a file is gone");
      return squared_error(model, batch);
    });
}

/// Throws where a program's own functions are called: in an evaluation, and in what a training is given.
void call(const lockstep::World& world, const std::string& mode, std::shared_ptr<void>& keeper) {
  const auto at = [culprit = world.rank() == 1, mode](const std::string& place) {
    if (culprit && mode == place) throw lockstep::DataError("a file is gone");
  };
  struct Calling : torch::optim::SGD {
    Calling(std::vector<torch::Tensor> parameters, std::function<void()> first)
        : SGD(std::move(parameters), 0.1), first(std::move(first)) {}
    torch::Tensor step(LossClosure closure = nullptr) override {
      first();
      return SGD::step(closure);
    }
    std::function<void()> first;
  };
  const auto optimizer = lockstep::MakeOptimizer{[at](std::vector<torch::Tensor> parameters) {
    return std::make_unique<Calling>(std::move(parameters), [at] { at("optimizer"); });
  }};
  const auto schedule = lockstep::RateSchedule{[at](std::int64_t, std::int64_t step) {
    if (step == 1) at("schedule");
    return 1.0;
  }};
  Sequential net(torch::nn::Linear(3, 4), torch::nn::Linear(4, 1));
  net->to(torch::kDouble);
  const lockstep::TrainerOptions options{.batch_size = 2, .progress = false};
  using Trainer = decltype(lockstep::Trainer{world, options, net, optimizer, schedule});
  const auto trainer = std::make_shared<Trainer>(world, options, net, optimizer, schedule);
  keeper = trainer;  // its end would tell the others, too
  const Broken data{curve(static_cast<std::size_t>(8 * world.size())),
                    world.rank() == 1 && mode == "test data"};
  trainer->evaluate(data, [&](const torch::Tensor& output, const auto&) {
    at("metric");
    return lockstep::Mean{output.sum(), 1};
  });
  trainer->fit(data.all, squared_error, lockstep::OnStep{[&](const auto&) { at("step"); }},
               lockstep::OnGradients{[&](const auto&) { at("gradients"); }});
}

void reduce(const lockstep::World& world, std::int64_t where) {
  lockstep::CpuComm comm{world};
  Sequential net(torch::nn::Linear(3, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 1));
  int step = 0;
  const auto hook = lockstep::hook_of(
      [&](auto& group, const lockstep::GradientBucket& bucket) {
        if (step == 2 && world.rank() == 1 && bucket.index == std::min(where, bucket.count - 1))
          throw std::runtime_error("no room for this bucket");
        bucket.flat.div_(group.size());
        return group.all_reduce(bucket.flat);
      },
      "roomy");
  lockstep::DistributedDataParallel ddp{net, comm, {.bucket_cap_mb = lockstep_test::mib({32})}, hook};
  for (; step < 3; ++step) ddp.backward(net->forward(torch::ones({2, 3})).sum());
}

/// Throws on rank 1 while it is waited for; what it sends is sound, and tells the others nothing of that.
struct Tight {
  static constexpr bool predivides = true;
  static constexpr bool propagates_nan = true;
  struct Unpacking {
    decltype(std::declval<lockstep::CpuComm&>().all_reduce(torch::Tensor())) work;
    bool fails;
    void wait() {
      work.wait();
      if (fails) throw std::runtime_error("no room to unpack");
    }
    void synchronize(std::chrono::milliseconds timeout) { work.synchronize(timeout); }
  };
  Unpacking start(lockstep::CpuComm& comm, const lockstep::GradientBucket& bucket) const {
    return {comm.all_reduce(bucket.flat), comm.rank() == 1 && bucket.iteration == 1};
  }
  [[nodiscard]] std::string_view name() const { return "tight"; }
  [[nodiscard]] std::int64_t wire_bytes() const { return 0; }
};

void unpack(const lockstep::World& world) {
  lockstep::CpuComm comm{world};
  torch::nn::Linear net(3, 4);
  lockstep::DistributedDataParallel ddp{net, comm, {}, Tight{}};
  for (int step = 0; step < 4; ++step) ddp.backward(net->forward(torch::ones({2, 3})).sum());
}

void shard(const lockstep::World& world) {
  lockstep::CpuComm comm{world};
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < world.size(); ++i) parameters.push_back(torch::ones({3, 3}, torch::requires_grad()));
  lockstep::ZeroRedundancyOptimizer optimizer(
      parameters, comm, [](std::vector<torch::Tensor> own) { return std::make_unique<lockstep::Adam>(own); });
  for (auto& parameter : parameters) parameter.mutable_grad() = torch::ones({3, 3});
  // Gradients that its optimizer does not take.
  if (world.rank() == 1)
    for (const auto& parameter : parameters) parameter.mutable_grad() = torch::ones({3, 3}).to_sparse();
  optimizer.step();
}

// Trains and saves after each step until it is killed, from where the process before was.
void save(const lockstep::World& world, const std::string& folder) {
  const auto adam = lockstep::MakeOptimizer{
      [](std::vector<torch::Tensor> parameters) { return lockstep::Adam(std::move(parameters)); }};
  Sequential net(torch::nn::Linear(3, 700), torch::nn::Linear(700, 700), torch::nn::Linear(700, 1));
  net->to(torch::kDouble);
  lockstep::Trainer trainer{world, {.steps = 1'000'000, .batch_size = 2, .progress = false}, net, adam};
  lockstep::Checkpointer checkpoints{trainer, folder, {.every_steps = 1}};
  checkpoints.load_latest();
  const std::int64_t from = trainer.step();
  trainer.fit(curve(64), squared_error, checkpoints, lockstep::OnStep{[&](const auto& report) {
                if (report.step != from) return;
                fmt::print("goes on at {}.\n", from);  // and writes
                std::fflush(stdout);
              }});
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argv[argc - 1];
  if (mode.starts_with("save in "))
    return lockstep::launch(argc, argv, [&](const lockstep::World& world) { save(world, mode.substr(8)); });
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    lockstep_test::meet(world);
    std::string said = "nothing";
    std::shared_ptr<void> keeper;
    try {
      if (mode == "first bucket" || mode == "last bucket")
        reduce(world, mode == "first bucket" ? 0 : 1000);
      else if (mode == "wait")
        unpack(world);
      else if (mode == "shard")
        shard(world);
      else if (mode == "data" || mode == "loss" || mode == "nothing")
        train(world, mode);
      else
        call(world, mode, keeper);
    } catch (const std::exception& error) {
      const auto* own = dynamic_cast<const lockstep::Error*>(&error);
      const bool consequence = own && own->failure().kind == lockstep::FailureKind::consequence;
      said =
          (consequence ? fmt::format("consequence of {}: ", own->failure().cause) : "error: ") + error.what();
    }
    // Rank 1 stays until the others are here as well: none of them hears of its end instead of its error.
    bool soon = true;
    try {
      lockstep_test::meet(world, "the end");
    } catch (const std::exception&) {
      soon = false;
    }
    fmt::print("rank {} {}: {}\n", world.rank(), soon ? "soon" : "late", said);
    std::fflush(stdout);
  });
}
