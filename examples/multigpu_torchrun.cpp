// Fault-tolerant training: saves a snapshot every few epochs, and resumes from it when it is started again,
// by hand, by torchrun --max-restarts or by a batch system. The same program for one host and for several:
//   multigpu_torchrun 50 10 --nproc 4
//   torchrun --no-python --nproc-per-node 4 --max-restarts 3 multigpu_torchrun 50 10
//   WORLD_SIZE=6 RANK=0 MASTER_ADDR=nodeA MASTER_PORT=29603 multigpu_torchrun 50 10 --nproc 4       (nodeA)
//   WORLD_SIZE=6 RANK=4 MASTER_ADDR=nodeA MASTER_PORT=29603 multigpu_torchrun 50 10 --nproc 2       (nodeB)
// Only rank 0's host needs the snapshot's file. On GPUs where there are some, else on CPUs.
// Python: multigpu_torchrun.py and multinode.py of
// https://docs.pytorch.org/tutorials/beginner/ddp_series_intro.html
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/cli.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;

struct Options {
  std::int64_t total_epochs = 0, save_every = 1;
  std::int64_t batch_size = 32;
  double momentum = 0;
  std::string snapshot_path = "snapshot.pt", loss = "mse";
};

// `size` random samples: 20 inputs and 1 target each. Seeded before, so that all ranks and a resumed run have
// the same data: in the tutorial each process draws its own.
class MyTrainDataset {
 public:
  explicit MyTrainDataset(std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      auto inputs = torch::rand({20});  // a statement each: C++ leaves the order of arguments open
      auto target = torch::rand({1});
      data_.emplace_back(std::move(inputs), std::move(target));
    }
  }
  [[nodiscard]] std::size_t size() const { return data_.size(); }
  [[nodiscard]] lockstep::Example get(std::size_t index) const { return data_[index]; }

 private:
  std::vector<lockstep::Example> data_;
};

using Loader = lockstep::DataLoader<MyTrainDataset, lockstep::DistributedSampler>;

template <class Comm>
class Trainer {
 public:
  Trainer(const lockstep::World& world, nn::Linear model, Loader& train_data,
          torch::optim::Optimizer& optimizer, Comm& comm, const Options& options)
      : world_(world),
        model_(std::move(model)),
        train_data_(train_data),
        optimizer_(optimizer),
        comm_(comm),
        options_(options),
        ddp_(model_, comm),
        epochs_run_(load_snapshot()) {}

  void train() {
    for (std::int64_t epoch = epochs_run_; epoch < options_.total_epochs; ++epoch) {
      run_epoch(epoch);
      if (epoch % options_.save_every != 0) continue;
      ddp_.synchronize();                          // on GPUs the check of the last backward is read late
      const c10::IValue ddp_state = ddp_.state();  // on every rank
      world_.rank_zero([&] { save_snapshot(epoch, ddp_state); });
    }
  }

 private:
  void run_epoch(std::int64_t epoch) {
    std::size_t step = 0;
    // The order of an epoch follows from its number: a resumed run sees the samples of an undisturbed one.
    train_data_.set_epoch(static_cast<std::size_t>(epoch));
    for (auto& batch : lockstep::StagedBatches{train_data_, lockstep::comm_device(comm_)}) {
      // The global rank: local ranks repeat on every host.
      if (step++ == 0)
        fmt::print("[GPU{}] Epoch {} | Batchsize: {} | Steps: {}\n", world_.rank(), epoch, batch.data.size(0),
                   train_data_.size());
      optimizer_.zero_grad();
      const auto output = ddp_(batch.data);
      // The tutorial's cross-entropy is over one class, whose probability is always 1: the loss and its
      // gradient are 0, and nothing is learned. Hence the mean squared error by default.
      ddp_.backward(options_.loss == "cross-entropy" ? nn::functional::cross_entropy(output, batch.target)
                                                     : torch::mse_loss(output, batch.target));
      optimizer_.step();
    }
  }

  // The file is written whole or not at all: a run that is killed while it writes keeps the last snapshot.
  // Python reads it by torch.load("snapshot.pt").
  void save_snapshot(std::int64_t epoch, const c10::IValue& ddp_state) const {
    c10::impl::GenericDict snapshot(c10::StringType::get(), c10::AnyType::get());
    snapshot.insert("MODEL_STATE", lockstep::dict_of(lockstep::state_dict(model_)));
    snapshot.insert("OPTIMIZER_STATE", lockstep::state_dict(optimizer_));
    // The order of the buckets: without it a resumed run at three and more ranks differs in the last bits.
    snapshot.insert("DDP_STATE", ddp_state);
    // The next epoch. The tutorial stores the finished one, and trains it twice after a restart.
    snapshot.insert("EPOCHS_RUN", epoch + 1);
    lockstep::torch_save(c10::IValue(snapshot), options_.snapshot_path);
    fmt::print("Epoch {} | Training snapshot saved at {}\n", epoch, options_.snapshot_path);
  }

