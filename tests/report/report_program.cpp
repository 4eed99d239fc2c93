// Trains on `--nproc` ranks with every kind of report, into the folder that is its first word; the second is the
// title of the page. The third and fourth are epochs: after one it saves a checkpoint there, with which the next
// run begins, and after the other it ends. The last rank is late in every second step. tensorboard_parity.py and
// pages_parity.py read what it wrote.
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>

#include "lockstep/report/metrics_files.hpp"
#include "lockstep/report/run_report.hpp"
#include "lockstep/report/tensorboard.hpp"
#include "lockstep/report/trace.hpp"
#include "lockstep/train/trainer.hpp"
#include "lockstep/world/launch.hpp"
#include "report/wide_network.hpp"
#include "support/parity_program.hpp"

static lockstep::TensorDataset three_classes(std::int64_t samples) {
  torch::manual_seed(1);
  const auto data = torch::randn({samples, 6});
  return {data, data.slice(1, 0, 3).argmax(1)};
}

int main(int argc, char** argv) {
  const auto words = lockstep_test::own_words(argc, argv);
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    const std::filesystem::path folder = words.at(0);
    const auto train = three_classes(512);
    lockstep::TrainerOptions options{.epochs = 4, .batch_size = 32, .lr = 0.1, .seed = 5, .progress = false};
    options.ddp.bucket_cap_mb = {0.3};
    lockstep::Trainer trainer{world, options, wide_network(6, 256)};
    const auto checkpoint = folder / "checkpoint.pt";
    trainer.load_checkpoint_if_exists(checkpoint);

    lockstep::TensorBoard board{world, folder / "board"};
    lockstep::JsonLines json{world, folder / "metrics.jsonl"};
    lockstep::CsvLog csv{world, folder / "metrics.csv"};
    lockstep::RunReport page{trainer.comm(),
                             folder / "report.html",
                             {.title = words.size() > 1 ? words[1] : "three classes </script>"}};
    lockstep::Trace trace{trainer.comm(), folder / "trace.json", {.from = 4, .to = 8}};
    const auto evaluate = [&](const lockstep::EpochReport& epoch) {
      const double accuracy = trainer.evaluate(train, lockstep::Accuracy{});
      board.add_scalar("test/accuracy", accuracy, epoch.step - 1);
      json.add_scalar("test/accuracy", accuracy, epoch.step);
      csv.add_scalar("test/accuracy", accuracy, epoch.step);
      page.add_scalar("accuracy", accuracy, epoch.step);
      const auto is_after = [&](std::size_t word) {
        return words.size() > word && epoch.epoch == std::stoll(words[word]);
      };
      if (is_after(2)) trainer.save_checkpoint(checkpoint);
      return is_after(3) ? lockstep::FitAction::stop : lockstep::FitAction::proceed;
    };
    int calls = 0;
    const auto loss = [&](torch::nn::Sequential& net, const auto& batch) {
      if (world.rank() == world.size() - 1 && ++calls % 2 == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(25));
      return torch::cross_entropy_loss(net->forward(batch.data), batch.target);
    };
    trainer.fit(train, loss, board, json, csv, trace, lockstep::OnEpoch{evaluate}, page);
    // A loop by hand that saved after its third step, went on to the sixth, and is resumed.
    for (const std::int64_t first : {0, 3}) {
      lockstep::TensorBoard resumed{world, folder / "by_hand", {.purge_step = first}};
      for (std::int64_t step = first; step < 6 - first / 3; ++step)
        resumed.add_scalar("loss", 1. * first, step);
    }
    board.add_scalar("test/nan", std::numeric_limits<double>::quiet_NaN(), -1);
    json.add_scalar("test/nan", std::numeric_limits<double>::quiet_NaN(), 0);
  });
}
