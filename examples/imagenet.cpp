// Trains a ResNet on ImageNet, or on any folder with a train and a val folder that hold one subfolder for
// each class. Ports examples/imagenet/main.py of github.com/pytorch/examples with its lines and the flags of
// its training; launch's flags replace those of its launcher, and -b counts the images of all ranks.
//   imagenet --nproc 8 -a resnet50 folder/of/imagenet
//   imagenet --nproc 2                                    a small run on random images
//   torchrun --no-python --nproc-per-node 8 imagenet folder/of/imagenet; srun and mpirun do as well
// Modules and parameters have torchvision's names and initial values. checkpoint.pt and model_best.pt are
// what main.py calls .pth.tar: Python reads them by torch.load(file)["state_dict"], and --pretrained reads
// what Python wrote by torch.save(model.state_dict(), file).
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/image_folder.hpp"
#include "lockstep/datasets/image_transforms.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;
using Dict = c10::impl::GenericDict;

// ---- The model: torchvision.models.resnet -----------------------------------------------------------------

nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

// torchvision's BasicBlock: two convolutions of 3 x 3; and its Bottleneck: 1 x 1, 3 x 3, and 1 x 1 to four
// times the planes.
struct BlockImpl : nn::Module {
  BlockImpl(bool bottleneck, std::int64_t in, std::int64_t planes, std::int64_t stride, nn::Sequential down) {
    if (bottleneck) {
      add(conv(in, planes, 1, 1), planes);
      add(conv(planes, planes, 3, stride), planes);
      add(conv(planes, 4 * planes, 1, 1), 4 * planes);
    } else {
      add(conv(in, planes, 3, stride), planes);
      add(conv(planes, planes, 3, 1), planes);
    }
    if (!down->is_empty()) downsample = register_module("downsample", down);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor out = x;
    for (std::size_t i = 0; i < convs.size(); ++i) {
      out = norms[i](convs[i](out));
      if (i + 1 < convs.size()) out.relu_();
    }
    out += downsample ? downsample->forward(x) : x;
    return out.relu_();
  }

  void add(nn::Conv2d layer, std::int64_t planes) {
    const std::string number = std::to_string(convs.size() + 1);
    convs.push_back(register_module("conv" + number, layer));
    norms.push_back(register_module("bn" + number, nn::BatchNorm2d(planes)));
  }

  std::vector<nn::Conv2d> convs;
  std::vector<nn::BatchNorm2d> norms;
  nn::Sequential downsample{nullptr};
};
TORCH_MODULE(Block);

struct Architecture {
  bool bottleneck;
  std::array<int, 4> blocks;
};
const std::map<std::string, Architecture> architectures{
    {"resnet18", {false, {2, 2, 2, 2}}},  {"resnet34", {false, {3, 4, 6, 3}}},
    {"resnet50", {true, {3, 4, 6, 3}}},   {"resnet101", {true, {3, 4, 23, 3}}},
    {"resnet152", {true, {3, 8, 36, 3}}},
};

struct ResNetImpl : nn::Module {
  ResNetImpl(const Architecture& architecture, std::int64_t classes) {
    const std::int64_t expansion = architecture.bottleneck ? 4 : 1;
    conv1 =
        register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)));
    bn1 = register_module("bn1", nn::BatchNorm2d(64));
    std::int64_t in = 64;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const std::int64_t planes = 64 << i, out = planes * expansion;
      layers[i] = register_module("layer" + std::to_string(i + 1), nn::Sequential());
      for (int block = 0; block < architecture.blocks[i]; ++block, in = out) {
        const std::int64_t stride = i > 0 && block == 0 ? 2 : 1;
        nn::Sequential down;
        if (in != out || stride != 1) down = nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out));
        layers[i]->push_back(Block(architecture.bottleneck, in, planes, stride, down));
      }
    }
    fc = register_module("fc", nn::Linear(in, classes));
    for (const auto& module : modules(/*include_self=*/false))
      if (auto* layer = module->as<nn::Conv2d>())
        nn::init::kaiming_normal_(layer->weight, 0, torch::kFanOut, torch::kReLU);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(bn1(conv1(x)).relu_(), 3, 2, 1);
    for (auto& layer : layers) x = layer->forward(x);
    return fc(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }

  nn::Conv2d conv1{nullptr};
  nn::BatchNorm2d bn1{nullptr};
  std::array<nn::Sequential, 4> layers{nullptr, nullptr, nullptr, nullptr};
  nn::Linear fc{nullptr};
};
TORCH_MODULE(ResNet);

// ---- Checkpoints: dictionaries as Python's torch.save writes them -----------------------------------------

