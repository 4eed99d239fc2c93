#include "lockstep/grad/model.hpp"

#include <torch/torch.h>

#include "lockstep/grad/detail/ddp_start.hpp"
#include "support/catch.hpp"

namespace model_test {

using lockstep::NamedTensor;

namespace {

std::string bytes_of(const std::vector<NamedTensor>& parameters,
                     const std::vector<NamedTensor>& buffers = {}) {
  return lockstep::detail::serialize(lockstep::detail::describe(parameters, buffers));
}

NamedTensor named(std::string name, std::vector<std::int64_t> shape, at::ScalarType type = at::kFloat,
                  bool requires_grad = true) {
  return {std::move(name), torch::zeros(shape, type).requires_grad_(requires_grad)};
}

std::string difference(const std::vector<std::vector<NamedTensor>>& ranks) {
  std::vector<std::string> bytes;
  for (const auto& parameters : ranks) bytes.push_back(bytes_of(parameters));
  return lockstep::detail::first_difference(bytes);
}

}  // namespace

TEST_CASE("equal models have no difference") {
  const std::vector<NamedTensor> model{named("a", {2, 3}), named("b", {})};
  CHECK(difference({model, model, model}).empty());
}

TEST_CASE("a difference names the parameter and its properties on each rank") {
  const std::vector<NamedTensor> model{named("a", {2}), named("fc.weight", {10, 5})};
  auto with = [&](NamedTensor second) { return std::vector<NamedTensor>{model[0], std::move(second)}; };
  CHECK(difference({model, model, with(named("fc.weight", {12, 5}))}) ==
        "parameter 1 is 'fc.weight' [10, 5] float32 on ranks 0, 1 and 'fc.weight' [12, 5] float32 on rank 2");
  const std::string first = "parameter 1 is 'fc.weight' [10, 5] float32 on rank 0 and ";
  CHECK(difference({model, with(named("fc.weight", {10, 5}, at::kDouble))}) ==
        first + "'fc.weight' [10, 5] float64 on rank 1");
  CHECK(difference({model, with(named("fc.weights", {10, 5}))}) ==
        first + "'fc.weights' [10, 5] float32 on rank 1");
  CHECK(difference({model, with(named("fc.weight", {10, 5}, at::kFloat, false))}) ==
        first + "'fc.weight' [10, 5] float32, without gradient on rank 1");
  CHECK(difference({model, {model[0]}}) == first + "absent on rank 1");
  CHECK(difference({{model[0]}, model}) ==
        "parameter 1 is absent on rank 0 and 'fc.weight' [10, 5] float32 on rank 1");
  const NamedTensor turned{"fc.weight", torch::zeros({5, 10}).t().requires_grad_(true)};
  CHECK(difference({model, with(turned)}) ==
        first + "'fc.weight' [10, 5] float32 with strides [1, 10] on rank 1");
}

TEST_CASE("buffers are compared too") {
  const std::string one = bytes_of({named("a", {2})}, {named("mean", {3}, at::kFloat, false)});
  const std::string other = bytes_of({named("a", {2})}, {named("mean", {4}, at::kFloat, false)});
  CHECK(lockstep::detail::first_difference({one, other}) ==
        "buffer 0 is 'mean' [3] float32 on rank 0 and 'mean' [4] float32 on rank 1");
}

TEST_CASE("a tied parameter is listed once, under its first name") {
  torch::nn::Module module;
  const auto weight = module.register_parameter("first", torch::zeros({3}));
  module.register_parameter("second", weight);
  module.register_parameter("third", torch::zeros({4}));
  const auto parameters = lockstep::unique_parameters(module);
  REQUIRE(parameters.size() == 2);
  CHECK(parameters[0].name == "first");
  CHECK(parameters[1].name == "third");
}

TEST_CASE("a device that is named for a model must be the one device that it is on") {
  const auto on = [](at::DeviceType type) { return torch::zeros({2}, at::TensorOptions().device(type)); };
  const std::vector<NamedTensor> here{{"a", on(at::kCPU)}, {"b", on(at::kCPU)}};
  const std::vector<NamedTensor> spread{{"a", on(at::kCPU)}, {"b", on(at::kMeta)}};
  const auto refused = [](const auto& parameters, const at::Device& device) -> std::string {
    try {
      lockstep::detail::check_device(parameters, device);
    } catch (const lockstep::UsageError& error) {
      return error.what();
    }
    return "";
  };
  CHECK(refused(here, at::kCPU).empty());
  CHECK(refused(here, at::Device(at::kCUDA, 1)) ==
        "DdpOptions::device is cuda:1, but 'a' is on cpu: move the model before");
  CHECK(
      refused(spread, at::kCPU) ==
      "DdpOptions::device is cpu, but the parts of this model live on several devices: 'a' on cpu and 'b' on "
      "meta; leave the option out");
}

}  // namespace model_test
