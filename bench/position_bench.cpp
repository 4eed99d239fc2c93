// What a communicator adds to each collective so that the store can compare the calls of the ranks: nanoseconds of one call, the
// median of 9 runs.
//   bench_position
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/detail/group_status.hpp"

namespace {

double nanoseconds(const std::vector<at::Tensor>& tensors, const std::shared_ptr<const std::string>& label) {
  constexpr int calls = 1'000'000;
  std::vector<double> runs;
  for (int run = 0; run < 9; ++run) {
    lockstep::detail::GroupStatus status("group", {0, 1});
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < calls; ++call)
      status.enter("all_reduce", {},
                   lockstep::detail::CallContent::of(lockstep::ReduceOp::sum, std::nullopt, tensors), label);
    runs.push_back(
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / calls);
  }
  std::sort(runs.begin(), runs.end());
  return runs[4];
}

}  // namespace

int main() {
  const std::vector<at::Tensor> one{at::zeros({1 << 20})}, ten(10, at::zeros({64, 64}));
  std::printf("one tensor: %.0f ns a collective\n", nanoseconds(one, nullptr));
  std::printf(
      "one tensor, with a bucket's label: %.0f ns\n",
      nanoseconds(one, std::make_shared<const std::string>("bucket 2 of 5, with parameter 3 'fc.weight'")));
  std::printf("a list of ten: %.0f ns\n", nanoseconds(ten, nullptr));
}
