#pragma once

// The models that bench_gpu trains; training.py has the same in the same order of parameters.
#include <torch/torch.h>

#include <string>
#include <utility>

#include "../common.hpp"

namespace bench {

// One type for all models, so that DistributedDataParallel is compiled once for each communicator.
struct TaskImpl : nn::Module {
  virtual torch::Tensor forward(const torch::Tensor& data) = 0;
};
struct Task : nn::ModuleHolder<TaskImpl> {
  using nn::ModuleHolder<TaskImpl>::ModuleHolder;
};

struct ConvNetTaskImpl : TaskImpl {
  ConvNetTaskImpl() { net = register_module("net", ConvNet()); }
  torch::Tensor forward(const torch::Tensor& data) override { return net(data); }
  ConvNet net{nullptr};
};

// ResNet-50: bottleneck blocks with the stride in the 3x3 convolution, as in torchvision.
struct BottleneckImpl : nn::Module {
  BottleneckImpl(int inputs, int width, int stride) {
    const auto convolution = [](int in, int out, int kernel, int step) {
      return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(step).padding(kernel / 2).bias(false));
    };
    conv1 = register_module("conv1", convolution(inputs, width, 1, 1));
    bn1 = register_module("bn1", nn::BatchNorm2d(width));
    conv2 = register_module("conv2", convolution(width, width, 3, stride));
    bn2 = register_module("bn2", nn::BatchNorm2d(width));
    conv3 = register_module("conv3", convolution(width, 4 * width, 1, 1));
    bn3 = register_module("bn3", nn::BatchNorm2d(4 * width));
    if (stride != 1 || inputs != 4 * width)
      downsample = register_module("downsample", nn::Sequential(convolution(inputs, 4 * width, 1, stride),
                                                                nn::BatchNorm2d(4 * width)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto out = torch::relu(bn1(conv1(x)));
    out = torch::relu(bn2(conv2(out)));
    out = bn3(conv3(out));
    return torch::relu(out + (downsample.is_empty() ? x : downsample->forward(x)));
  }

  nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr}, bn3{nullptr};
  nn::Sequential downsample{nullptr};
};
TORCH_MODULE(Bottleneck);

struct ResNet50Impl : TaskImpl {
  ResNet50Impl(int width, int classes) {
    conv1 =
        register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, width, 7).stride(2).padding(3).bias(false)));
    bn1 = register_module("bn1", nn::BatchNorm2d(width));
    int inputs = width;
    layers = register_module("layers", nn::Sequential());
    const int counts[] = {3, 4, 6, 3};
    for (int layer = 0; layer < 4; ++layer)
      for (int block = 0; block < counts[layer]; ++block) {
        layers->push_back(Bottleneck(inputs, width << layer, layer > 0 && block == 0 ? 2 : 1));
        inputs = 4 * (width << layer);
      }
    fc = register_module("fc", nn::Linear(inputs, classes));
  }
  torch::Tensor forward(const torch::Tensor& data) override {
    const auto x = torch::max_pool2d(torch::relu(bn1(conv1(data))), 3, 2, 1);
    return fc(torch::adaptive_avg_pool2d(layers->forward(x), {1, 1}).flatten(1));
  }

  nn::Conv2d conv1{nullptr};
  nn::BatchNorm2d bn1{nullptr};
  nn::Sequential layers{nullptr};
  nn::Linear fc{nullptr};
};

// A GPT of 6 layers, without dropout.
struct GptBlockImpl : nn::Module {
  GptBlockImpl(int width, int heads) : heads(heads) {
    ln1 = register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({width})));
    attn = register_module("attn", nn::Linear(width, 3 * width));
    proj = register_module("proj", nn::Linear(width, width));
    ln2 = register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({width})));
    fc = register_module("fc", nn::Linear(width, 4 * width));
    out = register_module("out", nn::Linear(4 * width, width));
  }
  torch::Tensor forward(torch::Tensor x) {  // [N, T, C]
    const auto qkv = attn(ln1(x)).view({x.size(0), x.size(1), 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto y = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                                       /*dropout_p=*/0, /*is_causal=*/true);
    x = x + proj(y.transpose(1, 2).flatten(2));
    return x + out(torch::gelu(fc(ln2(x))));
  }

  int heads;
  nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  nn::Linear attn{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};
};
TORCH_MODULE(GptBlock);

struct GptImpl : TaskImpl {
  GptImpl(int width, int heads, int block, int vocabulary) {
    tokens = register_module("tokens", nn::Embedding(vocabulary, width));
    positions = register_parameter("positions", torch::zeros({1, block, width}));
    blocks = register_module("blocks", nn::Sequential());
    for (int layer = 0; layer < 6; ++layer) blocks->push_back(GptBlock(width, heads));
    ln = register_module("ln", nn::LayerNorm(nn::LayerNormOptions({width})));
    head = register_module("head", nn::Linear(nn::LinearOptions(width, vocabulary).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& ids) override {  // [N, T] to [N * T, vocabulary]
    return head(ln(blocks->forward(tokens(ids) + positions))).flatten(0, 1);
  }

  nn::Embedding tokens{nullptr};
  torch::Tensor positions;
  nn::Sequential blocks{nullptr};
  nn::LayerNorm ln{nullptr};
  nn::Linear head{nullptr};
};

/// A model, one batch of random data for it, and its optimizer's family.
struct Workload {
  Task model{nullptr};
  torch::Tensor data, target;
  bool adamw = false;
};

/// `name` is convnet, resnet50 or gpt; `small` is for a CPU.
inline Workload make_workload(const std::string& name, bool small, int rank, const torch::Device& device) {
  torch::manual_seed(0);
  Workload made;
  const int batch = small ? 4 : name == "convnet" ? 1024 : 64;
  const auto draw = [&](at::IntArrayRef shape, int classes, at::IntArrayRef targets) {
    torch::manual_seed(100 + rank);
    made.data = torch::rand(shape).to(device);
    made.target = torch::randint(classes, targets).to(device);
  };
  if (name == "convnet") {
    made.model = Task(std::shared_ptr<TaskImpl>(std::make_shared<ConvNetTaskImpl>()));
    draw({batch, 1, 28, 28}, 10, {batch});
  } else if (name == "resnet50") {
    const int classes = small ? 10 : 1000, side = small ? 32 : 224;
    made.model = Task(std::shared_ptr<TaskImpl>(std::make_shared<ResNet50Impl>(small ? 8 : 64, classes)));
    draw({batch, 3, side, side}, classes, {batch});
  } else if (name == "gpt") {
    const int block = small ? 16 : 256, vocabulary = 65;
    made.model = Task(std::shared_ptr<TaskImpl>(
        std::make_shared<GptImpl>(small ? 32 : 384, small ? 2 : 6, block, vocabulary)));
    torch::manual_seed(100 + rank);
    made.data = torch::randint(vocabulary, {batch, block}).to(device);
    made.target = torch::randint(vocabulary, {batch * block}).to(device);
    made.adamw = true;
  } else {
    throw lockstep::UsageError("the model is " + name + ": give convnet, resnet50 or gpt");
  }
  made.model->to(device);
  return made;
}

}  // namespace bench
