// Trains as tests/grad/ddp_parity.py tells, on several ranks, and writes the state after some steps.
//
// usage: ddp_parity_program --nproc N FOLDER OUTPUT [MUTATION]
//        ddp_parity_program --library      (prints the path of the libtorch_cpu.so in use)
//
// A mutation breaks the reduction on purpose, to see that the comparison finds it: `permute` the bucket
// order, `skip` one parameter in each bucket, `swap` two of equal shape on one rank, reduction `off`. With
// `linear` the GPT has torch::nn::Linear, whose arithmetic is not Python's.
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/grad/distributed_data_parallel.hpp"
#include "lockstep/grad/hooks/compression_hooks.hpp"
#include "lockstep/grad/hooks/power_sgd_hook.hpp"
#include "lockstep/nn/activation_checkpoint.hpp"
#include "lockstep/nn/linear.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/world/launch.hpp"
#include "support/parity_program.hpp"
#include "support/tested_comm.hpp"

using lockstep_test::TestedComm;

namespace {

std::string mutation;
constexpr int earlier = 7;  // steps that each rank has less than the one before it, with "join"

/// Gloo, broken as asked for.
struct TestComm : TestedComm {
  using TestedComm::TestedComm;

  Work all_reduce(at::TensorList tensors, lockstep::ReduceOp op) {
    if (mutation == "off") return {};
    const at::Tensor& tensor = tensors[0];
    if (mutation == "skip") {
      if (rebuilt_ && first_bucket_ == 0) first_bucket_ = tensor.numel();
      // The bias of the last layer is ready first, and lies at the front of the first bucket.
      if (tensor.numel() == first_bucket_)
        return TestedComm::all_reduce(tensor.narrow(0, 10, tensor.numel() - 10), op);
    }
    if (mutation == "swap" && rank() == 1 && !rebuilt_) {
      // The first bucket of the mlp holds all parameters in order: its first two biases have 96 elements each.
      at::Tensor one = tensor.narrow(0, 64 * 96, 96), other = tensor.narrow(0, 64 * 96 + 96 + 96 * 96, 96);
      const at::Tensor kept = one.clone();
      one.copy_(other);
      other.copy_(kept);
    }
    return TestedComm::all_reduce(tensors, op);
  }

  Work broadcast(at::TensorList tensors, int root) {
    Work work = TestedComm::broadcast(tensors, root);
    if (tensors.size() != 1 || tensors[0].scalar_type() != at::kLong) return work;
    rebuilt_ = true;  // the order from which buckets are rebuilt
    if (mutation == "permute") {
      work.synchronize();
      const at::Tensor order = tensors[0].narrow(0, 0, tensors[0].numel() - 1);  // a hash follows it
      order.copy_(order.flip(0));
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
  std::string caps;   // bytes, joined by commas; 0: the default caps
  std::string extra;  // what differs from a plain DDP, joined by +; last: channels last
  [[nodiscard]] bool with(const std::string& word) const { return extra.find(word) != std::string::npos; }
};

std::vector<Case> read_cases(const std::string& folder) {
  std::ifstream file(folder + "/cases");
  std::vector<Case> cases;
  for (Case c; file >> c.name >> c.model >> c.set_to_none >> c.micro_batches >> c.steps >> c.rate >>
               c.momentum >> c.caps >> c.extra;)
    cases.push_back(c);
  return cases;
}

std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

torch::nn::Sequential make_layers(const std::string& name) {
  using namespace torch::nn;
  if (name == "mlp")
    return Sequential(Linear(64, 96), ReLU(), Linear(96, 96), ReLU(), Linear(96, 80), ReLU(), Linear(80, 10));
  if (name == "small") {
    Sequential layers(Linear(64, 16), ReLU());
    for (int i = 0; i < 12; ++i) {
      layers->push_back(Linear(16, 16));
      layers->push_back(ReLU());
    }
    layers->push_back(Linear(16, 10));
    return layers;
  }
  if (name == "big")
    return Sequential(Linear(256, 2048), ReLU(), Linear(2048, 2048), ReLU(), Linear(2048, 1280), ReLU(),
                      Linear(1280, 256), ReLU(), Linear(256, 10));
  return Sequential(Conv2d(Conv2dOptions(1, 16, 5).padding(2)), BatchNorm2d(16), ReLU(), MaxPool2d(2),
                    Conv2d(Conv2dOptions(16, 32, 5).padding(2)), BatchNorm2d(32), ReLU(), MaxPool2d(2),
                    Flatten(), Linear(288, 10));
}

constexpr std::int64_t tokens = 50, length = 8, width = 64, heads = 4;  // of the gpt

template <class Linear>
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    using namespace torch::nn;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width})));
    attention = register_module("attention", Linear(width, 3 * width));
    projection = register_module("projection", Linear(width, width));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width})));
    up = register_module("up", Linear(width, 4 * width));
    down = register_module("down", Linear(4 * width, width));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = attention(norm1(x)).split(width, 2);
    const auto of_heads = [&](const torch::Tensor& part) {
      return part.view({x.size(0), x.size(1), heads, width / heads}).transpose(1, 2);
    };
    const auto q = of_heads(parts[0]);
    const auto k = of_heads(parts[1]);
    const auto v = of_heads(parts[2]);
    const auto joined = at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
    x = x + projection(joined.transpose(1, 2).contiguous().view(x.sizes()));
    return x + down(torch::gelu(up(norm2(x))));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Linear attention{nullptr}, projection{nullptr}, up{nullptr}, down{nullptr};
};

