// Steps, clips, averages and schedules as tests/optim/optim_parity.py tells, and writes what came of it.
//
// usage: optim_parity_program FOLDER [BREAK]
//        optim_parity_program --library      (prints the path of the libtorch_cpu.so in use)
//
// BREAK makes a mistake on purpose, to see that the comparison finds it: `eps` a tenth larger, the `step`
// counted twice, the last parameter `skipped`, or a `float` rate.
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/optim/averaging.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/schedule.hpp"
#include "support/parity_program.hpp"

namespace {

std::string folder, mistake;

// The layout that the script names; parameter 3 is channels-last.
const std::vector<std::vector<std::int64_t>> shapes{{64, 96}, {96}, {7}, {4, 3, 5, 5}, {3, 5}, {1}, {33000}};

at::ScalarType dtype_of(const std::string& name) {
  if (name == "float64") return at::kDouble;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "complex64") return at::kComplexFloat;
  return at::kFloat;
}

lockstep::Implementation implementation_of(const std::string& name) {
  if (name == "foreach") return lockstep::Implementation::foreach;
  if (name == "fused") return lockstep::Implementation::fused;
  return lockstep::Implementation::automatic;
}

std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

void write_tensors(const std::string& name, const std::vector<at::Tensor>& tensors) {
  std::ofstream file(folder + "/out/" + name, std::ios::binary);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor whole = tensor.detach().contiguous();
    file.write(static_cast<const char*>(whole.const_data_ptr()),
               static_cast<std::streamsize>(whole.nbytes()));
  }
}

/// The tensors in a file, one after the other in the layout of `shapes`, again and again.
class Tape {
 public:
  Tape(const std::string& path, at::ScalarType type) : bytes_(read_bytes(path)), type_(type) {}

  at::Tensor next(std::size_t index) {
    const auto tensor = at::empty(shapes[index], type_);
    std::memcpy(tensor.data_ptr(), bytes_.data() + offset_, tensor.nbytes());
    offset_ += tensor.nbytes();
    return index == 3 ? tensor.contiguous(at::MemoryFormat::ChannelsLast) : tensor;
  }

 private:
  std::string bytes_;
  at::ScalarType type_;
  std::size_t offset_ = 0;
};

struct Case {
  std::string name, optimizer, implementation, dtype;
  int steps = 0, late = 0, tensor_rate = 0, groups = 0, nesterov = 0, maximize = 0, amsgrad = 0,
      decoupled = 0;
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0;

  friend std::istream& operator>>(std::istream& in, Case& c) {
    return in >> c.name >> c.optimizer >> c.implementation >> c.dtype >> c.steps >> c.late >> c.tensor_rate >>
           c.groups >> c.nesterov >> c.maximize >> c.amsgrad >> c.decoupled >> c.lr >> c.momentum >>
           c.dampening >> c.weight_decay >> c.beta1 >> c.beta2 >> c.eps;
  }
};

/// In two groups every second parameter has a rate and a decay of its own.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> grouped(const Case& c, const std::vector<at::Tensor>& parameters,
                                                 const Options& options) {
  if (!c.groups) return std::make_unique<Optimizer>(parameters, options);
  std::vector<at::Tensor> even, odd;
  for (std::size_t i = 0; i < parameters.size(); ++i) (i % 2 == 0 ? even : odd).push_back(parameters[i]);
  Options own = options;
  own.lr = options.lr / 10;
  own.weight_decay = 0.2;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(lockstep::parameter_group(even, own));
  groups.emplace_back(odd);
  return std::make_unique<Optimizer>(groups, options);
}

