// The template of a data-parallel program, written by hand from lockstep's parts: a ConvNet on MNIST with
// DistributedDataParallel, synchronized batch norm, mixed precision and a test over all ranks.
// origin_main.cpp is the same program for one process: compare the two files. mnist.cpp is the same with
// lockstep::Trainer.
//   ddp_main --gpu 0,1        one process per GPU; on CPUs: ddp_main --nproc 2, in fp16 with --amp
//   torchrun --no-python --nproc-per-node 2 ddp_main          srun -n 2 ddp_main
//   WORLD_SIZE=7 RANK=0 MASTER_ADDR=nodeA MASTER_PORT=29500 ddp_main --nproc 3             (nodeA)
//   WORLD_SIZE=7 RANK=3 MASTER_ADDR=nodeA MASTER_PORT=29500 ddp_main --nproc 4             (nodeB)
// Python: ddp_main.py and ddp_main_torchrun.py of https://github.com/rickyang1114/DDP-practice
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

const auto program_start = std::chrono::steady_clock::now();

struct Options {
  std::string gpu, save = "ddp_checkpoint.pt";
  int epochs = 3;
  std::int64_t batch_size = 32;
  std::size_t samples = 20'000;
  double lr = 1e-4;
  bool scale_lr = false, amp = false;
  lockstep::MnistSource data;
};

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

template <class Ddp, class Loader, class Precision>
void train(Ddp& ddp, Loader& train_dloader, torch::optim::Optimizer& optimizer, Precision& precision,
           torch::Device device) {
  ddp.module()->train();
  for (auto& batch : lockstep::StagedBatches{train_dloader, device}) {
    const auto &images = batch.data, &labels = batch.target;
    const auto outputs = precision.forward([&] { return ddp(images); });  // with autocast()
    const auto loss = nn::functional::cross_entropy(outputs, labels);
    optimizer.zero_grad();
    ddp.backward(precision.scale(loss));  // scaler.scale(loss).backward()
    precision.step(optimizer);            // scaler.step(optimizer); scaler.update()
  }
}

// Every rank calls it, since it ends with collectives: `if (rank == 0) test(...)`, the tutorial's advice,
// would wait for the other ranks forever.
template <class Comm, class Loader, class Precision>
void test(const lockstep::World& world, ConvNet& model, Comm& comm, Loader& test_dloader,
          Precision& precision) {
  const auto device = lockstep::comm_device(comm);
  const lockstep::EvaluationMode evaluating(*model);  // model.eval() and torch.no_grad()
  auto size = torch::zeros({}, device), correct = torch::zeros({}, device);
  for (auto& batch : lockstep::StagedBatches{test_dloader, device}) {
    const auto &images = batch.data, &labels = batch.target;
    // The model itself: the ranks may have different numbers of batches.
    const auto outputs = precision.forward([&] { return model->forward(images); });
    size += images.size(0);
    correct += (outputs.argmax(1) == labels).sum();
  }
  comm.reduce(size, 0).synchronize();
  comm.reduce(correct, 0).synchronize();
  if (world.rank() == 0)
    world.log.info("Accuracy is {:.2f}%",
                   100 * correct.template item<double>() / size.template item<double>());
}

// {model, scaler}, or {model} where there is no scaler, which Python reads by torch.load. Written whole or not at all.
template <class Precision>
void save_checkpoint(const ConvNet& model, const Precision& precision, const std::string& path) {
  c10::impl::GenericDict state_dict(c10::StringType::get(), c10::AnyType::get());
  state_dict.insert("model", lockstep::dict_of(lockstep::state_dict(model)));
  if constexpr (requires { precision.scaler(); })
    state_dict.insert("scaler", lockstep::state_dict(precision.scaler()));
  lockstep::torch_save(c10::IValue(state_dict), path);
}

