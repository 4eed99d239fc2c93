#include "lockstep/grad/detail/bucket_plan.hpp"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <random>

#include "support/catch.hpp"

namespace bucket_plan_test {

using lockstep::detail::BucketPlan;
using lockstep::detail::ParameterEntry;

namespace {

ParameterEntry entry(std::size_t bytes, at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU) {
  ParameterEntry parameter;
  parameter.bytes = bytes;
  parameter.dtype = dtype;
  parameter.device = device;
  return parameter;
}

std::vector<ParameterEntry> floats(const std::vector<std::size_t>& counts) {
  std::vector<ParameterEntry> parameters;
  for (const std::size_t count : counts) parameters.push_back(entry(4 * count));
  return parameters;
}

std::vector<ParameterEntry> entries_of(const std::vector<at::Tensor>& tensors) {
  std::vector<ParameterEntry> parameters;
  for (const at::Tensor& tensor : tensors) parameters.push_back(entry(tensor.nbytes(), tensor.scalar_type()));
  return parameters;
}

std::vector<at::Tensor> random_parameters(std::mt19937& random, bool mixed) {
  std::vector<at::Tensor> tensors;
  const int count = std::uniform_int_distribution<>(1, 40)(random);
  for (int i = 0; i < count; ++i) {
    const auto type = mixed && random() % 3 == 0   ? at::kDouble
                      : mixed && random() % 3 == 0 ? at::kHalf
                                                   : at::kFloat;
    tensors.push_back(at::empty({std::uniform_int_distribution<>(0, 3000)(random)}, type));
  }
  return tensors;
}

BucketPlan sorted(BucketPlan plan) {
  std::sort(plan.begin(), plan.end());
  return plan;
}

}  // namespace

TEST_CASE("the default caps are 1 MiB, then 25 MiB") {
  const std::size_t mib = (1 << 20) / 4;
  CHECK(lockstep::detail::assign_buckets(floats({mib, mib, 23 * mib, mib, 1}), {0, 1, 2, 3, 4},
                                         lockstep::detail::bucket_caps({})) ==
        BucketPlan{{0}, {1, 2, 3}, {4}});
}

TEST_CASE("plans equal those of c10d") {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const bool mixed = round % 2 == 1;
    const auto tensors = random_parameters(random, mixed);
    std::vector<std::size_t> caps;
    for (int i = std::uniform_int_distribution<>(1, 4)(random); i > 0; --i)
      caps.push_back(std::uniform_int_distribution<>(1, 20'000)(random));
    CAPTURE(round, tensors.size(), caps);

    auto registered = std::get<0>(
        c10d::compute_bucket_assignment_by_size(tensors, {std::numeric_limits<std::size_t>::max()}));
    std::reverse(registered.begin(), registered.end());
    CHECK(lockstep::detail::plan_by_registration(entries_of(tensors)) == registered);

    std::vector<std::size_t> order(tensors.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<at::Tensor> ready;
    for (const std::size_t i : order) ready.push_back(tensors[i]);
    const auto theirs = std::get<0>(c10d::compute_bucket_assignment_by_size(
        ready, caps, {}, std::vector<std::int64_t>(order.begin(), order.end())));
    const auto ours = lockstep::detail::assign_buckets(entries_of(tensors), order, caps);
    // With several dtypes, c10d adds those left open in the order of a hash table.
    if (mixed)
      CHECK(sorted(ours) == sorted(theirs));
    else
      CHECK(ours == theirs);
  }
}

TEST_CASE("a model over two devices: buckets of each device's own") {
  // As the gradients of a model would come whose first half lies on cuda:0 and whose second on cuda:1.
  const at::Device first(at::kCUDA, 0), second(at::kCUDA, 1);
  const std::vector<ParameterEntry> parameters{entry(400, at::kFloat, first), entry(40, at::kFloat, first),
                                               entry(400, at::kFloat, second), entry(40, at::kFloat, second),
                                               entry(8, at::kDouble, second)};
  CHECK(lockstep::detail::plan_by_registration(parameters) ==
        lockstep::detail::BucketPlan{{4}, {2, 3}, {0, 1}});
  CHECK(lockstep::detail::assign_buckets(parameters, {4, 3, 2, 1, 0}, {300, 1000}) ==
        lockstep::detail::BucketPlan{{3, 2}, {1, 0}, {4}});
}

}  // namespace bucket_plan_test