// Rank 0 reads the file; `load(dictionary)` runs on every rank. A file that does not fit is the user's error.
template <class Comm, class Load>
void load_file(const std::string& path, Comm& comm, Load&& load) try {
  const torch::IValue file = lockstep::torch_load(path, comm);
  lockstep::agree<lockstep::CheckpointError>(comm, [&] {
    try {
      load(file.toGenericDict());
    } catch (const lockstep::CheckpointError& error) {
      throw lockstep::CheckpointError(fmt::format("'{}': {}", path, error.what()));
    } catch (const std::exception&) {
      throw lockstep::CheckpointError(
          fmt::format("'{}' is no state dict and no checkpoint of main.py: save one by torch.save", path));
    }
  });
} catch (const lockstep::CheckpointError& error) {
  throw lockstep::UsageError(error.what());
}

// ---- The data ---------------------------------------------------------------------------------------------

struct Options {
  std::string data, arch = "resnet18", resume, pretrained, save_dir = ".";
  std::vector<std::string> of_optimizer;  // the given options of the optimizer
  std::optional<std::int64_t> epochs, batch_size, image_size;
  std::int64_t workers = 4, start_epoch = 0, print_freq = 10, warmup_epochs = 0;
  double lr = 0.1, momentum = 0.9, weight_decay = 1e-4;
  bool evaluate = false, dummy = false, scale_lr = false;
  std::uint64_t seed = 0;
};

// The images of a folder, or random ones: those of torchvision's FakeData, bit for bit.
struct Images {
  std::optional<lockstep::ImageFolder> folder = std::nullopt;
  std::size_t count = 0;
  std::int64_t side = 0;
  std::size_t random_offset = 0;

  [[nodiscard]] std::size_t size() const { return folder ? folder->size() : count; }
  [[nodiscard]] lockstep::Example get(std::size_t index) const {
    if (folder) return folder->get(index);
    const auto generator = at::detail::createCPUGenerator(random_offset + index);
    const auto image = torch::randn({3, side, side}, generator).mul(255).to(torch::kByte);
    return {image, torch::randint(0, 1000, {}, generator, torch::kLong)};
  }
};

struct Data {
  Images train, validation;
  lockstep::Transform train_transform, validation_transform;
  std::int64_t classes = 1000;
};

Data load_data(const lockstep::World& world, const Options& options) try {
  const std::int64_t side = *options.image_size;
  Data data;
  if (options.dummy) {
    world.log.info("=> Dummy data is used!");
    data.train = {.count = 640, .side = side};
    data.validation = {.count = 64, .side = side, .random_offset = data.train.count};
    data.train_transform = data.validation_transform = lockstep::Compose{lockstep::ToTensor{}};
    return data;
  }
  const std::filesystem::path folder = options.data;
  data.train.folder.emplace(folder / "train");
  data.validation.folder.emplace(folder / "val");
  if (data.train.folder->classes() != data.validation.folder->classes())
    throw lockstep::DataError(options.data + ": train and val do not have the same subfolders");
  data.classes = static_cast<std::int64_t>(data.train.folder->classes().size());
  const lockstep::Normalize normalize;  // ImageNet's mean and deviation
  data.train_transform = lockstep::Compose{lockstep::RandomResizedCrop{side},
                                           lockstep::RandomHorizontalFlip{}, lockstep::ToTensor{}, normalize};
  data.validation_transform = lockstep::Compose{lockstep::Resize{side * 256 / 224},
                                                lockstep::CenterCrop{side}, lockstep::ToTensor{}, normalize};
  return data;
} catch (const lockstep::DataError& error) {
  throw lockstep::UsageError(error.what());
}

// ---- Training ---------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The latest value and the average.
struct AverageMeter {
  double value = 0;
  lockstep::Total total = {};
  void update(double mean, std::int64_t count = 1) {
    value = mean;
    total += {mean * static_cast<double>(count), static_cast<double>(count)};
  }
  [[nodiscard]] double average() const { return total.mean(); }
};

// The percentage of samples whose target is among the k outputs that are largest.
std::array<double, 2> accuracy(const torch::Tensor& output, const torch::Tensor& target) {
  const torch::NoGradGuard no_grad;
  const auto hits =
      std::get<1>(output.topk(std::min<std::int64_t>(5, output.size(1)), 1)).eq(target.unsqueeze(1));
  const double percent = 100.0 / static_cast<double>(target.size(0));
  return {hits.select(1, 0).sum().item<double>() * percent, hits.sum().item<double>() * percent};
}

