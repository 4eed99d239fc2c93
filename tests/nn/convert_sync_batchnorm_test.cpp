// What convert_sync_batchnorm can convert, and what it refuses by name.
#include "lockstep/nn/sync_batch_norm.hpp"

#include "lockstep/comm/local_comm.hpp"
#include "nn/twin.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace convert_sync_batchnorm_test {

namespace nn = torch::nn;
using lockstep::convert_sync_batchnorm;
using Names = std::vector<std::string>;

namespace {

// A Sequential that can stand in another one.
struct BlockImpl : nn::SequentialImpl {
  using nn::SequentialImpl::SequentialImpl;
  torch::Tensor forward(const torch::Tensor& x) { return nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Block);

struct HeadImpl : nn::Module {
  HeadImpl() {
    norm = register_module("norm", lockstep::SyncBatchNorm1d(4));
    body = register_module("body", nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return body->forward(norm(x)); }
  lockstep::SyncBatchNorm1d norm{nullptr};
  nn::Sequential body;
};
TORCH_MODULE(Head);

struct NetImpl : nn::Module {
  NetImpl() {
    body = register_module(
        "body", nn::Sequential(nn::Conv2d(1, 2, 3), nn::BatchNorm2d(nn::BatchNormOptions(2).momentum(0.3)),
                               Block(nn::BatchNorm2d(2), nn::ReLU())));
    volume = register_module("volume", nn::Sequential({{"bn", nn::BatchNorm3d(2)}}));
    head = register_module("head", Head());
  }
  nn::Sequential body, volume;
  Head head{nullptr};
};
TORCH_MODULE(Net);

struct OwnNormImpl : nn::BatchNorm2dImpl {
  using nn::BatchNorm2dImpl::BatchNorm2dImpl;
  torch::Tensor forward(const torch::Tensor& x) { return x; }
};
TORCH_MODULE(OwnNorm);

/// Checks that `model` is not converted, for a reason with these words.
template <class Model>
void refused(Model& model, const std::vector<std::string>& words) {
  const std::string text = text_of<lockstep::UsageError>([&] { convert_sync_batchnorm(model, group_of()); });
  for (const std::string& each : words) CHECK_THAT(text, ContainsSubstring(each));
}

}  // namespace

TEST_CASE("every batch norm of a tree is converted, and its tensors stay") {
  Net net;
  net->body->eval();
  net->body[1]->as<nn::BatchNorm2d>()->weight.requires_grad_(false);
  const auto parameters = net->named_parameters();
  const auto buffers = net->named_buffers();
  const auto twin = std::make_shared<Twin>();
  CHECK(convert_sync_batchnorm(net, group_of(twin)) ==
        Names{"body.1", "body.2.0", "volume.bn", "head.norm", "head.body.1"});

  auto* norm = net->body[1]->as<lockstep::SyncBatchNorm2d>();
  REQUIRE(norm);
  CHECK(norm == net->named_modules()["body.1"].get());
  CHECK(norm->options.momentum() == 0.3);
  CHECK(!norm->is_training());
  CHECK(!norm->weight.requires_grad());
  CHECK(net->volume[0]->as<lockstep::SyncBatchNorm3d>()->is_training());
  CHECK(net->head->body[1]->as<lockstep::SyncBatchNorm1d>()->ranks() == 2);
  CHECK(net->head->norm->ranks() == 2);
  REQUIRE(net->named_parameters().keys() == parameters.keys());
  for (const auto& item : net->named_parameters()) CHECK(item.value().is_same(parameters[item.key()]));
  REQUIRE(net->named_buffers().keys() == buffers.keys());
  for (const auto& item : net->named_buffers())
    CHECK(item.value().data_ptr() == buffers[item.key()].data_ptr());

  net->train();
  net->body->forward(torch::randn({2, 1, 6, 6})).sum().backward();
  net->head->forward(torch::randn({3, 4})).sum().backward();
  CHECK(twin->calls == 4 + 3);  // of head.norm's input nobody wants the gradient
  CHECK(norm->running_mean.abs().sum().item<float>() > 0);
  CHECK(torch::equal(norm->running_mean, buffers["body.1.running_mean"]));

  // Once more, for other ranks.
  CHECK(convert_sync_batchnorm(*net, group_of()).size() == 5);
  net->head->forward(torch::randn({3, 4}));
  CHECK(twin->calls == 7);
}

TEST_CASE("messages name a converted module by its place") {
  Net net;
  convert_sync_batchnorm(net, group_of());
  CHECK(text_of<lockstep::UsageError>([&] {
          net->body->forward(torch::ones({1, 6, 6}));
        }) ==
        "SyncBatchNorm2d 'body.1' takes an input [N, C, H, W] with 2 channels, but got [2, 4, 4] float32");
}

TEST_CASE("a module that hangs in two places is one module afterwards") {
  nn::AnyModule shared(nn::BatchNorm1d(4));
  nn::Sequential model(shared, nn::Linear(4, 4), shared);
  shared = nn::AnyModule();
  CHECK(convert_sync_batchnorm(model, group_of()) == Names{"0"});
  CHECK(model[0] == model[2]);
  CHECK(model[0]->as<lockstep::SyncBatchNorm1d>());
  CHECK(model->named_children()["2"] == model[0]);
}

TEST_CASE("an AnyModule is converted, what it is and what is in it") {
  lockstep::LocalComm comm{lockstep::World::from_environment()};
  nn::AnyModule norm(nn::BatchNorm2d(3));
  CHECK(convert_sync_batchnorm(norm, comm) == Names{""});
  CHECK(norm.ptr()->as<lockstep::SyncBatchNorm2d>()->ranks() == 1);
  CHECK(norm.forward(torch::randn({2, 3, 4, 4})).defined());
  nn::AnyModule block(Block(nn::BatchNorm2d(3), nn::ReLU()));
  CHECK(convert_sync_batchnorm(block, comm) == Names{"0"});
  lockstep::SyncBatchNorm2d alone(3);
  CHECK(convert_sync_batchnorm(alone, comm) == Names{""});
  CHECK(alone->ranks() == 1);
}

TEST_CASE("a model without batch norms stays as it is") {
  nn::Sequential model(nn::Linear(4, 4), nn::InstanceNorm1d(4), nn::LayerNorm(nn::LayerNormOptions({4})));
  CHECK(convert_sync_batchnorm(model, group_of()).empty());
}

TEST_CASE("what cannot be converted is refused by name, and nothing is changed") {
  struct Mixed : nn::Module {
    Mixed() {
      bn = register_module("bn", nn::BatchNorm2d(3));
      body = register_module("body", nn::Sequential(nn::BatchNorm2d(3), OwnNorm(3)));
      list = register_module("list", nn::ModuleList(nn::BatchNorm1d(3)));
    }
    nn::BatchNorm2d bn{nullptr};
    nn::Sequential body;
    nn::ModuleList list;
  } model;
  refused(model, {"convert_sync_batchnorm has changed nothing",
                  "'bn' (a torch::nn::BatchNorm2d outside of a torch::nn::Sequential",
                  "declare it as lockstep::SyncBatchNorm2d", "'body.1' (of the class ",
                  "OwnNormImpl, which is derived from torch::nn::BatchNorm2d",
                  "'list.0' (a torch::nn::BatchNorm1d"});
  CHECK(model.body[0]->as<nn::BatchNorm2d>());

  nn::BatchNorm3d alone(3);
  refused(alone, {"the model itself (a torch::nn::BatchNorm3d"});
}

TEST_CASE("a batch norm of a Sequential that a member calls as well is refused") {
  nn::BatchNorm2d member(3);
  nn::Sequential model(nn::ReLU(), member);
  refused(model, {"'1' (also held outside of its torch::nn::Sequential"});
  member = nullptr;
  CHECK_NOTHROW(convert_sync_batchnorm(model, group_of()));
  CHECK(model[1]->as<lockstep::SyncBatchNorm2d>());
}

}  // namespace convert_sync_batchnorm_test
