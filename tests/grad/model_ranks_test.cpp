// Models that have diverged are found by the bits of their parameters, and named where it is more than rounding.
#include "lockstep/grad/model.hpp"

#include <cmath>

#include "grad/models.hpp"

namespace model_ranks_test {

namespace {

std::vector<lockstep::NamedTensor> parameters_of_all_kinds() {
  torch::manual_seed(3);
  return {{"plain", torch::randn({5, 3})},
          {"double", torch::randn({4}, torch::kDouble)},
          {"half", torch::randn({6}).to(torch::kHalf)},
          {"bfloat", torch::randn({6}).to(torch::kBFloat16)},
          {"complex", torch::randn({3, 2}, torch::kComplexFloat)},
          {"whole", torch::arange(7)},
          {"flags", torch::tensor({true, false})},
          {"transposed", torch::randn({4, 3}).t()},
          {"every second", torch::randn({8}).slice(0, 0, 8, 2)},
          {"number", torch::randn({})},
          {"empty", torch::randn({0, 3})}};
}

bool on_the_last() {
  return test_world().size() > 1 && test_world().rank() == test_world().size() - 1;
}

}  // namespace

TEST_CASE("parameters that are equal on all ranks") {
  CHECK(lockstep::check_same_parameters(shared_comm(), parameters_of_all_kinds()) == 0);
  CHECK(lockstep::check_same_parameters(shared_comm(), {}) == 0);
  // What all share is equal, even where it is not a number.
  CHECK(lockstep::check_same_parameters(shared_comm(), {{"nan", torch::full({2}, std::nan(""))}}) == 0);
}

TEST_CASE("parameters that differ by rounding") {
  auto parameters = parameters_of_all_kinds();
  float& element = parameters[0].tensor.data_ptr<float>()[7];
  if (on_the_last()) element = std::nextafter(element, 10.0F);
  const double distance = lockstep::check_same_parameters(shared_comm(), parameters);
  CHECK((test_world().size() == 1 ? distance == 0 : distance > 0 && distance < 1e-6));
  if (test_world().size() > 1)
    CHECK_THROWS_AS(lockstep::check_same_parameters(shared_comm(), parameters, 0), lockstep::MismatchError);
}

TEST_CASE("parameters of any kind that differ are named, the same on every rank") {
  for (std::size_t i = 0; i + 1 < parameters_of_all_kinds().size(); ++i) {
    auto parameters = parameters_of_all_kinds();
    CAPTURE(parameters[i].name);
    if (on_the_last()) {
      at::Tensor& changed = parameters[i].tensor;
      changed.dtype() == torch::kBool ? changed.fill_(true) : changed.add_(1);
    }
    const std::string text = thrown_by([&] { lockstep::check_same_parameters(shared_comm(), parameters); });
    for (const std::string& other : shared_comm().all_gather_bytes(text)) CHECK(other == text);
    if (test_world().size() == 1)
      CHECK(text.empty());
    else
      CHECK_THAT(text,
                 ContainsSubstring(fmt::format("1 of 11 parameters differ, most of all parameter {} '{}' "
                                               "on rank {}",
                                               i, parameters[i].name, test_world().size() - 1)));
  }
}

TEST_CASE("a pair of parameters that have changed places differs", "[2+]") {
  auto parameters = parameters_of_all_kinds();
  parameters.push_back({"other", torch::randn({5, 3})});
  if (on_the_last()) std::swap(parameters.front().tensor, parameters.back().tensor);
  CHECK_THROWS_AS(lockstep::check_same_parameters(shared_comm(), parameters), lockstep::MismatchError);
}

}  // namespace model_ranks_test