// Loss and accuracies of one rank; all ranks of main.py print theirs, here rank 0 does.
struct Progress {
  AverageMeter batch_time, data_time, losses, top1, top5;

  void update(const torch::Tensor& loss, const torch::Tensor& output, const torch::Tensor& target) {
    losses.update(loss.item<double>(), target.size(0));
    const auto [first, five] = accuracy(output, target);
    top1.update(first, target.size(0));
    top5.update(five, target.size(0));
  }
  void show(const lockstep::World& world, const std::string& prefix, std::size_t step, std::size_t steps,
            bool with_data_time) const {
    const auto pair = [](const AverageMeter& meter) {
      return fmt::format("{:6.3f} ({:6.3f})", meter.value, meter.average());
    };
    world.log.info(
        "{}[{:>{}}/{}]\tTime {}{}\tLoss {:.4e} ({:.4e})\tAcc@1 {:6.2f} ({:6.2f})\tAcc@5 {:6.2f} ({:6.2f})",
        prefix, step, std::to_string(steps).size(), steps, pair(batch_time),
        with_data_time ? "\tData " + pair(data_time) : "", losses.value, losses.average(), top1.value,
        top1.average(), top5.value, top5.average());
  }
};

template <class Loader, class Ddp, class Rate>
void train(const lockstep::World& world, Loader& loader, Ddp& ddp, lockstep::SGD& optimizer, const Rate& rate,
           const torch::Device& device, std::int64_t epoch, std::int64_t print_freq) {
  Progress progress;
  ddp.module()->train();
  auto end = Clock::now();
  std::size_t step = 0;
  for (auto& batch : lockstep::StagedBatches{loader, device}) {
    progress.data_time.update(seconds_since(end));
    for (auto& group : optimizer.param_groups()) group.options().set_lr(rate(epoch, step));
    const auto output = ddp(batch.data);
    const auto loss = nn::functional::cross_entropy(output, batch.target);
    progress.update(loss, output, batch.target);
    optimizer.zero_grad();
    ddp.backward(loss);
    optimizer.step();
    progress.batch_time.update(seconds_since(end));
    end = Clock::now();
    if (step++ % static_cast<std::size_t>(print_freq) == 0)
      progress.show(world, fmt::format("Epoch: [{}]", epoch), step, loader.size(), /*with_data_time=*/true);
  }
}

// Each rank takes other samples, each sample counts once: the same accuracy at any number of ranks.
template <class Loader, class Comm>
double validate(const lockstep::World& world, Loader& loader, ResNet& model, Comm& comm,
                std::int64_t print_freq) {
  Progress progress;
  lockstep::broadcast_buffers(*model, comm);  // rank 0's running statistics, as Python's DDP does
  const lockstep::EvaluationMode evaluation(*model);
  auto end = Clock::now();
  std::size_t step = 0;
  for (auto& batch : lockstep::StagedBatches{loader, lockstep::comm_device(comm)}) {
    const auto output = model(batch.data);
    progress.update(nn::functional::cross_entropy(output, batch.target), output, batch.target);
    progress.batch_time.update(seconds_since(end));
    end = Clock::now();
    if (step++ % static_cast<std::size_t>(print_freq) == 0)
      progress.show(world, "Test: ", step, loader.size(), /*with_data_time=*/false);
  }
  std::array totals{progress.top1.total, progress.top5.total};
  lockstep::sum_over_ranks(totals, comm);
  world.log.info(" *   Acc@1 {:.3f} Acc@5 {:.3f}", totals[0].mean(), totals[1].mean());
  return totals[0].mean();
}

// The options of an optimizer's only group, in its state dict.
Dict param_group(const torch::IValue& optimizer) {
  return optimizer.toGenericDict().at("param_groups").toList().get(0).toGenericDict();
}

