// Trains a small network from a state dict of Python's or of its own, as tests/train/interchange_parity.py
// tells, and writes the losses of each rank and the state dict.
//
// usage: interchange_program --nproc N FOLDER OPTIMIZER FROM FIRST HALF LAST OUTPUT [BREAK|trainer]
//        interchange_program --nproc 1 FOLDER scaler FROM OUTPUT
//        interchange_program --library      (prints the path of the libtorch_cpu.so in use)
//
// Trains the steps FIRST to LAST - 1 of FOLDER/data.pt. FROM and OUTPUT are files in FOLDER: OUTPUT.pt,
// OUTPUT.safetensors, and OUTPUT.RANK with the losses. OUTPUT-half.* are written before step HALF. A FROM without an optimizer is a model alone. BREAK
// makes a mistake on purpose, to see that the comparison finds it: the optimizer's state is `forgotten`, or
// the state of the first two parameters is `swapped`. `trainer` trains with a Trainer and its state dicts, which
// must have FROM's number of steps. `scaler` reads the state of a GradScaler from FROM and writes it to OUTPUT.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/interchange/run_state_dict.hpp"
#include "lockstep/interchange/safetensors.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer.hpp"
#include "lockstep/world/launch.hpp"
#include "support/parity_program.hpp"

namespace {

// The script's Net.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)));
    bn = register_module("bn", torch::nn::BatchNorm2d(8));
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(8 * 36, 16), torch::nn::ReLU(),
                                                             torch::nn::Linear(16, 5)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layers->forward(torch::relu(bn(conv(x))).flatten(1));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d bn{nullptr};
  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const std::vector<at::Tensor>& p) {
  if (name == "sgd")
    return std::make_unique<lockstep::SGD>(
        p, lockstep::SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3, .nesterov = true});
  if (name == "adam")
    return std::make_unique<lockstep::Adam>(p, lockstep::AdamOptions{.lr = 0.01, .amsgrad = true});
  // "adamw": the weights of the layers have decay, other parameters have none.
  return std::make_unique<lockstep::AdamW>(
      std::vector<torch::optim::OptimizerParamGroup>{
          lockstep::parameter_group({p[4], p[6]}, lockstep::AdamWOptions{.lr = 0.02, .weight_decay = 0.1}),
          lockstep::parameter_group(
              {p[0], p[1], p[2], p[3], p[5], p[7]},
              lockstep::AdamWOptions{.lr = 0.01, .betas = {0.8, 0.99}, .weight_decay = 0})},
      lockstep::AdamWOptions{});
}

void load(const std::string& path, Net& model, torch::optim::Optimizer& optimizer, lockstep::CpuComm& comm,
          const std::string& mistake) {
  if (path.ends_with(".safetensors")) {
    lockstep::load_state_dict(model, lockstep::load_safetensors(path, comm).tensors);
    return;
  }
  const auto file = lockstep::torch_load(path, comm).toGenericDict();
  lockstep::load_state_dict(model, file.at("model"));
  if (!file.contains("optimizer") || mistake == "forgotten") return;
  const auto saved = file.at("optimizer").toGenericDict();
  if (mistake == "swapped") {
    auto states = saved.at("state").toGenericDict();
    const auto first = states.at(std::int64_t{1}), second = states.at(std::int64_t{2});
    states.insert_or_assign(std::int64_t{1}, second);
    states.insert_or_assign(std::int64_t{2}, first);
  }
  lockstep::load_state_dict(optimizer, saved);
}

using Words = std::vector<std::string>;

