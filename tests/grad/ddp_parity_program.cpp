// Trains as tests/grad/ddp_parity.py tells, on several ranks, and writes the state after some steps.
//
// usage: ddp_parity_program --nproc N FOLDER OUTPUT [MUTATION]
//        ddp_parity_program --library      (prints the path of the libtorch_cpu.so in use)
//
// A mutation breaks the reduction on purpose, to see that the comparison finds it: `permute` the bucket
// order, `skip` one parameter in each bucket, reduction `off`.
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/world/launch.hpp"

namespace {

std::string mutation;

/// Gloo, broken as asked for.
struct TestComm : lockstep::GlooComm {
  using GlooComm::all_reduce;
  using GlooComm::broadcast;
  using GlooComm::GlooComm;

  Work all_reduce(const at::Tensor& tensor, lockstep::ReduceOp op = lockstep::ReduceOp::sum) {
    if (mutation == "off") return {};
    if (mutation == "skip") {
      if (rebuilt_ && first_bucket_ == 0) first_bucket_ = tensor.numel();
      // The bias of the last layer is ready first, and lies at the front of the first bucket.
      if (tensor.numel() == first_bucket_)
        return GlooComm::all_reduce(tensor.narrow(0, 10, tensor.numel() - 10), op);
    }
    return GlooComm::all_reduce(tensor, op);
  }

  Work broadcast(const at::Tensor& tensor, int root = 0) {
    rebuilt_ = true;
    Work work = GlooComm::broadcast(tensor, root);
    if (mutation == "permute") {  // the order from which buckets are rebuilt
      work.wait_host();
      tensor.copy_(tensor.flip(0));
    }
    return work;
  }

 private:
  bool rebuilt_ = false;
  std::int64_t first_bucket_ = 0;
};

struct Case {
  std::string name, model;
  int set_to_none = 0, micro_batches = 1, steps = 0;
  double rate = 0, momentum = 0;
  std::size_t cap = 0;  // bytes; 0: the default caps
};

std::vector<Case> read_cases(const std::string& folder) {
  std::ifstream file(folder + "/cases");
  std::vector<Case> cases;
  for (Case c; file >> c.name >> c.model >> c.set_to_none >> c.micro_batches >> c.steps >> c.rate >>
               c.momentum >> c.cap;)
    cases.push_back(c);
  return cases;
}

std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

torch::nn::Sequential make_model(const std::string& name) {
  using namespace torch::nn;
  if (name == "mlp")
    return Sequential(Linear(64, 96), ReLU(), Linear(96, 96), ReLU(), Linear(96, 80), ReLU(), Linear(80, 10));
  if (name == "big")
    return Sequential(Linear(512, 2048), ReLU(), Linear(2048, 2048), ReLU(), Linear(2048, 2048), ReLU(),
                      Linear(2048, 1024), ReLU(), Linear(1024, 10));
  return Sequential(Conv2d(Conv2dOptions(1, 16, 5).padding(2)), BatchNorm2d(16), ReLU(), MaxPool2d(2),
                    Conv2d(Conv2dOptions(16, 32, 5).padding(2)), BatchNorm2d(32), ReLU(), MaxPool2d(2),
                    Flatten(), Linear(288, 10));
}

std::vector<at::Tensor> state_of(const torch::nn::Module& model) {
  auto state = model.parameters();
  for (const auto& buffer : model.buffers()) state.push_back(buffer);
  return state;
}

void read_state(const torch::nn::Module& model, const std::string& bytes, int rank) {
  torch::NoGradGuard no_grad;
  std::size_t offset = 0;
  for (auto& tensor : state_of(model)) {
    std::memcpy(tensor.data_ptr(), bytes.data() + offset, tensor.nbytes());
    offset += tensor.nbytes();
    tensor.add_(rank);  // what construction must undo
  }
}

void write_state(const torch::nn::Module& model, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& tensor : state_of(model))
    file.write(static_cast<const char*>(tensor.const_data_ptr()),
               static_cast<std::streamsize>(tensor.nbytes()));
}

void train(const Case& c, const lockstep::World& world, TestComm& comm, const std::string& folder,
           const std::string& output) {
  auto model = make_model(c.model);
  read_state(*model, read_bytes(folder + "/" + c.model + ".state"), world.rank());
  std::string inputs = read_bytes(folder + "/" + c.model + ".inputs");
  std::string labels = read_bytes(folder + "/" + c.model + ".labels");
  const std::int64_t count = static_cast<std::int64_t>(labels.size()) / 8 / 30;
  std::vector<std::int64_t> shape{count, 30};
  for (const std::int64_t size : c.model == "mlp"   ? std::vector<std::int64_t>{64}
                                 : c.model == "big" ? std::vector<std::int64_t>{512}
                                                    : std::vector<std::int64_t>{1, 12, 12})
    shape.push_back(size);
  const auto x = torch::from_blob(inputs.data(), shape);
  const auto y = torch::from_blob(labels.data(), {count, 30}, torch::kLong);

  lockstep::DdpOptions options;
  if (c.cap != 0) options.bucket_caps = {c.cap};
  lockstep::DistributedDataParallel ddp{model, comm, options};
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(c.rate).momentum(c.momentum));
  auto loss = [&](int step, int micro) {
    const std::int64_t batch = ((step * c.micro_batches + micro) * 4 + world.rank()) % count;
    return torch::nn::functional::cross_entropy(ddp(x[batch]), y[batch]);
  };
  for (int step = 0; step < c.steps; ++step) {
    optimizer.zero_grad(c.set_to_none != 0);
    for (int micro = 0; micro + 1 < c.micro_batches; ++micro) {
      const auto guard = ddp.no_sync();
      ddp.backward(loss(step, micro));
    }
    ddp.backward(loss(step, c.micro_batches - 1));
    optimizer.step();
    if (step < 2 || step + 1 == c.steps)
      write_state(*model, output + "/" + c.name + "." + std::to_string(step + 1) + "." +
                              std::to_string(world.rank()));
  }
  if (world.rank() == 0) std::cout << c.name << " buckets " << ddp.buckets().size() << std::endl;
}

void print_library() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (const auto at = line.find('/');
        at != std::string::npos && line.find("/libtorch_cpu.so") != std::string::npos) {
      std::cout << line.substr(at) << std::endl;
      return;
    }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--nproc")
      ++i;
    else
      words.emplace_back(argv[i]);
  }
  if (words.at(0) == "--library") return print_library(), 0;
  if (words.size() > 2) mutation = words[2];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    at::set_num_threads(1);
    TestComm comm{world};
    for (const Case& c : read_cases(words[0])) train(c, world, comm, words[0], words.at(1));
    comm.shutdown();
  });
}