std::unique_ptr<torch::optim::Optimizer> make(const Case& c, const std::vector<at::Tensor>& parameters) {
  const auto rate = c.tensor_rate ? torch::tensor(c.lr, at::kFloat) : at::Tensor();
  const double lr = mistake == "float" ? static_cast<double>(static_cast<float>(c.lr)) : c.lr;
  if (c.optimizer == "sgd")
    return grouped<lockstep::SGD>(c, parameters,
                                  lockstep::SGDOptions{.lr = lr,
                                                       .momentum = c.momentum,
                                                       .dampening = c.dampening,
                                                       .weight_decay = c.weight_decay,
                                                       .nesterov = c.nesterov != 0,
                                                       .maximize = c.maximize != 0,
                                                       .implementation = implementation_of(c.implementation),
                                                       .lr_tensor = rate});
  const double eps = mistake == "eps" ? c.eps * 1.1 : c.eps;
  if (c.optimizer == "adamw")
    return grouped<lockstep::AdamW>(
        c, parameters,
        lockstep::AdamWOptions{.lr = lr,
                               .betas = {c.beta1, c.beta2},
                               .eps = eps,
                               .weight_decay = c.weight_decay,
                               .amsgrad = c.amsgrad != 0,
                               .maximize = c.maximize != 0,
                               .implementation = implementation_of(c.implementation),
                               .lr_tensor = rate});
  return grouped<lockstep::Adam>(c, parameters,
                                 lockstep::AdamOptions{.lr = lr,
                                                       .betas = {c.beta1, c.beta2},
                                                       .eps = eps,
                                                       .weight_decay = c.weight_decay,
                                                       .amsgrad = c.amsgrad != 0,
                                                       .maximize = c.maximize != 0,
                                                       .decoupled = c.decoupled != 0,
                                                       .implementation = implementation_of(c.implementation),
                                                       .lr_tensor = rate});
}

// The states' tensors in Python's order.
void append_states(const Case& c, const torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                   std::vector<at::Tensor>& to) {
  const auto& state = optimizer.state().at(parameter.unsafeGetTensorImpl());
  const auto append = [&](const char*, const at::Tensor& tensor, bool) {
    if (tensor.defined()) to.push_back(tensor);
  };
  if (c.optimizer == "sgd")
    lockstep::SGDState::each_tensor(static_cast<const lockstep::SGDState&>(*state), append);
  else
    lockstep::AdamState::each_tensor(static_cast<const lockstep::AdamState&>(*state), append);
}

void optimize(const Case& c) {
  const auto type = dtype_of(c.dtype);
  Tape values(folder + "/parameters." + c.dtype, type), gradients(folder + "/gradients." + c.dtype, type);
  std::vector<at::Tensor> parameters;
  for (std::size_t i = 0; i < shapes.size(); ++i) parameters.push_back(values.next(i).requires_grad_());
  auto optimizer = make(c, parameters);
  for (int step = 0; step < c.steps; ++step) {
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto gradient = gradients.next(i);
      // One that comes late: its state is some steps behind.
      parameters[i].mutable_grad() = c.late && i == 1 && step < 3 ? at::Tensor() : gradient;
    }
    if (mistake == "skipped") parameters.back().mutable_grad() = at::Tensor();
    if (mistake == "step" && step == 7) optimizer->step();
    optimizer->step();
  }
  auto result = parameters;
  if (mistake.empty())
    for (const at::Tensor& parameter : parameters) append_states(c, *optimizer, parameter, result);
  write_tensors(c.name, result);
}

void clip(const std::string& name, double norm_type, double limit, bool mixed) {
  Tape gradients(folder + "/gradients.float32", at::kFloat);
  std::vector<at::Tensor> parameters, result;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    auto gradient = gradients.next(i);
    if (mixed && i % 3 == 1) gradient = gradient.to(at::kDouble);
    if (mixed && i % 3 == 2) gradient = gradient.to(at::kBFloat16);
    parameters.push_back(at::zeros_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient;
  }
  if (mistake == "eps") limit *= 1 + 1e-6;
  if (norm_type > 0)
    result.push_back(lockstep::clip_grad_norm(parameters, limit, {.norm_type = norm_type}));
  else
    lockstep::clip_grad_value(parameters, limit);
  for (const at::Tensor& parameter : parameters) result.push_back(parameter.grad());
  write_tensors(name, result);
}

