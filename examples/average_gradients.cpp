// Data-parallel training by hand: each rank computes gradients on its own batches, and all_reduce averages
// them. The programs of the tutorial, which trains without DistributedDataParallel and DistributedSampler:
//   average_gradients processes              run_multiprocess.py: four processes that do not know each other
//   average_gradients group                  multiprocess_comm.py: the same with a process group
//   average_gradients --epochs 15 --samples 60000   multiprocess_training.py; default: 1 epoch of 15,000
//   average_gradients --plot curve.svg       and its curve of loss and accuracy, or as curve.csv
//   average_gradients --test                 and the accuracy of rank 0's model on the test digits
//   average_gradients --compare --nproc 3    what DistributedDataParallel and SyncBatchNorm do differently
// All of them also run under torchrun --no-python, srun and mpirun.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "lockstep/cli.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "lockstep/lockstep.hpp"

namespace nn = torch::nn;
using lockstep::CpuComm, lockstep::World;

struct Options {
  std::string program = "train", plot;
  int epochs = 1;
  std::int64_t batch_size = 100;
  std::size_t samples = 15'000;
  bool compare = false;
  lockstep::MnistSource data;
  bool test = false;
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

void average_gradients(ConvNet& model, CpuComm& comm) {
  for (auto& parameter : model->parameters()) {
    comm.all_reduce(parameter.grad(), lockstep::ReduceOp::sum).synchronize();
    parameter.mutable_grad().div_(comm.size());
  }
}

double accuracy(const torch::Tensor& outputs, const torch::Tensor& labels) {
  return static_cast<double>(outputs.argmax(1).eq(labels).sum().item<std::int64_t>()) /
         static_cast<double>(labels.size(0));
}

/// Rank 0's loss and accuracy of one step.
struct Point {
  float loss;
  double accuracy;
};

std::string csv(const std::vector<Point>& curve) {
  std::string text = "step,loss,accuracy\n";
  for (std::size_t i = 0; i < curve.size(); ++i)  // nine digits keep every bit of a float
    text += fmt::format("{},{:.9g},{:.9g}\n", i + 1, curve[i].loss, curve[i].accuracy);
  return text;
}

std::string svg(const std::vector<Point>& curve, int epochs) {
  constexpr double left = 40, top = 20, width = 720, height = 340;
  double most = 1e-9;
  for (const Point& point : curve) most = std::max<double>(most, point.loss);
  const auto line = [&](const char* colour, auto&& share) {
    std::string points;
    for (std::size_t i = 0; i < curve.size(); ++i)
      points += fmt::format("{:.1f},{:.1f} ",
                            left + width * static_cast<double>(i + 1) / static_cast<double>(curve.size()),
                            top + height * (1 - share(curve[i])));
    return fmt::format("<polyline fill=\"none\" stroke=\"{}\" points=\"{}\"/>\n", colour, points);
  };
  const auto text = [](double x, double y, const char* colour, const std::string& words) {
    return fmt::format("<text x=\"{:.0f}\" y=\"{}\" fill=\"{}\">{}</text>\n", x, y, colour, words);
  };
  std::string ticks;  // the end of each epoch
  for (int epoch = 1; epoch < epochs; ++epoch)
    ticks += fmt::format("M{:.1f} {}v5", left + width * epoch / epochs, top + height);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"400\" font-family=\"sans-serif\" "
         "font-size=\"12\">\n<rect width=\"800\" height=\"400\" fill=\"white\"/>\n" +
         fmt::format("<path d=\"M{} {}v{}h{}{}\" fill=\"none\" stroke=\"black\"/>\n", left, top, height,
                     width, ticks) +
         line("firebrick", [&](const Point& point) { return point.loss / most; }) +
         line("steelblue", [](const Point& point) { return point.accuracy; }) +
         text(left + 8, top - 6, "firebrick", fmt::format("loss, 0 to {:.2f}", most)) +
         text(left + 150, top - 6, "steelblue", "accuracy, 0 to 1") +
         text(left + width - 70, top + height + 18, "black", fmt::format("step {}", curve.size())) +
         text(left, top + height + 18, "black", fmt::format("epochs: {}", epochs)) + "</svg>\n";
}

auto make_loader(const lockstep::Mnist& mnist, const Options& options) {
  // Every rank sees all digits, in an order that follows from its seed: the order of
  // DataLoader(shuffle=True).
  return lockstep::DataLoader{mnist.train,
                              lockstep::RandomSampler{std::min(mnist.train.size(), options.samples)},
                              {.batch_size = options.batch_size}};
}

void train(const World& world, const Options& options, const lockstep::Mnist& mnist) {
  CpuComm comm{world};
  const torch::Device device = torch::kCPU;
  world.log.info("{}", device.str());
  torch::manual_seed(0);  // the same model on every rank; nothing broadcasts it
  ConvNet model;
  torch::manual_seed(static_cast<std::uint64_t>(world.rank()));  // an order of the digits for each rank
  auto loader = make_loader(mnist, options);
  // Has the bits of Python's SGD, which torch::optim::SGD does not promise.
  lockstep::SGD optimizer(model->parameters(), {.lr = 0.001, .momentum = 0.9});
  std::vector<Point> curve;
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    std::size_t step = 0;
    for (auto& batch : loader) {
      const auto outputs = model(batch.data);
      const auto loss = nn::functional::cross_entropy(outputs, batch.target);
      optimizer.zero_grad();
      loss.backward();
      curve.push_back({loss.item<float>(), accuracy(outputs, batch.target)});
      average_gradients(model, comm);
      optimizer.step();
      if (++step % 50 == 0)
        world.log.info("Epoch [{}/{}], Step [{}/{}], Loss: {:.4f},acc:{:.2f}", epoch + 1, options.epochs,
                       step, loader.size(), curve.back().loss, curve.back().accuracy);
    }
  }
  if (!options.plot.empty())
    world.rank_zero([&] {
      lockstep::write_file_atomically(
          options.plot, options.plot.ends_with(".csv") ? csv(curve) : svg(curve, options.epochs));
    });
  if (options.test)  // rank 0's model: the ranks' running statistics differ
    world.log.info(
        "Accuracy of the test: {:.2f} %",
        100 * lockstep::evaluate(model, comm, mnist.test, {.batch_size = 100}, lockstep::Accuracy{}));
}