template <class Comm>
void run(const lockstep::World& world, const Options& options, const Data& data, Comm comm) {
  // -b counts the images of a step over all ranks, so that the rate needs no change with their number.
  // main.py counts those of a node. Both drop the rest of the division.
  const std::int64_t batch_size = *options.batch_size / world.size();
  if (batch_size < 1)
    throw lockstep::UsageError(
        fmt::format("-b {}: give an image or more for each of {} ranks", *options.batch_size, world.size()));
  const std::int64_t workers = (options.workers + world.local_size() - 1) / world.local_size();
  lockstep::check_same_dataset(comm, data.train.size());
  lockstep::check_same_dataset(comm, data.validation.size());

  torch::manual_seed(options.seed);
  world.log.info("=> {} model '{}'", options.pretrained.empty() ? "creating" : "using pre-trained",
                 options.arch);
  const torch::Device device = lockstep::comm_device(comm);
  ResNet model(architectures.at(options.arch), data.classes);
  model->to(device);
  if (!options.pretrained.empty())
    load_file(options.pretrained, comm, [&](const Dict& file) {
      lockstep::load_state_dict(model, file.contains("state_dict") ? file.at("state_dict") : file);
    });
  lockstep::DistributedDataParallel ddp{model, comm};

  lockstep::DataLoader train_loader{
      data.train,
      lockstep::DistributedSampler{data.train.size(), comm, {.seed = options.seed}},
      {.batch_size = batch_size,
       .num_workers = workers,
       .transform = data.train_transform,
       .seed = options.seed,
       .pin_memory = true}};
  lockstep::DataLoader val_loader{data.validation,
                                  lockstep::EvaluationSampler{data.validation.size(), comm},
                                  {.batch_size = batch_size,
                                   .num_workers = workers,
                                   .transform = data.validation_transform,
                                   .pin_memory = true}};

  // The rate that 256 images a step need, in proportion to the images of this run's steps; then a warm-up,
  // step by step, and a tenth every 30 epochs.
  double base_rate = options.scale_lr ? lockstep::scaled_rate(options.lr, lockstep::RateRule::linear,
                                                              {.per_rank = batch_size}, world)
                                      : options.lr;
  lockstep::SGD optimizer(
      ddp.parameters(),
      {.lr = base_rate, .momentum = options.momentum, .weight_decay = options.weight_decay});
  const auto steps = static_cast<std::int64_t>(train_loader.size());
  const auto rate = [&](std::int64_t epoch, std::size_t step) {
    const lockstep::StepLR decay{.step_size = 30, .gamma = 0.1};
    const lockstep::LinearLR warmup{.start_factor = 0.01,
                                    .total_iters = std::max<std::int64_t>(options.warmup_epochs * steps, 1)};
    const double factor =
        options.warmup_epochs == 0 ? 1 : warmup(epoch * steps + static_cast<std::int64_t>(step));
    return base_rate * decay(epoch) * factor;
  };

  std::int64_t start_epoch = options.start_epoch;
  double best_acc1 = 0;
  if (!options.resume.empty()) {
    world.log.info("=> loading checkpoint '{}'", options.resume);
    bool rate_from_file = false;
    load_file(options.resume, comm, [&](const Dict& file) {
      if (const auto arch = file.at("arch").toStringRef(); arch != options.arch)
        throw lockstep::CheckpointError(fmt::format("it is a checkpoint of -a {}", arch));
      lockstep::load_state_dict(model, file.at("state_dict"));
      lockstep::load_state_dict(optimizer, file.at("optimizer"));
      if (file.contains("ddp")) ddp.load_state(file.at("ddp"));  // main.py's has none
      const auto group = param_group(file.at("optimizer"));
      if (group.contains("initial_lr")) {  // StepLR's name for the rate of epoch 0
        rate_from_file = true;
        const auto saved = group.at("initial_lr");  // main.py's is a tensor if its --lr is
        base_rate = saved.isTensor() ? saved.toTensor().item<double>() : saved.toScalar().toDouble();
      }
      start_epoch = file.at("epoch").toInt();
      const auto best = file.at("best_acc1");  // Python saves a tensor
      best_acc1 = best.isTensor() ? best.toTensor().item<double>() : best.toDouble();
    });
    world.log.info("=> loaded checkpoint '{}' (epoch {})", options.resume, start_epoch);
    std::string ignored;
    for (const auto& option : options.of_optimizer)
      if (rate_from_file || (option != "--lr" && option != "--scale-lr")) ignored += " " + option;
    if (!ignored.empty())
      world.log.warning(
          "the optimizer's settings are those of the checkpoint, rate {} in epoch 0; ignored:{}", base_rate,
          ignored);
  }
  if (options.evaluate) {
    validate(world, val_loader, model, comm, options.print_freq);
    return;
  }

  const std::filesystem::path folder = options.save_dir;
  world.rank_zero([&] { lockstep::require_writable(folder / "checkpoint.pt", "--save-dir"); });
  for (std::int64_t epoch = start_epoch; epoch < *options.epochs; ++epoch) {
    train_loader.set_epoch(static_cast<std::size_t>(epoch));
    train(world, train_loader, ddp, optimizer, rate, device, epoch, options.print_freq);
    ddp.synchronize();  // on GPUs the check of the last backward is read late
    const double acc1 = validate(world, val_loader, model, comm, options.print_freq);
    const bool is_best = acc1 > best_acc1;
    best_acc1 = std::max(acc1, best_acc1);
    const torch::IValue ddp_state = ddp.state();  // on every rank
    lockstep::agree_with_rank_zero<lockstep::CheckpointError>(comm, [&] {
      Dict file(c10::StringType::get(), c10::AnyType::get());
      file.insert("epoch", epoch + 1);  // the next one
      file.insert("arch", options.arch);
      file.insert("state_dict", lockstep::dict_of(lockstep::state_dict(model)));
      file.insert("best_acc1", best_acc1);
      file.insert("optimizer", lockstep::state_dict(optimizer));
      param_group(file.at("optimizer")).insert("initial_lr", base_rate);
      file.insert("ddp", ddp_state);
      lockstep::torch_save(torch::IValue(file), folder / "checkpoint.pt");
      if (is_best) lockstep::torch_save(torch::IValue(file), folder / "model_best.pt");
    });
  }
}