struct Averaged : torch::nn::Module {
  explicit Averaged(Tape& values) {
    for (std::size_t i = 0; i < shapes.size(); ++i)
      register_parameter("p" + std::to_string(i), values.next(i));
    register_buffer("mean", torch::full({5}, 2.0));
    register_buffer("count", torch::tensor(3, at::kLong));
  }
};

void average(const std::string& name, double decay, bool buffers) {
  torch::NoGradGuard no_grad;
  Tape values(folder + "/parameters.float32", at::kFloat), changes(folder + "/gradients.float32", at::kFloat);
  Averaged model(values);
  if (mistake == "eps") decay *= 1 - 1e-6;
  lockstep::MovingAverage mean(model, {.decay = decay, .use_buffers = buffers});
  for (int step = 0; step < 50; ++step) {
    auto parameters = model.parameters();
    for (std::size_t i = 0; i < shapes.size(); ++i) parameters[i].add_(changes.next(i), 0.1);
    model.named_buffers()["mean"].add_(0.3);
    model.named_buffers()["count"].add_(7);
    mean.update();
  }
  write_tensors(name, mean.tensors());
}

void schedule() {
  using namespace lockstep;
  std::ofstream file(folder + "/out/curves");
  file.precision(17);
  const auto write = [&](const char* name, auto curve) {
    file << name;
    for (std::int64_t t = 0; t <= 100; ++t) file << ' ' << curve(mistake == "step" ? t + 1 : t);
    file << '\n';
  };
  write("constant", ConstantLR{.factor = 0.25, .total_iters = 30});
  write("linear", LinearLR{.start_factor = 0.1, .total_iters = 40});
  write("linear-down", LinearLR{.start_factor = 1, .end_factor = 0.2, .total_iters = 60});
  write("cosine", CosineAnnealingLR{.T_max = 100});
  write("cosine-floor", CosineAnnealingLR{.T_max = 100, .eta_min_factor = 0.05});
  write("polynomial", PolynomialLR{.total_iters = 70, .power = 1});
  write("polynomial-2", PolynomialLR{.total_iters = 70, .power = 2.5});
  write("step", StepLR{.step_size = 30, .gamma = 0.3});
  write("multi-step", MultiStepLR{.milestones = {20, 50, 50, 80}, .gamma = 0.5});
  write("exponential", ExponentialLR{.gamma = 0.97});
  write("warm-up-cosine",
        SequentialLR{LinearLR{.start_factor = 0.01, .total_iters = 10}, 10, CosineAnnealingLR{.T_max = 90}});
  write("warm-up-step", SequentialLR{LinearLR{.start_factor = 0.2, .total_iters = 5}, 5,
                                     StepLR{.step_size = 25, .gamma = 0.1}});
}

}  // namespace

int main(int argc, char** argv) {
  if (std::string(argv[1]) == "--library") return lockstep_test::print_library(), 0;
  folder = argv[1];
  if (argc > 2) mistake = argv[2];
  at::set_num_threads(1);
  std::ifstream cases(folder + "/cases");
  for (std::string line; std::getline(cases, line);) {
    std::istringstream words(line);
    std::string kind, name;
    words >> kind;
    if (kind == "optimize") {
      Case c;
      words >> c;
      optimize(c);
    } else if (kind == "clip") {
      std::string type;
      double limit = 0;
      int mixed = 0;
      words >> name >> type >> limit >> mixed;
      clip(name, type == "inf" ? std::numeric_limits<double>::infinity() : std::stod(type), limit,
           mixed != 0);
    } else if (kind == "average") {
      double decay = 0;
      int buffers = 0;
      words >> name >> decay >> buffers;
      average(name, decay, buffers != 0);
    } else {
      schedule();
    }
  }
}
