#include "lockstep/train/script_model.hpp"

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>

#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "train/common_folder.hpp"
#include "train/regression.hpp"

namespace script_model_ranks_test {

namespace {

// The network tanh_network(1, 4, seed) as TorchScript, with a buffer that each training forward replaces.
torch::jit::Module script_of(const torch::nn::Sequential& net) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  const auto linear = [&](const std::string& name, torch::nn::Module& from) {
    torch::jit::Module layer(name, unit);
    for (const auto& item : from.named_parameters())
      layer.register_parameter(item.key(), item.value().detach().clone().requires_grad_(true), false);
    layer.define("def forward(self, x):\n    return torch.linear(x, self.weight, self.bias)\n");
    return layer;
  };
  torch::jit::Module script("net", unit);
  script.register_module("0", linear("first", *net->ptr(0)));
  script.register_module("2", linear("last", *net->ptr(2)));
  script.register_buffer("mean", torch::zeros({}, torch::kDouble));
  script.register_attribute("training", c10::BoolType::get(), true);
  script.define(R"(
def forward(self, x):
    if self.training:
        self.mean = self.mean * 0.5 + x.mean()
    return getattr(self, "2").forward(torch.tanh(getattr(self, "0").forward(x)))
)");
  return script;
}

lockstep::TrainerOptions options() {
  return {.epochs = 2, .batch_size = 3, .lr = 0.05, .seed = 4, .progress = false};
}

}  // namespace

TEST_CASE("a Trainer trains a TorchScript module to the bits of the torch::nn one") {
  torch::jit::setGraphExecutorOptimize(false);  // an optimized graph rounds in another way
  const auto& world = test_world();
  const auto data = curve(12 * world.size());
  CommonFolder folder(world);
  auto net = tanh_network(1, 4, 7);
  lockstep::ScriptModel model(script_of(net));
  CHECK(model->named_parameters().keys() == net->named_parameters().keys());
  lockstep::Trainer scripted(world, options(), model);
  lockstep::Trainer plain(world, options(), net);
  const auto save = [&](const lockstep::StepReport& report) {
    if (report.step == 5) scripted.save_checkpoint(folder / "run.pt");
  };
  const auto loss = scripted.fit(data, squared_error, lockstep::OnStep{save}).loss;
  CHECK(loss == plain.fit(data, squared_error).loss);
  const auto trained = model->parameters(), expected = net->parameters();
  for (std::size_t i = 0; i < trained.size(); ++i) CHECK(trained[i].equal(expected[i]));
  // The script itself is trained, and every rank has rank 0's buffer after an evaluation.
  const auto error = [](const at::Tensor& output, const auto& batch) {
    return torch::mse_loss(output, batch.target);
  };
  CHECK(scripted.evaluate(data, error) == plain.evaluate(data, error));
  CHECK(model->script().is_training());
  CHECK(model->script().attr("mean").toTensor().equal(model->buffers()[0]));
  lockstep::check_same_parameters(scripted.comm(), lockstep::unique_buffers(*model), 0);
  CHECK(model->buffers()[0].item<double>() != 0);

  lockstep::Trainer resumed(world, options(), lockstep::ScriptModel(script_of(tanh_network(1, 4, 8))));
  resumed.load_checkpoint(folder / "run.pt");
  CHECK(resumed.fit(data, squared_error).loss == loss);
  resumed.ddp().sync_buffers();
  CHECK(resumed.model()->parameters()[0].equal(trained[0]));
  CHECK(resumed.model()->script().attr("mean").toTensor().equal(model->buffers()[0]));
}

}  // namespace script_model_ranks_test
