#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

/// Random programs of collectives, and what one mistake makes of them.
namespace lockstep_test {

enum class Operation {
  all_reduce,
  reduce,
  reduce_scatter,
  broadcast,
  all_gather,
  all_to_all,
  new_group,
  bytes,
  barrier
};
inline constexpr std::array operations{"all_reduce", "reduce",           "reduce_scatter",
                                       "broadcast",  "all_gather",       "all_to_all",
                                       "new_group",  "all_gather_bytes", "barrier"};

/// A collective. `elements` of new_group tells the number of its ranks. `op` is -1 where nothing is reduced, `root` where there is none; `dtype` is the number of float32, float64 or
/// bfloat16.
struct Step {
  Operation operation = Operation::all_reduce;
  int op = -1, root = -1;
  int dtype = 0;
  std::int64_t elements = 1;
  int label = 0;
  bool operator==(const Step&) const = default;
};

inline std::vector<Step> random_steps(std::mt19937& random) {
  const auto below = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
  std::vector<Step> steps(1 + random() % 300);
  for (Step& step : steps) {
    const int kind = below(3) > 0 ? 0 : below(static_cast<int>(operations.size()));
    step = {static_cast<Operation>(kind),
            kind < 3 ? below(5) : -1,
            kind == 1 || kind == 3 ? below(4) : -1,
            below(2),
            1 + below(8),
            below(3)};
    if (step.operation >= Operation::new_group) step.dtype = 0;  // which these do not have
    if (step.operation >= Operation::bytes) step.elements = 1;
  }
  return steps;
}

/// Returns the steps with one mistake, which may by chance change nothing.
inline std::vector<Step> mistaken(std::vector<Step> steps, std::mt19937& random) {
  const auto at = static_cast<std::ptrdiff_t>(random() % steps.size());
  Step& step = steps[static_cast<std::size_t>(at)];
  const bool moves = step.operation < Operation::bytes, has_dtype = step.operation < Operation::new_group;
  switch (random() % 9) {
    case 0:
      steps.erase(steps.begin() + at);
      break;
    case 1:
      steps.insert(steps.begin() + at, Step(step));
      break;
    case 2:
      std::swap(step, steps[random() % steps.size()]);
      break;
    case 3:
      step.dtype = has_dtype ? 2 : 0;
      break;
    case 4:
      step.op = step.op < 0 ? step.op : (step.op + 1) % 5;
      break;
    case 5:
      step.root = step.root < 0 ? step.root : step.root + 1;
      break;
    case 6:
      step.elements += moves;
      break;
    case 7:
      ++step.label;
      break;
    default:  // a rank that leaves out a step of several calls
      steps.erase(steps.begin() + at, steps.begin() + std::min<std::ptrdiff_t>(at + 4, std::ssize(steps)));
  }
  return steps;
}

}  // namespace lockstep_test
