// Does something wrong on two ranks, as tests/grad/ddp_errors_parity.py does with Python's DDP, and writes
// what becomes of it on each into OUTPUT: where it ended and the error, or its parameters.
//
// usage: ddp_errors_program --nproc 2 OUTPUT MISUSE [deaf]
//        ddp_errors_program --library      (prints the path of the libtorch_cpu.so in use)
//
// A `deaf` communicator believes that every rank has what this one has, to see that the script notices an
// error that does not come.
#include <torch/torch.h>

#include <c10/util/Type.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer.hpp"
#include "lockstep/world/launch.hpp"
#include "support/mib.hpp"
#include "support/parity_program.hpp"

namespace {

constexpr int steps = 3;
std::string misuse;
bool deaf = false;

struct TestComm : lockstep::CpuComm {
  using CpuComm::CpuComm;
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    if (!deaf) return CpuComm::all_gather_bytes(bytes);
    return std::vector<std::string>(static_cast<std::size_t>(size()), bytes);
  }
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int width = 8, bool swapped = false) {
    using torch::nn::Linear;
    one = register_module("one", Linear(4, width));
    if (swapped) three = register_module("three", Linear(width, width));
    two = register_module("two", Linear(width, width));
    if (!swapped) three = register_module("three", Linear(width, width));
    last = register_module("last", Linear(width, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(one(x));
    if (use_two) x = torch::tanh(two(x));
    x = last(torch::tanh(three(x)));
    return added ? added(x) : x;
  }
  torch::nn::Linear one{nullptr}, two{nullptr}, three{nullptr}, last{nullptr}, added{nullptr};
  bool use_two = true;
};
TORCH_MODULE(Net);

/// Values that the name decides, so that Python has the same; other ones on every rank.
void fill(const torch::nn::Module& model, int rank) {
  torch::NoGradGuard no_grad;
  auto parameters = model.named_parameters().pairs();
  std::sort(parameters.begin(), parameters.end(), [](auto& a, auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& parameter = parameters[i].second;
    const auto numbers = torch::arange(parameter.numel(), torch::kDouble);
    parameter.copy_(torch::sin(numbers * (static_cast<double>(i) + 1)).view_as(parameter) * 0.5 + rank);
    if (parameter.is_complex()) parameter.mul_(c10::complex<double>(1, 0.5));
  }
}

torch::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(20, torch::kDouble) * (2 * step + rank + 1)).view({5, 4});
}

torch::Tensor loss_of(const torch::Tensor& out) {
  return out.abs().pow(2).mean();
}

void write_parameters(const torch::nn::Module& model, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& parameter : model.parameters())
    file.write(static_cast<const char*>(parameter.const_data_ptr()),
               static_cast<std::streamsize>(parameter.nbytes()));
}

void train(const lockstep::World& world, TestComm& comm, const std::string& path, std::string& where) {
  const int rank = world.rank();
  const bool here = rank == 1;
  Net net(misuse == "shape" && here ? 9 : 8, misuse == "order" && here);
  if (misuse == "dtype" && here) net->to(torch::kDouble);
  if (misuse == "complex") net->to(torch::kComplexFloat);
  fill(*net, rank);
  for (auto& parameter : net->parameters()) parameter.requires_grad_(misuse != "all-frozen");
  lockstep::DdpOptions options;
  if (misuse.starts_with("caps") && here) options.bucket_cap_mb = lockstep_test::mib({64});
  options.find_unused_parameters = misuse == "caps-search" || (misuse == "search" && here);
  where = "the construction";
  lockstep::DistributedDataParallel ddp{net, comm, options};
  if (misuse == "added") {
    net->added = net->register_module("added", torch::nn::Linear(2, 2));
    fill(*net->added, rank);
  }
  if (misuse == "frozen")
    for (auto& parameter : net->two->parameters()) parameter.requires_grad_(false);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  torch::NoGradGuard no_grad;
  if (misuse == "loaded" && here)
    for (auto& parameter : net->parameters()) parameter.mul_(1.01);
  torch::AutoGradMode grad(true);
  for (int step = 1; step <= steps - (misuse == "fewer" && here); ++step) {
    where = "the forward of step " + std::to_string(step);
    optimizer.zero_grad();
    net->use_two = !(misuse == "unused" || (misuse == "unused-here" && here));
    auto loss = loss_of(ddp(batch_of(rank, step).to(net->one->weight.scalar_type())));
    if (misuse == "throws" && here && step == 2) {
      loss.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("thrown inside backward"); });
      loss = loss * 1;
    }
    where = "the backward of step " + std::to_string(step);
    ddp.backward(loss, false, misuse == "create-graph");
    optimizer.step();
    where = "the check of step " + std::to_string(step);
    if (misuse == "loaded") lockstep::check_same_parameters(comm, ddp.named_parameters());
  }
  write_parameters(*net, path + ".parameters");
}

/// Not-a-number on rank 1 in the second step, under the check.
void train_checked(const lockstep::World& world, std::string& where) {
  Net net;
  fill(*net, 0);
  lockstep::Trainer<Net, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32,
                    lockstep::CheckFinite>
      trainer{world, {.epochs = 1, .batch_size = 5, .progress = false}, net};
  const auto inputs = torch::sin(torch::arange(2.0 * steps * 20)).view({2 * steps * 5, 4});
  lockstep::TensorDataset data{inputs, inputs};
  int step = 0;
  trainer.fit(data, [&](Net& model, const auto& batch) {
    where = "the backward of step " + std::to_string(++step);
    const auto loss = loss_of(model(batch.data));
    return world.rank() == 1 && step == 2 ? loss * std::numeric_limits<double>::quiet_NaN() : loss;
  });
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words = lockstep_test::own_words(argc, argv);
  if (words.at(0) == "--library") return lockstep_test::print_library(), 0;
  misuse = words.at(1);
  deaf = words.size() > 2;
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    at::set_num_threads(1);
    const std::string path = words[0] + "/" + misuse + "." + std::to_string(world.rank());
    std::ofstream out(path);
    std::string where;
    TestComm comm{world};
    try {
      misuse == "nan" ? train_checked(world, where) : train(world, comm, path, where);
      out << "ended\n";
    } catch (const std::exception& error) {
      // What all ranks throw together is of a private type, which users catch as its base.
      const std::string shared = "lockstep::detail::CollectiveError<";
      std::string type = c10::demangle(typeid(error).name());
      if (type.starts_with(shared)) type = type.substr(shared.size(), type.size() - shared.size() - 1);
      out << "error\n" << where << "\n" << type << "\n" << first_line(error.what()) << std::endl;
    }
  });
}
