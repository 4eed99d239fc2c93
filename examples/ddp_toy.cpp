// The programs of PyTorch's tutorial "Getting Started with Distributed Data Parallel": a toy model, trained
// for one step. Without a command it runs the first three demos in turn, as the tutorial's main does:
//   ddp_toy                      one process per two GPUs, both of which the third demo takes
//   ddp_toy --cpu-devices 4      the same on CPUs: a CPU stands in for each device
// With a command it runs one demo. Both run under any launcher:
//   ddp_toy basic --nproc 4
//   ddp_toy checkpoint --nproc 4 --checkpoint /shared/model.checkpoint
//   ddp_toy model-parallel --cpu-devices 4
//   torchrun --no-python --nproc_per_node=8 ddp_toy elastic
//   srun --nodes=2 --ntasks-per-node=8 ddp_toy elastic          see ddp_toy.slurm.sh
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>

#include "lockstep/cli.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;
using lockstep::World;

struct Options {
  std::string demo;
  int nproc = 0, cpu_devices = 0;
  std::string checkpoint = (std::filesystem::temp_directory_path() / "model.checkpoint").string();

  [[nodiscard]] int devices() const {
#ifdef LOCKSTEP_HAS_CUDA
    if (cpu_devices == 0) return static_cast<int>(torch::cuda::device_count());
#endif
    return cpu_devices;
  }
  [[nodiscard]] std::optional<lockstep::DeviceKind> kind() const {
    return cpu_devices > 0 ? std::optional(lockstep::DeviceKind::cpu) : std::nullopt;
  }
  /// The processes of demos whose ranks have `per_rank` devices each, without --nproc.
  [[nodiscard]] int processes(int per_rank) const {
    return devices() > 0 ? std::max(1, devices() / per_rank) : 2;
  }
};

struct ToyModelImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return net2(relu(net1(x))); }

  nn::Linear net1 = register_module("net1", nn::Linear(10, 10));
  nn::ReLU relu = register_module("relu", nn::ReLU());
  nn::Linear net2 = register_module("net2", nn::Linear(10, 5));
};
TORCH_MODULE(ToyModel);

/// The same model with its two layers on two devices of one rank.
struct ToyMpModelImpl : ToyModelImpl {
  ToyMpModelImpl(torch::Device dev0, torch::Device dev1) : dev0(dev0), dev1(dev1) {
    net1->to(dev0);
    net2->to(dev1);
  }
  torch::Tensor forward(const torch::Tensor& x) { return net2(relu(net1(x.to(dev0))).to(dev1)); }

  torch::Device dev0, dev1;
};
TORCH_MODULE(ToyMpModel);

/// One line in one write: under torchrun all ranks share the terminal.
void print_line(const std::string& line) {
  std::cout << line + "\n" << std::flush;
}

/// Every rank draws its own model and data. DistributedDataParallel broadcasts rank 0's model and averages
/// the gradients, so that the models are equal after the step.
template <class Model, class Comm>
void train_one_step(lockstep::DistributedDataParallel<Model, Comm>& ddp, Comm& comm) {
  torch::optim::SGD optimizer(ddp.parameters(), 0.001);
  optimizer.zero_grad();
  const auto outputs = ddp(torch::randn({20, 10}).to(ddp.parameters().front().device()));
  const auto labels = torch::randn({20, 5}).to(outputs.device());
  ddp.backward(torch::mse_loss(outputs, labels));
  optimizer.step();
  lockstep::check_same_parameters(comm, ddp.named_parameters(), /*tolerance=*/0);
}

/// The demo "basic", and "elastic", which differs in its line and in its launcher.
void demo_basic(const World& world, const Options& options) {
  print_line(std::string(options.demo == "elastic" ? "Start running" : "Running") +
             " basic DDP example on rank " + std::to_string(world.rank()) + ".");
  lockstep::with_device(
      world,
      [](auto comm) {
        ToyModel model;
        model->to(lockstep::comm_device(comm));  // the GPU of the local rank, where there are GPUs
        lockstep::DistributedDataParallel ddp{model, comm};
        train_one_step(ddp, comm);
      },
      options.kind());
}

void demo_checkpoint(const World& world, const Options& options) {
  world.rank_zero([&] { lockstep::require_writable(options.checkpoint, "--checkpoint"); });
  print_line("Running DDP checkpoint example on rank " + std::to_string(world.rank()) + ".");
  lockstep::with_device(
      world,
      [&](auto comm) {
        ToyModel model;
        model->to(lockstep::comm_device(comm));
        lockstep::DistributedDataParallel ddp{model, comm};
        // The models are equal, so one rank saves. Several hosts need a file that all of them see; save_model
        // and load_model with `comm` as their last argument need none: rank 0 reads the file and sends its
        // content.
        world.rank_zero([&] { lockstep::save_model(*model, options.checkpoint); });
        comm.barrier();  // no rank loads before rank 0 has saved
        // Copies into the model's own tensors, on this rank's device, wherever they were saved: the
        // tutorial's map_location.
        lockstep::load_model(*model, options.checkpoint);
        train_one_step(ddp, comm);
        // The tutorial takes backward's all-reduce for the barrier. On GPUs a host does not wait for it, so
        // that rank 0 could remove the file while another rank still reads it.
        comm.barrier();
        world.rank_zero([&] { std::filesystem::remove(options.checkpoint); });
      },
      options.kind());
}

