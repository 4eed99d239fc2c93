// Programs of collectives in which one rank makes a mistake: in real processes, over shared memory and over Gloo.
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/random_calls.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace wrong_programs_test {

using namespace lockstep_test;

TEST_CASE(
    "none of 1,000 programs with a mistake in their collectives ends with exit code 0, and right ones do") {
  struct Run {
    unsigned seed;
    bool wrong;
    std::unique_ptr<Process> process;
  };
  std::vector<Run> runs;
  int wrong = 0, right = 0;
  const auto finish = [&] {
    for (const auto& [seed, is_wrong, process] : runs) {
      CAPTURE(seed, process->error());
      REQUIRE(process->wait(Milliseconds(30000)));
      CHECK((process->exit_code() != 0) == is_wrong);
    }
    runs.clear();
  };
  for (unsigned seed = 0; wrong < 1000; ++seed) {
    std::mt19937 random(seed);
    const int size = 2 + static_cast<int>(seed % 3);
    const int culprit = seed % 20 == 0 ? -1 : static_cast<int>(seed / 3) % size;
    const auto called = [&](std::vector<Step> steps) {  // as the program does
      for (Step& step : steps) {
        step.label = 0;
        step.root %= size;
        if (step.operation == Operation::new_group) step.elements %= size;
      }
      return steps;
    };
    const auto steps = random_steps(random), others = mistaken(steps, random);
    const bool is_wrong = culprit >= 0 && called(others) != called(steps);
    if (!is_wrong && culprit >= 0) continue;  // the mistake changes nothing
    ++(is_wrong ? wrong : right);
    Variables variables{{"OMP_NUM_THREADS", "1"}};
    if (seed / 12 % 2 == 0) variables["LOCKSTEP_TEST_GLOO"] = "1";
    runs.push_back({seed, is_wrong,
                    std::unique_ptr<Process>(
                        new Process(start({test_program("comm_fault"), fmt::format("calls of {}", seed),
                                           std::to_string(culprit), "--nproc", std::to_string(size)},
                                          variables)))});
    if (runs.size() == 4) finish();
  }
  finish();
  CHECK(right > 40);
}

}  // namespace wrong_programs_test
