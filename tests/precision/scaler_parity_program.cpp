// Scales, skips and trains in half precision as tests/precision/scaler_parity.py tells, and writes what came of it.
//
// usage: scaler_parity_program FOLDER [BREAK]
//        scaler_parity_program --library      (prints the path of the libtorch_cpu.so in use)
//
// BREAK makes a mistake on purpose, to see that the comparison finds it: the scale is `never` updated, or the
// gradients are `kept` scaled.
#include <torch/torch.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "support/parity_program.hpp"

namespace {

std::string folder, mistake;

at::Tensor read(const std::string& name, std::vector<std::int64_t> shape, at::ScalarType type = at::kFloat) {
  std::ifstream file(folder + "/" + name, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  const std::string bytes = content.str();
  at::Tensor tensor = torch::empty(shape, type);
  if (tensor.nbytes() != bytes.size()) throw std::runtime_error(name + " has another size");
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

void write(std::ofstream& file, const at::Tensor& tensor) {
  const at::Tensor whole = tensor.detach().contiguous();
  file.write(static_cast<const char*>(whole.const_data_ptr()), static_cast<std::streamsize>(whole.nbytes()));
}

/// Two losses and two optimizers under one scaler; some gradients are infinite or not numbers.
void scale_and_skip(std::int64_t steps) {
  const at::Tensor gradients[] = {read("gradients.0", {steps, 5, 3}), read("gradients.1", {steps, 7})};
  at::Tensor parameters[] = {read("parameter.0", {5, 3}).requires_grad_(),
                             read("parameter.1", {7}).requires_grad_()};
  lockstep::SGD one(std::vector{parameters[0]}, {.lr = 0.1, .momentum = 0.9});
  lockstep::SGD two(std::vector{parameters[1]}, {.lr = 0.01});
  lockstep::GradScaler scaler({.init_scale = 1024, .growth_interval = 4});
  std::ofstream out(folder + "/scaler.lockstep", std::ios::binary);
  for (std::int64_t step = 0; step < steps; ++step) {
    one.zero_grad();
    two.zero_grad();
    for (int i : {0, 1}) scaler.scale((parameters[i] * gradients[i][step]).sum()).backward();
    if (step % 3 == 0) {
      scaler.unscale(one);
      torch::nn::utils::clip_grad_norm_({parameters[0]}, 1.0);
    }
    if (mistake == "kept") {
      one.step();
      two.step();
      scaler.forget();
    } else {
      scaler.step(one);
      scaler.step(two);
      if (mistake != "never") scaler.update();
      if (mistake == "never") scaler.update(1024.0);
    }
    write(out, torch::tensor(scaler.get_scale(), torch::kFloat));
    write(out, torch::tensor(scaler.growth_tracker(), torch::kInt));
    for (const at::Tensor& parameter : parameters) write(out, parameter);
  }
}

/// The same under two optimizers that divide the gradients in their steps.
template <class One, class OneOptions>
void scale_fused(const std::string& name, std::int64_t steps, OneOptions options, bool nesterov) {
  const at::Tensor gradients[] = {read("gradients.0", {steps, 5, 3}), read("gradients.1", {steps, 7})};
  at::Tensor parameters[] = {read("parameter.0", {5, 3}).requires_grad_(),
                             read("parameter.1", {7}).requires_grad_()};
  options.implementation = lockstep::Implementation::fused;
  One one(std::vector{parameters[0]}, options);
  lockstep::SGD two(
      std::vector{parameters[1]},
      {.lr = 0.01, .momentum = 0.9, .nesterov = nesterov, .implementation = lockstep::Implementation::fused});
  lockstep::GradScaler scaler({.init_scale = 1024, .growth_interval = 4});
  std::ofstream out(folder + "/" + name + ".lockstep", std::ios::binary);
  for (std::int64_t step = 0; step < steps; ++step) {
    one.zero_grad();
    two.zero_grad();
    for (int i : {0, 1}) scaler.scale((parameters[i] * gradients[i][step]).sum()).backward();
    if (step % 3 == 0) {
      scaler.unscale(one);
      torch::nn::utils::clip_grad_norm_({parameters[0]}, 1.0);
    }
    if (mistake == "kept") {
      one.step_scaled({{}, torch::zeros({})});
      scaler.step(two);
    } else {
      scaler.step(one);
      scaler.step(two);
    }
    scaler.update(mistake == "never" ? std::optional(1024.0) : std::nullopt);
    write(out, torch::tensor(scaler.get_scale(), torch::kFloat));
    write(out, torch::tensor(scaler.growth_tracker(), torch::kInt));
    for (const at::Tensor& parameter : parameters) write(out, parameter);
    const auto& state =
        static_cast<lockstep::AdamState&>(*one.state().at(parameters[0].unsafeGetTensorImpl()));
    for (const at::Tensor& tensor : {state.step, state.exp_avg, state.exp_avg_sq, state.max_exp_avg_sq})
      if (tensor.defined()) write(out, tensor);
    write(out, static_cast<lockstep::SGDState&>(*two.state().at(parameters[1].unsafeGetTensorImpl()))
                   .momentum_buffer);
  }
}

template <class Precision>
void train(const std::string& name, std::int64_t steps, Precision precision) {
  torch::nn::Sequential net(torch::nn::Linear(64, 96), torch::nn::ReLU(), torch::nn::Linear(96, 10));
  {
    const torch::NoGradGuard no_grad;
    int i = 0;
    for (at::Tensor& parameter : net->parameters())
      parameter.copy_(read("net." + std::to_string(i++), parameter.sizes().vec()));
  }
  const at::Tensor inputs = read("inputs", {steps, 32, 64}), labels = read("labels", {steps, 32}, at::kLong);
  lockstep::SGD optimizer(net->parameters(), {.lr = 0.1, .momentum = 0.9});
  std::ofstream out(folder + "/" + name + ".lockstep", std::ios::binary);
  for (std::int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = precision.forward(
        [&] { return torch::cross_entropy_loss(net->forward(inputs[step]), labels[step]); });
    precision.scale(loss).backward();
    precision.step(optimizer);
    for (const at::Tensor& parameter : net->parameters()) write(out, parameter);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto words = lockstep_test::own_words(argc, argv);
  if (words.at(0) == "--library") {
    at::ones({1});
    lockstep_test::print_library();
    return 0;
  }
  folder = words[0];
  if (words.size() > 1) mistake = words[1];
  torch::set_num_threads(1);
  scale_and_skip(60);
  scale_fused<lockstep::AdamW>("fused-adamw", 60, lockstep::AdamWOptions{.lr = 0.01}, false);
  scale_fused<lockstep::Adam>("fused-adam", 60,
                              lockstep::AdamOptions{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true}, true);
  train("bf16", 40, lockstep::Bf16());
  train("tf32", 40, lockstep::Tf32());
  // Starts where some of the first losses overflow.
  train("fp16", 40, lockstep::Fp16({.init_scale = 16777216, .growth_interval = 8}));
}