/// Its head is the embedding's own matrix.
template <class Linear>
struct GptImpl : torch::nn::Module {
  GptImpl() {
    wte = register_module("wte", torch::nn::Embedding(tokens, width));
    wpe = register_module("wpe", torch::nn::Embedding(length, width));
    for (const char* name : {"block0", "block1"})
      blocks.push_back(register_module(name, std::make_shared<BlockImpl<Linear>>()));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  torch::Tensor forward(const torch::Tensor& words) {
    const auto word = wte(words);
    const auto place = wpe(torch::arange(length));
    auto x = word + place;
    for (auto& block : blocks) x = block->forward(x);
    return torch::linear(norm(x), wte->weight).mean(1);
  }
  torch::nn::Embedding wte{nullptr}, wpe{nullptr};
  std::vector<std::shared_ptr<BlockImpl<Linear>>> blocks;
  torch::nn::LayerNorm norm{nullptr};
};

/// The models of ddp_parity.py, with the same order of parameters.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const std::string& name) : name(name) {
    using namespace torch::nn;
    if (name == "branches") {
      first = register_module("first", Linear(64, 48));
      for (int i = 0; i < 3; ++i)
        branches.push_back(register_module("branch" + std::to_string(i), Linear(48, 48)));
      last = register_module("last", Linear(48, 10));
    } else if (name == "table") {
      table = register_module("table", Embedding(EmbeddingOptions(50, 16).sparse(true)));
      first = register_module("hidden", Linear(16, 64));
      last = register_module("last", Linear(64, 10));
    } else if (name == "tied") {
      first = register_module("first", Linear(64, 64));
      register_module("again", first);
      last = register_module("last", Linear(64, 10));
    } else if (name == "shared" || name == "repeated" || name == "mixed" || name == "recomputed" ||
               name == "complex") {
      first = register_module("first", Linear(64, 48));
      middle = register_module("middle", Linear(48, 48));
      if (name == "shared") register_module("again", middle);
      last = register_module("last", Linear(48, 10));
      if (name == "mixed") middle->to(torch::kDouble);
      if (name == "complex") to(torch::kComplexFloat);
    } else if (name == "gpt") {
      if (mutation == "linear")
        torch_gpt = register_module("gpt", std::make_shared<GptImpl<torch::nn::Linear>>());
      else
        gpt = register_module("gpt", std::make_shared<GptImpl<lockstep::Linear>>());
    } else {
      layers = register_module("layers", make_layers(name));
    }
  }
  torch::Tensor forward(torch::Tensor x, int which) {
    if (name == "branches") {
      x = torch::relu(first(x));
      if (which < 2) x = torch::relu(branches[static_cast<std::size_t>(which)](x));
      return last(x);
    }
    if (name == "table")
      return last(torch::relu(first(table((x.abs() * 10).to(torch::kLong).remainder(50)).mean(1))));
    if (name == "gpt") {
      const auto words = (x.narrow(1, 0, length).abs() * 10).to(torch::kLong).remainder(tokens);
      return gpt ? gpt->forward(words) : torch_gpt->forward(words);
    }
    if (name == "tied") return last(torch::relu(first(torch::relu(first(x)))));
    if (name == "complex")
      return last(torch::tanh(middle(torch::tanh(first(x.to(torch::kComplexFloat)))))).abs();
    if (name == "shared") {
      x = torch::relu(first(x));
      for (; which < 2; ++which) x = torch::relu(middle(x));
      return last(x);
    }
    if (name == "mixed")
      return last(torch::relu(middle(torch::relu(first(x)).to(torch::kDouble))).to(torch::kFloat));
    if (name == "recomputed") return last(torch::relu(lockstep::checkpoint(middle, torch::relu(first(x)))));
    if (name == "repeated") {
      x = torch::relu(lockstep::checkpoint(middle, torch::relu(first(x))));
      return last(torch::relu(lockstep::checkpoint(middle, x)));
    }
    return layers->forward(x);
  }
  std::string name;
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
  std::vector<torch::nn::Linear> branches;
  torch::nn::Embedding table{nullptr};
  torch::nn::Sequential layers{nullptr};
  std::shared_ptr<GptImpl<lockstep::Linear>> gpt;
  std::shared_ptr<GptImpl<torch::nn::Linear>> torch_gpt;
};
TORCH_MODULE(Net);