/// The largest difference between two ranks' running statistics.
double spread_of_statistics(ConvNet& model, CpuComm& comm) {
  double spread = 0;
  for (const auto& buffer : model->buffers()) {
    auto most = buffer.to(torch::kDouble), least = most.clone();
    comm.all_reduce(most, lockstep::ReduceOp::max).synchronize();
    comm.all_reduce(least, lockstep::ReduceOp::min).synchronize();
    spread = std::max(spread, (most - least).max().item<double>());
  }
  return spread;
}

/// One backward by hand and one through DistributedDataParallel, of the same model on the same batches.
void compare(const World& world, const Options& options, const lockstep::Mnist& mnist) {
  CpuComm comm{world};
  const auto build = [] {
    torch::manual_seed(0);
    return ConvNet();
  };
  ConvNet by_hand = build(), multiplied = build(), alone = build(), bucketed = build(),
          synchronized = build();
  // A limit of one byte gives each gradient a bucket of its own.
  lockstep::DistributedDataParallel ddp_alone{alone, comm, {.bucket_cap_mb = {1e-6, 1e-6}}};
  lockstep::DistributedDataParallel ddp_bucketed{bucketed, comm};
  torch::manual_seed(static_cast<std::uint64_t>(world.rank()));
  auto loader = make_loader(mnist, options);
  const auto batch = *loader.begin();
  const auto loss = [&](const torch::Tensor& outputs) {
    return nn::functional::cross_entropy(outputs, batch.target);
  };

  loss(by_hand(batch.data)).backward();
  average_gradients(by_hand, comm);
  loss(multiplied(batch.data)).backward();
  for (auto& parameter : multiplied->parameters()) {
    parameter.mutable_grad().mul_(1.0 / comm.size());
    comm.all_reduce(parameter.grad(), lockstep::ReduceOp::sum).synchronize();
  }
  ddp_alone.backward(loss(ddp_alone(batch.data)));
  ddp_bucketed.backward(loss(ddp_bucketed(batch.data)));

  const auto report = [&](const char* what, ConvNet& one, ConvNet& other) {
    std::size_t same = 0;
    double difference = 0;
    const auto ours = one->parameters(), theirs = other->parameters();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      same += torch::equal(ours[i].grad(), theirs[i].grad()) ? 1 : 0;
      difference = std::max(difference, (ours[i].grad() - theirs[i].grad()).abs().max().item<double>());
    }
    world.log.info("{}: {} of {} gradients have the same bits, largest difference {:.1e}", what, same,
                   ours.size(), difference);
  };
  world.log.info("gradients at {} ranks, compared with DistributedDataParallel with a bucket per gradient:",
                 comm.size());
  // DistributedDataParallel multiplies by 1 / size before the sum. If size is a power of two, both ways are
  // exact.
  report("  by hand, sum, then divided by size", by_hand, alone);
  report("  by hand, multiplied by 1 / size, then sum", multiplied, alone);
  // From three ranks on, Gloo's ring adds the ranks in an order that depends on an element's place in the
  // buffer.
  report("  DistributedDataParallel with its default buckets", bucketed, alone);

  // Each rank normalizes by the statistics of its own batches. DistributedDataParallel broadcasts rank 0's
  // before each forward, and the forward makes them differ again; SyncBatchNorm computes them over the
  // batches of all ranks.
  lockstep::convert_sync_batchnorm(synchronized, comm);
  synchronized(batch.data);
  world.log.info("running statistics of BatchNorm: {:.3g} apart at most",
                 spread_of_statistics(by_hand, comm));
  world.log.info("running statistics of SyncBatchNorm: {:.3g} apart at most",
                 spread_of_statistics(synchronized, comm));
}

