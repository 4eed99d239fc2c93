// What saving costs a training that goes on, beside a copy of as many bytes.
//
//   bench_checkpointer [FOLDER]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "lockstep/lockstep.hpp"
#include "lockstep/train/checkpointer.hpp"

namespace {

template <class Work>
double milliseconds(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}
double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::launch(argc, argv, [&](const lockstep::World& world, int count, char** arguments) {
    const std::filesystem::path folder =
        (count > 1 ? std::filesystem::path(arguments[1]) : std::filesystem::temp_directory_path()) /
        "lockstep-bench-checkpointer";
    std::filesystem::remove_all(folder);
    const auto adam = lockstep::MakeOptimizer{
        [](std::vector<torch::Tensor> parameters) { return lockstep::Adam(std::move(parameters)); }};
    lockstep::Trainer trainer{
        world, {.batch_size = 8, .progress = false}, torch::nn::Linear(4096, 4096), adam};
    lockstep::TensorDataset data{torch::randn({8, 4096}), torch::randn({8, 4096})};
    trainer.fit(data, [](auto& model, auto& batch) {
      return torch::mse_loss(model->forward(batch.data), batch.target);
    });
    lockstep::Checkpointer checkpoints{trainer, folder};
    checkpoints.save();  // gets its memory
    checkpoints.wait();
    // The model and two moments of Adam.
    const std::vector<char> from(3 * (4096 * 4097) * sizeof(float), 1);
    std::vector<char> to(from.size(), 2);
    std::vector<double> copies, saves, whole;
    for (int round = 0; round < 7; ++round) {
      copies.push_back(milliseconds([&] { std::memcpy(to.data(), from.data(), from.size()); }));
      saves.push_back(milliseconds([&] { checkpoints.save(); }));
      checkpoints.wait();
      whole.push_back(milliseconds([&] { trainer.save_checkpoint(folder / "whole.ckpt"); }));
    }
    std::printf("%.0f MB: Checkpointer::save %.2f of the time of memcpy (%.1f ms), save_checkpoint %.1f\n",
                static_cast<double>(from.size()) / 1e6, median(saves) / median(copies), median(copies),
                median(whole) / median(copies));
    std::filesystem::remove_all(folder);
  });
}