/// A tied parameter once, as Python's `parameters()` has it.
std::vector<at::Tensor> state_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> state;
  for (const auto& list : {lockstep::unique_parameters(model), lockstep::unique_buffers(model)})
    for (const auto& item : list) state.push_back(item.tensor);
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
  for (const auto& given : state_of(model)) {
    const at::Tensor tensor = given.contiguous();
    file.write(static_cast<const char*>(tensor.const_data_ptr()),
               static_cast<std::streamsize>(tensor.nbytes()));
  }
}

/// Python's `tensor.to(memory_format=torch.channels_last)`; `contiguous` keeps the strides of a single channel.
at::Tensor channels_last(const at::Tensor& tensor) {
  return tensor.to(tensor.options(), /*non_blocking=*/false, /*copy=*/false, at::MemoryFormat::ChannelsLast);
}

void to_channels_last(const torch::nn::Module& model) {
  for (auto& parameter : model.parameters())
    if (parameter.dim() == 4) parameter.set_data(channels_last(parameter.data()));
}

lockstep::DdpOptions options_of(const Case& c) {
  lockstep::DdpOptions options;
  if (c.caps != "0") {
    options.bucket_cap_mb.clear();
    std::istringstream caps(c.caps);
    for (std::string cap; std::getline(caps, cap, ',');)
      options.bucket_cap_mb.push_back(std::stod(cap) / (1 << 20));
  }
  options.find_unused_parameters = c.with("search");
  options.static_graph = c.with("static");
  options.broadcast_buffers = c.extra != "no-buffers";
  options.forward_sync_buffers = c.extra != "first-buffers";
  options.batched_grad_copy = c.with("batched");
  options.lazy_bucket_allocation = c.with("lazy");
  options.skip_all_reduce_unused_params = c.with("skip");
  if (c.with("view")) options.gradients = lockstep::GradientStorage::gradient_as_bucket_view;
  if (c.with("ignored")) options.ignored = {"layers.2.weight", "layers.2.bias"};
  if (c.extra == "separate") options.gradients = lockstep::GradientStorage::separate;
  return options;
}