void introduce(int rank, int size) {
  std::cout << fmt::format("world size:{}. I'm rank {}.\n", size, rank) << std::flush;
}

/// run_multiprocess.py: the processes do not know each other. Only a communicator connects them.
void run_process(const World& world) {
  introduce(world.rank(), world.size());
}

/// multiprocess_comm.py: the processes form a group.
void run_in_group(const World& world) {
  const CpuComm comm{world};  // init_process_group: blocks until all ranks have joined
  introduce(comm.rank(), comm.size());
}

/// multiprocess_training.py, or its comparison with DistributedDataParallel.
void run_training(const World& world, const Options& options) {
  if (!options.plot.empty()) world.rank_zero([&] { lockstep::require_writable(options.plot, "--plot"); });
  const lockstep::Mnist mnist = lockstep::load_mnist(world, options.data);
  if (options.samples < mnist.train.size())
    world.log.info("training on the first {} of {} digits", options.samples, mnist.train.size());
  (options.compare ? compare : train)(world, options, mnist);
}

int main(int argc, char** argv) {
  Options options;
  lockstep::LaunchOptions launch_options{.nproc = 4};  // the tutorial starts four
  lockstep::CommandLine app(
      "Trains a small convolutional network, its gradients averaged by hand with all_reduce.");
  app.add_option("program", options.program, "the tutorial's program")
      ->check(CLI::IsMember({"processes", "group", "train"}));
  const auto* epochs =
      app.add_option("-e,--epochs", options.epochs, "epochs to train; the tutorial's number is 15")
          ->check(CLI::Range(1'000'000));
  const auto* batch_size =
      app.add_option("-b,--batch-size,--batch_size", options.batch_size, "batch size of each process")
          ->check(CLI::Range(1, 1'000'000));
  const auto* samples = app.add_option("--samples", options.samples,
                                       "training digits to use at most; the tutorial's number is 60000")
                            ->check(CLI::Range(1, 1'000'000));
  const auto* compared =
      app.add_flag("--compare", options.compare, "compare one backward with DistributedDataParallel's");
  const auto* plot =
      app.add_option("--plot", options.plot, "file for the curve of loss and accuracy, .svg or .csv");
  const auto* data_dir = app.add_option("--data-dir,--data_dir", options.data.folder,
                                        "folder with MNIST's four files, plain or .gz");
  const auto* test =
      app.add_flag("--test", options.test, "print the accuracy on the test digits after training");
  app.callback([&] {
    if (!options.plot.empty() && !options.plot.ends_with(".svg") && !options.plot.ends_with(".csv"))
      throw CLI::ValidationError("--plot", options.plot + " ends neither in .svg nor in .csv");
    const auto refuse = [](const std::vector<const CLI::Option*>& useless, const std::string& program) {
      for (const auto* option : useless)
        if (option->count() > 0)
          throw CLI::ValidationError(option->get_name(), program + " does not use it: leave it out");
    };
    if (options.program != "train")
      refuse({epochs, batch_size, samples, compared, plot, data_dir, test}, options.program);
    if (options.compare) refuse({epochs, plot, test}, "--compare");
  });
  if (const auto code = lockstep::parse(app, argc, argv, launch_options)) return *code;
  // The lines of the other programs name their rank: no prefix.
  if (options.program != "train") launch_options.prefix = lockstep::Prefix::never;
  return lockstep::launch(
      argc, argv,
      [&](const World& world) {
        if (options.program == "processes") return run_process(world);
        if (options.program == "group") return run_in_group(world);
        run_training(world, options);
      },
      launch_options);
}
