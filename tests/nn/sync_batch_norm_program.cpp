// Trains batch norm over the joined batch of all ranks, as tests/nn/sync_batch_norm_parity.py tells, and
// writes what each rank has of it.
//
// usage: sync_batch_norm_program --nproc N FOLDER OUTPUT [MUTATION]
//        sync_batch_norm_program --library      (prints the path of the libtorch_cpu.so in use)
//
// A mutation breaks it on purpose, to see that the comparison finds it: `forget` the count of rank 1, or keep
// the sums of backward `apart`.
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/nn/sync_batch_norm.hpp"
#include "lockstep/world/launch.hpp"
#include "support/parity_program.hpp"

namespace {

std::string mutation;

/// The ranks of a communicator, broken as asked for.
struct BrokenExchange : lockstep::detail::StatisticsExchange {
  explicit BrokenExchange(lockstep::CpuComm& comm) : comm(comm) {}
  [[nodiscard]] int size() const override { return comm.size(); }
  [[nodiscard]] at::Tensor gather(const at::Tensor& row) override {
    at::Tensor rows = at::empty({comm.size(), row.numel()}, row.options());
    comm.all_gather(rows, row).synchronize();
    if (mutation == "forget") rows[1][-1] = 0;
    return rows;
  }
  void sum(const at::Tensor& values) override {
    if (mutation != "apart") comm.all_reduce(values).synchronize();
  }
  lockstep::CpuComm& comm;
};

struct Case {
  std::string name, dtype;
  int dimensions = 0, steps = 0, affine = 0, channels_last = 0;
  double momentum = 0;  // below 0: none
  std::vector<std::int64_t> counts, shape;

  [[nodiscard]] torch::Dtype type() const { return dtype == "float64" ? torch::kDouble : torch::kFloat; }
  [[nodiscard]] std::int64_t total() const {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }
  [[nodiscard]] torch::MemoryFormat format() const {
    if (channels_last == 0) return torch::MemoryFormat::Contiguous;
    return dimensions == 2 ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::ChannelsLast3d;
  }
};

std::vector<std::int64_t> numbers(const std::string& text) {
  std::vector<std::int64_t> result;
  std::istringstream stream(text);
  for (std::string number; std::getline(stream, number, ',');) result.push_back(std::stoll(number));
  return result;
}

std::vector<Case> read_cases(const std::string& folder) {
  std::ifstream file(folder + "/cases");
  std::vector<Case> cases;
  std::string counts, shape;
  for (Case c; file >> c.name >> c.dtype >> c.dimensions >> c.steps >> c.affine >> c.channels_last >>
               c.momentum >> counts >> shape;) {
    c.counts = numbers(counts);
    c.shape = numbers(shape);
    cases.push_back(c);
  }
  return cases;
}

template <class Norm>
void train(const Case& c, Norm norm, int rank, const std::string& folder, const std::string& output) {
  std::ifstream in(folder + "/" + c.name, std::ios::binary);
  std::ofstream out(output + "/" + c.name + "." + std::to_string(rank), std::ios::binary);
  const auto read = [&](std::vector<std::int64_t> shape) {
    at::Tensor tensor = torch::empty(shape, c.type());
    in.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
    return tensor;
  };
  const auto write = [&](const at::Tensor& given) {
    const at::Tensor tensor = given.detach().to(c.type()).contiguous();
    out.write(static_cast<const char*>(tensor.const_data_ptr()),
              static_cast<std::streamsize>(tensor.nbytes()));
  };
  norm->to(c.type());
  const at::Tensor weight = read({c.shape[0]}), bias = read({c.shape[0]});
  if (c.affine) {
    torch::NoGradGuard no_grad;
    norm->weight.copy_(weight);
    norm->bias.copy_(bias);
  }
  const auto own = static_cast<std::size_t>(rank);
  const auto before = std::accumulate(c.counts.begin(), c.counts.begin() + rank, std::int64_t{0});
  std::vector<std::int64_t> whole{c.total()};
  whole.insert(whole.end(), c.shape.begin(), c.shape.end());
  const auto part = [&](const at::Tensor& tensor) {
    return tensor.narrow(0, before, c.counts[own]).clone().contiguous(c.format());
  };
  for (int step = 0; step < c.steps; ++step) {
    if (step + 1 == c.steps) norm->eval();
    const at::Tensor input = part(read(whole)).requires_grad_(), slope = part(read(whole));
    norm->zero_grad();
    const at::Tensor result = norm(input);
    (result * slope).sum().backward();
    write(result);
    write(input.grad());
    if (!c.affine) continue;
    write(norm->weight.grad());
    write(norm->bias.grad());
  }
  write(norm->running_mean);
  write(norm->running_var);
  write(norm->num_batches_tracked);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words = lockstep_test::own_words(argc, argv);
  if (words.at(0) == "--library") return lockstep_test::print_library(), 0;
  if (words.size() > 2) mutation = words[2];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    at::set_num_threads(1);
    lockstep::CpuComm comm{world};
    const lockstep::detail::BatchNormGroup group =
        mutation.empty() ? lockstep::detail::BatchNormGroup{comm}
                         : lockstep::detail::BatchNormGroup{std::make_shared<BrokenExchange>(comm)};
    for (const Case& c : read_cases(words[0])) {
      auto options = torch::nn::BatchNormOptions(c.shape[0]).affine(c.affine != 0);
      options.momentum(c.momentum < 0 ? std::nullopt : std::optional<double>(c.momentum));
      if (c.dimensions == 1)
        train(c, lockstep::SyncBatchNorm1d(options, group), world.rank(), words[0], words.at(1));
      else if (c.dimensions == 2)
        train(c, lockstep::SyncBatchNorm2d(options, group), world.rank(), words[0], words.at(1));
      else
        train(c, lockstep::SyncBatchNorm3d(options, group), world.rank(), words[0], words.at(1));
    }
  });
}