template <class Precision, class Comm>
void run(const lockstep::World& world, const Options& options, const lockstep::Mnist& mnist, Comm comm) {
  const auto device = lockstep::comm_device(comm);
  torch::manual_seed(3407);  // the tutorial seeds neither the model nor, beyond the epoch, the sampler
  ConvNet model;
  model->to(device);
  lockstep::convert_sync_batchnorm(model, comm);
  lockstep::DistributedDataParallel ddp{model, comm};
  // The global batch grows with the number of ranks, and so should the rate. The tutorial keeps it.
  double lr = options.lr;
  if (options.scale_lr) {
    const auto batch = options.batch_size;
    lr =
        lockstep::scaled_rate(lr, lockstep::RateRule::linear, {.per_rank = batch, .reference = batch}, world);
  }
  lockstep::SGD optimizer(ddp.parameters(), {.lr = lr});
  Precision precision;

  // The seed of the loader's transforms, by the global rank: by the local rank, as in ddp_main_torchrun.py,
  // two hosts would draw the same. There is no random transform here, so that nothing draws from it.
  const auto seed = 3407 + static_cast<std::uint64_t>(world.rank());
  lockstep::DataLoader train_dloader{
      mnist.train,
      lockstep::DistributedSampler{std::min(options.samples, mnist.train.size()), world},
      {.batch_size = options.batch_size, .num_workers = 4, .seed = seed, .pin_memory = true}};
  // Every digit once. The tutorial's DistributedSampler counts some twice to give all ranks equally many.
  lockstep::DataLoader test_dloader{mnist.test,
                                    lockstep::EvaluationSampler{mnist.test.size(), world},
                                    {.batch_size = options.batch_size, .num_workers = 2, .pin_memory = true}};

  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    world.log.info("begin training of epoch {}/{}", epoch + 1, options.epochs);  // rank 0's log
    train_dloader.set_epoch(static_cast<std::size_t>(epoch));
    train(ddp, train_dloader, optimizer, precision, device);
  }
  ddp.synchronize();  // on GPUs the check of the last backward is read late
  world.log.info("begin testing");
  test(world, model, comm, test_dloader, precision);
  world.rank_zero([&] { save_checkpoint(model, precision, options.save); });
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - program_start;
  world.log.info("\ntime elapsed: {:.2f} seconds", elapsed.count());
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app(
      "Trains a small convolutional network on handwritten digits with several processes.");
  app.add_option("--gpu", options.gpu, "devices as in '0,1': one process each");
  app.add_option("-e,--epochs", options.epochs, "epochs to train")->check(CLI::Range(1'000'000));
  app.add_option("-b,--batch_size,--batch-size", options.batch_size, "batch size of each process")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--samples", options.samples, "training digits to use at most; MNIST has 60000")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--lr", options.lr, "learning rate of SGD")->check(CLI::Range(1000.0));
  app.add_flag("--scale-lr", options.scale_lr, "multiply the rate by the number of processes");
  app.add_flag("--amp", options.amp, "mixed precision with a scaler on CPUs too; GPUs always use it");
  app.add_option("--save", options.save, "file to write model and scaler to");
  app.add_option("--data-dir,--data_dir", options.data.folder,
                 "folder with MNIST's four files; without it, digits are drawn");
  app.callback([&] {
    if (std::isnan(options.lr)) throw CLI::ValidationError("--lr", "nan is not a number");
  });
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  const auto on_rank = [&](const lockstep::World& world) {
    world.rank_zero([&] { lockstep::require_writable(options.save, "--save"); });
    const lockstep::Mnist mnist = lockstep::load_mnist(world, options.data);
    if (options.samples < mnist.train.size())
      world.log.info("training on the first {} of {} digits", options.samples, mnist.train.size());
    lockstep::with_device(world, [&]<class Comm>(Comm comm) {
      constexpr bool on_gpu = lockstep::DeviceCommunicator<Comm>;
      if (on_gpu || options.amp)
        run<lockstep::Fp16>(world, options, mnist, std::move(comm));
      else
        run<lockstep::Fp32>(world, options, mnist, std::move(comm));
    });
  };
  return lockstep::launch(argc, argv, on_rank, {.gpus = options.gpu});
}