// Rank r's part of each step is a batch of the Trainer's.
void run_trainer(const lockstep::World& world, const Words& words, const c10::impl::GenericDict& data) {
  const std::string folder = words.at(0) + "/", output = folder + words.at(6);
  const auto inputs = data.at("inputs").toTensor(), targets = data.at("targets").toTensor();
  const lockstep::MakeOptimizer make{
      [&](const std::vector<at::Tensor>& parameters) { return make_optimizer(words.at(1), parameters); }};
  lockstep::Trainer trainer{
      world, {.epochs = 1, .batch_size = inputs.size(2), .shuffle = false, .progress = false}, Net(), make};
  const std::int64_t first = std::stoll(words.at(3)), half = std::stoll(words.at(4)),
                     last = std::stoll(words.at(5));
  if (first == 0)
    lockstep::load_state_dict(
        trainer.model(),
        lockstep::torch_load(folder + words.at(2), trainer.comm()).toGenericDict().at("model"));
  else
    lockstep::load_state_dict(trainer, folder + words.at(2));
  if (trainer.step() != first) throw lockstep::CheckpointError("the file has another number of steps");

  std::ofstream losses(output + "." + std::to_string(world.rank()), std::ios::binary);
  const auto fit = [&](std::int64_t from, std::int64_t to) {
    const auto samples = [&](const at::Tensor& all) {  // rank r takes the samples r, r + ranks, ...
      return all.slice(0, from, to).transpose(1, 2).flatten(0, 2).contiguous();
    };
    lockstep::TensorDataset steps{samples(inputs), samples(targets)};
    trainer.fit(
        steps,
        [](Net& net, const auto& batch) {
          return torch::nn::functional::cross_entropy(net(batch.data), batch.target);
        },
        lockstep::OnStep{[&](const lockstep::StepReport& report) {
          const auto loss = report.local[0].reported.contiguous();
          losses.write(static_cast<const char*>(loss.const_data_ptr()), sizeof(float));
        }});
  };
  if (half > first) {
    fit(first, half);
    lockstep::save_state_dict(trainer, output + "-half.pt");
  }
  fit(std::max(first, half), last);
  lockstep::save_state_dict(trainer, output + ".pt");
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words = lockstep_test::own_words(argc, argv);
  if (words.at(0) == "--library") {
    lockstep_test::print_library();
    return 0;
  }
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    if (words.at(1) == "scaler") {
      lockstep::GradScaler scaler;
      lockstep::load_state_dict(scaler, lockstep::torch_load(words[0] + "/" + words.at(2)));
      lockstep::torch_save(lockstep::state_dict(scaler), words[0] + "/" + words.at(3));
      return;
    }
    const std::string folder = words.at(0) + "/", output = folder + words.at(6);
    const std::string mistake = words.size() > 7 ? words[7] : "";
    lockstep::CpuComm comm{world};
    const auto data = lockstep::torch_load(folder + "data.pt", comm).toGenericDict();
    if (mistake == "trainer") return run_trainer(world, words, data);
    Net model;
    lockstep::DistributedDataParallel ddp{model, comm};
    const auto optimizer = make_optimizer(words.at(1), ddp.parameters());
    load(folder + words.at(2), model, *optimizer, comm, mistake);

    const auto save = [&](const std::string& name) {
      c10::impl::GenericDict file(c10::StringType::get(), c10::AnyType::get());
      file.insert("model", lockstep::dict_of(lockstep::state_dict(model, "module.")));
      file.insert("optimizer", lockstep::state_dict(*optimizer));
      lockstep::torch_save(c10::IValue(file), name + ".pt", comm);
      lockstep::save_safetensors(lockstep::state_dict(model), name + ".safetensors", comm);
    };
    std::ofstream losses(output + "." + std::to_string(world.rank()), std::ios::binary);
    for (std::int64_t step = std::stoll(words.at(3)); step < std::stoll(words.at(5)); ++step) {
      if (step == std::stoll(words.at(4))) save(output + "-half");
      const auto part = [&](const char* name) { return data.at(name).toTensor()[step][world.rank()]; };
      optimizer->zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(ddp(part("inputs")), part("targets"));
      ddp.backward(loss);
      optimizer->step();
      losses.write(static_cast<const char*>(loss.const_data_ptr()), sizeof(float));
    }
    save(output);
  });
}