int main(int argc, char** argv) {
  Options options;
  std::vector<std::string> names;
  for (const auto& [name, architecture] : architectures) names.push_back(name);
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1'000'000});
  const auto any = CLI::Range(std::int64_t{0}, std::int64_t{1'000'000});
  const auto number = CLI::Range(1000.0);
  lockstep::CommandLine app("Trains a ResNet on ImageNet with several processes.");
  auto* data = app.add_option("data", options.data,
                              "folder with train/CLASS/*.jpg and val/CLASS/*.jpg; without: --dummy");
  app.add_option("-a,--arch", options.arch, "model")->check(CLI::IsMember(names));
  app.add_option("-j,--workers", options.workers, "data-loading threads of each host")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1000}));
  app.add_option("--epochs", options.epochs, "epochs to run (90; 2 on random images)")->check(any);
  auto* start_epoch =
      app.add_option("--start-epoch", options.start_epoch, "number of the first epoch, from 0")->check(any);
  app.add_option("-b,--batch-size", options.batch_size, "global batch size (256; 32 on random images)")
      ->check(positive);
  app.add_option("--lr,--learning-rate", options.lr, "learning rate of SGD, a tenth of it every 30 epochs")
      ->check(number);
  app.add_option("--momentum", options.momentum, "momentum of SGD")->check(number);
  app.add_option("--wd,--weight-decay", options.weight_decay, "weight decay of SGD")->check(number);
  app.add_option("--warmup-epochs", options.warmup_epochs, "epochs in which the rate grows from a hundredth")
      ->check(any);
  app.add_flag("--scale-lr", options.scale_lr, "scale --lr by the global batch size / 256");
  app.add_option("-p,--print-freq", options.print_freq, "steps between printed lines")->check(positive);
  auto* resume =
      app.add_option("--resume", options.resume, "checkpoint to resume from")->excludes(start_epoch);
  app.add_flag("-e,--evaluate", options.evaluate, "only evaluate the model on val");
  app.add_option("--pretrained", options.pretrained, "file with the model's state dict, or a checkpoint")
      ->excludes(resume);
  app.add_option("--seed", options.seed, "seed of the model, of the order of images and of their crops")
      ->check(CLI::Range(4'294'967'295));
  app.add_option("--image-size", options.image_size, "pixels of a side (224; 32 on random images)")
      ->check(CLI::Range(std::int64_t{32}, std::int64_t{4096}));
  app.add_option("--save-dir", options.save_dir, "folder of checkpoint.pt and model_best.pt");
  app.add_flag("--dummy", options.dummy, "random images")->excludes(data);
  app.callback([&] {
    for (const double value : {options.lr, options.momentum, options.weight_decay})
      if (std::isnan(value)) throw CLI::ValidationError("--lr, --momentum, --wd", "nan is not a number");
    for (const char* of_optimizer : {"--lr", "--scale-lr", "--momentum", "--wd"})
      if (app.count(of_optimizer) > 0) options.of_optimizer.emplace_back(of_optimizer);
    for (const char* training : {"--epochs", "--start-epoch", "--lr", "--momentum", "--wd", "--warmup-epochs",
                                 "--scale-lr", "--save-dir"})
      if (options.evaluate && app.count(training) > 0)
        throw CLI::ValidationError(training, "with -e it has no use: leave it out");
  });
  if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  options.dummy = options.dummy || options.data.empty();
  if (!options.epochs) options.epochs = options.dummy ? 2 : 90;
  if (!options.batch_size) options.batch_size = options.dummy ? 32 : 256;
  if (!options.image_size) options.image_size = options.dummy ? 32 : 224;
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    const Data data = load_data(world, options);
    lockstep::with_device(world, [&]<class Comm>(Comm comm) { run(world, options, data, std::move(comm)); });
  });
}
