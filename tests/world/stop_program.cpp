// A training that stops on a signal, saves, and goes on where it stopped when it is started again:
//   stop_program CHECKPOINT [MILLISECONDS_PER_STEP [STEPS_BETWEEN_AGREEMENTS [SIGNAL ...]]]
// With KILLED_AFTER=STEP it saves every 20 steps, and the last rank of the first start is killed after that step.
#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

#include "lockstep/lockstep.hpp"

int main(int argc, char** argv) {
  return lockstep::launch(argc, argv, [](const lockstep::World& world, int argc, char** argv) {
    if (argc < 2) throw lockstep::UsageError("give the path of the checkpoint");
    const std::string path = argv[1];
    const int pause = argc > 2 ? std::stoi(argv[2]) : 0;
    const auto number = [](const char* name) { return std::getenv(name) ? std::stoi(std::getenv(name)) : 0; };
    const int killed_after = number("KILLED_AFTER"), restarts = number("TORCHELASTIC_RESTART_COUNT");
    torch::manual_seed(1);
    const auto inputs = torch::rand({240, 4});
    lockstep::TensorDataset data{inputs, inputs.sum(1, true)};
    lockstep::Trainer trainer{world,
                              {.epochs = 2, .batch_size = 2, .lr = 0.1, .seed = 3, .progress = false},
                              torch::nn::Linear(4, 1)};
    if (trainer.load_checkpoint_if_exists(path)) world.log.info("resumed");
    lockstep::StopOptions options;
    if (argc > 3) options.every = std::stoi(argv[3]);
    if (argc > 4) options.signals.clear();
    for (int i = 4; i < argc; ++i) options.signals.push_back(std::stoi(argv[i]));
    lockstep::StopOnSignal stop{trainer.comm(), [&] { trainer.save_checkpoint(path); }, options};
    lockstep::OnStep count{[&](const lockstep::StepReport& report) {
      if (report.step % 10 == 0) world.log.all().info("step {}", report.step);
      if (killed_after > 0 && report.step % 20 == 0) trainer.save_checkpoint(path);
      if (killed_after > 0 && report.step == killed_after && restarts == 0 &&
          world.rank() == world.size() - 1)
        raise(SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
    }};
    const auto report = trainer.fit(
        data,
        [](torch::nn::Linear& model, const auto& batch) {
          return torch::mse_loss(model(batch.data), batch.target);
        },
        count, stop);
    world.log.info("finished after {} steps, weights {:.17g}", report.step,
                   trainer.model()->weight.sum().item<double>());
  });
}
