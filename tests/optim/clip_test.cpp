#include "lockstep/optim/clip.hpp"

#include <torch/torch.h>

#include <limits>
#include <vector>

#include "optim/common.hpp"

namespace clip_test {

using lockstep::clip_grad_norm;

TEST_CASE("the norm is that of all gradients together, and larger ones are scaled to the limit") {
  std::vector<torch::Tensor> p{torch::zeros({2}).requires_grad_(), torch::zeros({2, 1}).requires_grad_(),
                               torch::zeros({3}).requires_grad_()};
  const auto set = [&] {
    p[0].mutable_grad() = torch::tensor({3.0f, 0.0f});
    p[1].mutable_grad() = torch::tensor({{0.0f}, {-4.0f}});
  };
  set();
  CHECK(clip_grad_norm(p, 10).item<double>() == Approx(5));
  CHECK(torch::allclose(p[1].grad(), torch::tensor({{0.0f}, {-4.0f}})));
  CHECK(clip_grad_norm(p, 1).item<double>() == Approx(5));
  CHECK(torch::allclose(p[1].grad(), torch::tensor({{0.0f}, {-0.8f}})));
  CHECK_FALSE(p[2].grad().defined());
  set();
  CHECK(clip_grad_norm(p, 2, {.norm_type = std::numeric_limits<double>::infinity()}).item<double>() ==
        Approx(4));
  CHECK(torch::allclose(p[0].grad(), torch::tensor({1.5f, 0.0f})));
  set();
  CHECK(clip_grad_norm(p, 100, {.norm_type = 1}).item<double>() == Approx(7));
  lockstep::clip_grad_value(p, 3.5);
  CHECK(torch::allclose(p[1].grad(), torch::tensor({{0.0f}, {-3.5f}})));
}

TEST_CASE("clipping without gradients has a norm of 0") {
  std::vector<torch::Tensor> p{torch::zeros({2}).requires_grad_()};
  CHECK(clip_grad_norm(p, 1).item<double>() == 0);
  CHECK(clip_grad_norm(std::vector<torch::Tensor>{}, 1).item<double>() == 0);
  lockstep::clip_grad_value(p, 1);
}

TEST_CASE("a tied parameter counts once, and errors name parameters") {
  torch::nn::Linear a(2, 2), b(2, 2);
  b->weight = a->weight;
  torch::nn::Sequential model(a, b);
  for (const auto& parameter : model->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
  a->weight.mutable_grad() = torch::ones({2, 2});
  CHECK(clip_grad_norm(*model, 1).item<double>() == Approx(2));

  a->bias.mutable_grad()[1] = std::numeric_limits<float>::quiet_NaN();
  CHECK(text_of<lockstep::GradientError>([&] { clip_grad_norm(*model, 1, {.error_if_nonfinite = true}); }) ==
        "the norm of the gradients is nan: the gradient of '0.bias' holds values that are not finite; lower "
        "the "
        "learning rate, or skip this step");
  clip_grad_norm(*model, 1);  // as Python, silent unless asked
  CHECK(torch::isnan(a->weight.grad()).all().item<bool>());

  a->bias.mutable_grad() = torch::ones({2}).to_sparse();
  CHECK(text_of<lockstep::GradientError>([&] { clip_grad_norm(*model, 1); }) ==
        "clip_grad_norm: the gradient of '0.bias' is sparse: leave that parameter out");
  CHECK(text_of<lockstep::UsageError>([&] { clip_grad_norm(*model, -1); }) != "");
  a->bias.mutable_grad() = torch::ones({2});
  CHECK(text_of<lockstep::UsageError>([&] { clip_grad_norm(*model, 1, {.norm_type = 0}); }) != "");
  CHECK(text_of<lockstep::UsageError>([&] { lockstep::clip_grad_value(*model, -1); }) != "");
}

}  // namespace clip_test
