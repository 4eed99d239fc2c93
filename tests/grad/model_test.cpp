#include "lockstep/grad/model.hpp"

#include <torch/torch.h>

#include "lockstep/grad/detail/ddp_start.hpp"
#include "support/catch.hpp"
#include "support/text_of.hpp"

namespace model_test {

using lockstep::NamedTensor;

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
  const auto refused = [](const auto& parameters, const at::Device& device) {
    return text_of<lockstep::UsageError>([&] { lockstep::detail::check_device(parameters, device); });
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