/// Throws UsageError unless this host has two devices for each of `ranks` ranks.
void require_devices(int ranks, const Options& options) {
  if (options.devices() < 2 * ranks)
    throw lockstep::UsageError(
        fmt::format("Requires at least {0} {2} to run, but got {1}; --cpu-devices {0} takes CPUs as devices",
                    2 * ranks, options.devices(), options.cpu_devices > 0 ? "devices" : "GPUs"));
}

void demo_model_parallel(const World& world, const Options& options) {
  require_devices(world.local_size(), options);
  print_line("Running DDP with model parallel example on rank " + std::to_string(world.rank()) + ".");
  const auto train = [](auto comm, torch::Device dev0, torch::Device dev1) {
    ToyMpModel model(dev0, dev1);
    lockstep::DistributedDataParallel ddp{model, comm};
    train_one_step(ddp, comm);
  };
  if (options.cpu_devices > 0) return train(lockstep::CpuComm{world}, torch::kCPU, torch::kCPU);
#ifdef LOCKSTEP_HAS_CUDA
  // Two devices for each rank, so that the world has half as many ranks as devices. The tutorial starts as
  // many ranks as devices and takes the indices modulo their number, so that two ranks share each device.
  const int dev0 = 2 * world.local_rank(), dev1 = dev0 + 1;
  train(lockstep::NcclComm{world, {.device = dev0}},  // serves every GPU of its rank
        torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(dev0)),
        torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(dev1)));
#endif
}

/// The demos in turn, by the same processes. Each demo makes a communicator and destroys it at its end: the
/// tutorial's setup and cleanup.
void run_demos(const World& world, const Options& options) {
  require_devices(world.local_size(), options);  // of the third demo, before the first one
  demo_basic(world, options);
  demo_checkpoint(world, options);
  demo_model_parallel(world, options);
}

int main(int argc, char** argv) {
  Options options;
  // The lines name their rank: no prefix. The parser below reads --nproc: the devices must suffice for it.
  lockstep::LaunchOptions launch_options{.nproc_flag = false, .prefix = lockstep::Prefix::never};
  lockstep::CommandLine app(
      "PyTorch's DDP tutorial: one step of a toy model; without a command, three demos in turn.");
  app.add_option("demo", options.demo, "one demo; without it, the first three in turn")
      ->check(CLI::IsMember({"basic", "checkpoint", "model-parallel", "elastic"}))
      ->default_str("");
  app.add_option(
         "--nproc,--nproc-per-node", options.nproc,
         "processes to start (one per two devices; basic, checkpoint, elastic: one per device, or two)")
      ->check(CLI::Range(1, 1000))
      ->default_str("");
  app.add_option("--cpu-devices", options.cpu_devices, "CPUs to take as devices, in place of GPUs")
      ->check(CLI::Range(1000));
  const auto* checkpoint =
      app.add_option("--checkpoint", options.checkpoint, "file that the checkpoint demo writes and removes");
  app.callback([&] {
    const bool saves = options.demo.empty() || options.demo == "checkpoint";
    if (checkpoint->count() > 0 && !saves)
      throw CLI::ValidationError("--checkpoint", options.demo + " does not use it: leave it out");
  });
  if (const auto code = lockstep::parse(app, argc, argv, launch_options)) return *code;
  const bool two_devices = options.demo.empty() || options.demo == "model-parallel";
  try {  // the tutorial asserts it first, too
    if (two_devices) require_devices(std::max(1, options.nproc), options);
    if (options.demo.empty()) lockstep::require_writable(options.checkpoint, "--checkpoint");
  } catch (const lockstep::UsageError& error) {
    std::cerr << fmt::format("error: {}\n", error.what());
    return 2;
  }
  launch_options.nproc_flag = true;
  launch_options.nproc = options.processes(two_devices ? 2 : 1);
  const auto demo = options.demo.empty()               ? run_demos
                    : options.demo == "model-parallel" ? demo_model_parallel
                    : options.demo == "checkpoint"     ? demo_checkpoint
                                                       : demo_basic;
  return lockstep::launch(
      argc, argv, [&](const World& world) { demo(world, options); }, launch_options);
}
