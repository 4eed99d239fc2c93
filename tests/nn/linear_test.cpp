#include "lockstep/nn/linear.hpp"

#include <torch/torch.h>

#include "support/catch.hpp"

namespace linear_test {

namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { NetImpl::reset(); }
  void reset() override {
    layer = register_module("layer", lockstep::Linear(3, 2));
    layers = register_module("layers", torch::nn::Sequential(lockstep::Linear(2, 2), torch::nn::ReLU()));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(layer(x)); }
  lockstep::Linear layer{nullptr};
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Net);

/// The output of `f` and the gradients of `inputs`.
template <class F>
std::vector<torch::Tensor> with_gradients(const std::vector<torch::Tensor>& inputs, F&& f) {
  const torch::Tensor output = f();
  auto tensors = torch::autograd::grad({(output * output.sin()).sum()}, inputs);
  tensors.push_back(output);
  return tensors;
}

bool same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const torch::Tensor& one, const torch::Tensor& other) { return one.equal(other); });
}

}  // namespace

TEST_CASE("Linear has the parameters of torch::nn::Linear and the bits of one addmm") {
  torch::manual_seed(5);
  torch::nn::Linear plain(1024, 48);
  torch::manual_seed(5);
  lockstep::Linear layer(1024, 48);
  REQUIRE(layer->weight.equal(plain->weight));
  REQUIRE(layer->bias.equal(plain->bias));
  CHECK(layer->named_parameters().keys() == plain->named_parameters().keys());

  const auto x = torch::randn({6, 5, 1024}, torch::requires_grad());
  const std::vector<torch::Tensor> inputs{x, layer->weight, layer->bias};
  CHECK(same_bits(with_gradients(inputs, [&] { return layer(x); }), with_gradients(inputs, [&] {
                    return torch::addmm(layer->bias, x.view({30, 1024}), layer->weight.t()).view({6, 5, 48});
                  })));
  lockstep::Linear without_bias(torch::nn::LinearOptions(1024, 48).bias(false));
  CHECK(without_bias(x).equal(x.matmul(without_bias->weight.t())));
}

TEST_CASE("a copy of a module has copies of its Linear layers, which are torch::nn::Linear to others") {
  Net net;
  const auto copy = std::dynamic_pointer_cast<NetImpl>(net->clone());
  REQUIRE(copy);
  CHECK(copy->layers[0]->as<lockstep::Linear>());
  const auto x = torch::randn({4, 2, 3});
  CHECK(copy->forward(x).equal(net(x)));
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.zero_();
  }
  CHECK(net->layer->weight.ne(0).any().item<bool>());
  int layers = 0;
  net->apply([&](torch::nn::Module& module) { layers += module.as<torch::nn::Linear>() != nullptr; });
  CHECK(layers == 2);
}

}  // namespace linear_test
