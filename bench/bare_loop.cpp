// The loop of examples/five_lines.cpp in LibTorch alone: what bench/compile.py compares compile times with.
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

// 2,048 points of a noisy line in 20 dimensions.
class Points : public torch::data::datasets::Dataset<Points> {
 public:
  Points() {
    torch::manual_seed(1);
    const auto slope = torch::linspace(-1, 1, 20).unsqueeze(1);
    inputs_ = torch::rand({2048, 20});
    targets_ = inputs_.matmul(slope) + 0.01 * torch::randn({2048, 1});
  }
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {inputs_[i], targets_[i]};
  }
  [[nodiscard]] std::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(inputs_.size(0));
  }

 private:
  torch::Tensor inputs_, targets_;
};

int main() {
  auto data = Points().map(torch::data::transforms::Stack<>());
  auto model = torch::nn::Linear(20, 1);
  auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(std::move(data), 32);
  auto optimizer = torch::optim::SGD(model->parameters(), 0.1);

  for (int epoch = 0; epoch < 10; ++epoch) {
    double sum = 0;
    int steps = 0;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      auto loss = torch::mse_loss(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>();
      ++steps;
    }
    std::printf("Epoch %d | Batchsize: 32 | Steps: %d | Loss %.5f\n", epoch, steps, sum / steps);
  }
}