/// AdamW as a GPT is trained with it, the schedule and the clipping included: matrices decay, vectors do not.
struct GptOptimizer {
  GptOptimizer(const Case& c, const std::vector<at::Tensor>& trained)
      : trained(trained), rate(c.rate), curve{.T_max = c.steps} {
    std::vector<at::Tensor> matrices, vectors;
    for (const auto& parameter : trained) (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
    lockstep::AdamWOptions decaying{.lr = rate, .betas = {0.9, 0.95}, .weight_decay = 0.1}, plain = decaying;
    plain.weight_decay = 0;
    optimizer.emplace(std::vector<torch::optim::OptimizerParamGroup>{
        lockstep::parameter_group(matrices, decaying), lockstep::parameter_group(vectors, plain)});
  }
  void step(int step) {
    lockstep::clip_grad_norm(trained, 1.0);
    for (auto& group : optimizer->param_groups()) group.options().set_lr(rate * curve(step));
    optimizer->step();
  }
  std::vector<at::Tensor> trained;
  double rate;
  lockstep::CosineAnnealingLR curve;
  std::optional<lockstep::AdamW> optimizer;
};

template <class Comm, class Hook>
void train(const Case& c, const lockstep::World& world, Comm& comm, const std::string& folder,
           const std::string& output, Hook hook) {
  Net model(c.model);
  read_state(*model, read_bytes(folder + "/" + c.model + ".state"), world.rank());
  if (c.extra == "frozen")
    for (const std::size_t i : {2, 3}) model->parameters()[i].requires_grad_(false);
  if (c.with("last")) to_channels_last(*model);
  std::string inputs = read_bytes(folder + "/" + c.model + ".inputs");
  std::string labels = read_bytes(folder + "/" + c.model + ".labels");
  const std::int64_t count = static_cast<std::int64_t>(labels.size()) / 8 / 30;
  std::vector<std::int64_t> shape{count, 30};
  for (const std::int64_t size : c.model == "big"       ? std::vector<std::int64_t>{256}
                                 : c.model == "convnet" ? std::vector<std::int64_t>{1, 12, 12}
                                                        : std::vector<std::int64_t>{64})
    shape.push_back(size);
  const auto x = torch::from_blob(inputs.data(), shape);
  const auto y = torch::from_blob(labels.data(), {count, 30}, torch::kLong);

  lockstep::DistributedDataParallel ddp{model, comm, options_of(c), std::move(hook)};
  std::vector<at::Tensor> trained;
  for (const auto& parameter : ddp.parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  torch::optim::SGD sgd(trained, torch::optim::SGDOptions(c.rate).momentum(c.momentum));
  std::optional<GptOptimizer> adamw;
  if (c.extra == "adamw") adamw.emplace(c, trained);
  auto loss = [&](int step, int micro) {
    const std::int64_t batch = ((step * c.micro_batches + micro) * 4 + world.rank()) % count;
    const int which = (c.with("fixed")    ? 0
                       : c.with("static") ? world.rank()
                       : c.with("alike")  ? step
                                          : step + world.rank()) %
                      3;
    const auto input = c.with("last") ? channels_last(x[batch]) : x[batch];
    const auto mean = torch::nn::functional::cross_entropy(ddp(input, which), y[batch]);
    return adamw ? mean / c.micro_batches : mean;
  };
  for (int step = 0; step < c.steps; ++step) {
    if (!c.with("keep") || step % 3 == 0) sgd.zero_grad(c.set_to_none != 0);
    for (std::size_t i = 0; c.with("half") && i < trained.size(); i += 2) trained[i].mutable_grad().reset();
    for (int micro = 0; micro + 1 < c.micro_batches; ++micro) {
      const auto guard = ddp.no_sync();
      ddp.backward(loss(step, micro));
    }
    if (c.with("join") && step >= c.steps - earlier * world.rank())
      ddp.backward_empty();
    else
      ddp.backward(loss(step, c.micro_batches - 1));
    if (c.with("twice")) ddp.backward(loss(step + 1, 0));
    adamw ? adamw->step(step) : static_cast<void>(sgd.step());
    if (step < 3 || step + 1 == c.steps)
      write_state(*model, output + "/" + c.name + "." + std::to_string(step + 1) + "." +
                              std::to_string(world.rank()));
  }
  if (world.rank() == 0) std::cout << c.name << " buckets " << ddp.buckets().size() << std::endl;
}

void train(const Case& c, const lockstep::World& world, TestComm& comm, const std::string& folder,
           const std::string& output) {
  if (c.extra == "group") {
    std::vector<int> middle(static_cast<std::size_t>(world.size() - 2));
    std::iota(middle.begin(), middle.end(), 1);
    auto of_ends = comm.new_group({0, world.size() - 1});
    auto of_middle = middle.empty() ? std::nullopt : comm.new_group(middle);
    train(c, world, of_ends ? *of_ends : *of_middle, folder, output, lockstep::AllReduceHook{});
  } else if (c.extra == "fp16")
    train(c, world, comm, folder, output, lockstep::Fp16Hook{});
  else if (c.extra == "bf16")
    train(c, world, comm, folder, output, lockstep::Bf16Hook{});
  else if (c.with("power-sgd"))
    train(c, world, comm, folder, output,
          lockstep::PowerSgdHook{{.matrix_approximation_rank = 2,
                                  .start_iteration = 10,
                                  .use_error_feedback = c.with("feedback")}});
  else
    train(c, world, comm, folder, output, lockstep::AllReduceHook{});
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words = lockstep_test::own_words(argc, argv);
  if (words.at(0) == "--library") return lockstep_test::print_library(), 0;
  if (words.size() > 2) mutation = words[2];
  return lockstep::launch(argc, argv, [&](const lockstep::World& world) {
    at::set_num_threads(1);
    TestComm comm{world};
    for (const Case& c : read_cases(words[0])) train(c, world, comm, words[0], words.at(1));
    comm.shutdown();
  });
}