  // Restores model and optimizer, and returns the epoch to train next. Rank 0 looks for the file and reads it
  // for all: on several hosts, other ranks may not have it, or an older one. A file that is no snapshot is
  // the user's input, hence UsageError.
  std::int64_t load_snapshot() try {
    const std::string& path = options_.snapshot_path;
    if (lockstep::agree_with_rank_zero(comm_, [&] {
          return std::filesystem::exists(path) ? path : "";
        }).empty()) {
      world_.log.info("Snapshot not found. Training model from scratch");
      return 0;
    }
    fmt::print("Loading snapshot\n");
    const c10::IValue file = lockstep::torch_load(path, comm_);
    std::int64_t epochs_run = 0;
    lockstep::agree<lockstep::CheckpointError>(comm_, [&] {
      if (!file.isGenericDict()) throw lockstep::CheckpointError("it holds no dict");
      const auto snapshot = file.toGenericDict();
      for (const char* key : {"MODEL_STATE", "EPOCHS_RUN"})
        if (!snapshot.contains(key)) throw lockstep::CheckpointError(fmt::format("it has no {}", key));
      if (!snapshot.at("EPOCHS_RUN").isInt()) throw lockstep::CheckpointError("its EPOCHS_RUN is no int");
      lockstep::load_state_dict(model_, snapshot.at("MODEL_STATE"));
      epochs_run = snapshot.at("EPOCHS_RUN").toInt();
      if (snapshot.contains("DDP_STATE")) ddp_.load_state(snapshot.at("DDP_STATE"));  // Python's has none
      // The tutorial's snapshot has no optimizer.
      if (snapshot.contains("OPTIMIZER_STATE"))
        lockstep::load_state_dict(optimizer_, snapshot.at("OPTIMIZER_STATE"));
      else if (options_.momentum != 0)
        world_.log.warning("'{}' has no OPTIMIZER_STATE: the momentum starts from zero", path);
    });
    fmt::print("Resuming training from snapshot at Epoch {}\n", epochs_run);
    const auto groups = lockstep::state_dict(optimizer_).toGenericDict().at("param_groups").toList();
    if (const double momentum = groups.get(0).toGenericDict().at("momentum").toDouble();
        momentum != options_.momentum)
      world_.log.warning("the momentum of the snapshot is {}: --momentum {} has no effect", momentum,
                         options_.momentum);
    return epochs_run;
  } catch (const lockstep::CheckpointError& error) {
    throw lockstep::UsageError(
        fmt::format("--snapshot_path: could not resume from '{}': {}; remove it to train from scratch",
                    options_.snapshot_path, error.what()));
  }

  const lockstep::World& world_;
  nn::Linear model_;
  Loader& train_data_;
  torch::optim::Optimizer& optimizer_;
  Comm& comm_;
  const Options& options_;
  lockstep::DistributedDataParallel<nn::Linear, Comm> ddp_;
  const std::int64_t epochs_run_;
};

template <class Comm>
void train(const lockstep::World& world, const Options& options, Comm comm) {
  torch::manual_seed(0);
  MyTrainDataset train_set(2048);
  nn::Linear model(20, 1);
  model->to(lockstep::comm_device(comm));
  lockstep::SGD optimizer(model->parameters(), {.lr = 1e-3, .momentum = options.momentum});
  Loader train_data{train_set,
                    lockstep::DistributedSampler{train_set.size(), world},
                    {.batch_size = options.batch_size, .pin_memory = true}};
  Trainer<Comm>(world, model, train_data, optimizer, comm, options).train();
}

int main(int argc, char** argv) {
  Options options;
  lockstep::CommandLine app(
      "Fits a line with several processes, and resumes from its last snapshot after a failure.");
  app.add_option("total_epochs", options.total_epochs, "epochs to train, over all restarts")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("save_every", options.save_every, "epochs between snapshots")
      ->required()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--batch_size,--batch-size", options.batch_size, "batch size of each process")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--loss", options.loss, "cross-entropy is the tutorial's, which is always 0")
      ->check(CLI::IsMember({"mse", "cross-entropy"}));
  app.add_option("--momentum", options.momentum, "momentum of SGD")->check(CLI::Range(0.0, 1.0));
  app.add_option("--snapshot_path,--snapshot-path", options.snapshot_path, "the snapshot's file");
  app.callback([&] {
    if (std::isnan(options.momentum)) throw CLI::ValidationError("--momentum", "nan is not a number");
  });
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  const auto run = [&](const lockstep::World& world) {
    world.rank_zero([&] { lockstep::require_writable(options.snapshot_path, "--snapshot_path"); });
    lockstep::with_device(world, [&]<class Comm>(Comm comm) { train(world, options, std::move(comm)); });
  };
  // Each line names its rank already: no prefix.
  return lockstep::launch(argc, argv, run, {.prefix = lockstep::Prefix::never});
}
