// One rank fails where the others wait for it, and its program goes on: each of the others is told, soon and why.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace faults_test {

namespace {

/// The line that begins so; empty where there is none.
std::string line_of(const std::string& text, const std::string& begin) {
  const auto at = ("\n" + text).find("\n" + begin);
  return at == std::string::npos ? "" : text.substr(at, text.find('\n', at) - at);
}

}  // namespace

TEST_CASE("what one rank throws where the others wait for it is told to all") {
  struct Case {
    std::string mode, told = "a file is gone";
  };
  const std::vector<Case> cases{
      {"data"},
      {"loss"},
      {"metric"},
      {"test data"},
      {"step"},
      {"gradients"},
      {"schedule"},
      {"optimizer"},
      {"nothing", "the loss is nan over a count of 0"},
      {"first bucket", "the communication hook 'roomy' threw for bucket 1 of "},
      {"last bucket", "the communication hook 'roomy' threw for bucket "},
      {"wait", "the communication hook 'tight' threw: no room to unpack"},
      {"shard", "the step of the optimizer inside a ZeroRedundancyOptimizer threw"},
  };
  // Some at once: most of the time they wait.
  constexpr std::size_t at_once = 5;
  std::vector<std::unique_ptr<lockstep_test::Process>> processes;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    while (processes.size() < std::min(cases.size(), (i / at_once + 1) * at_once))
      processes.emplace_back(new lockstep_test::Process(
          lockstep_test::start({lockstep_test::test_program("train_fault_program"), "--nproc", "3",
                                "--prefix", "never", cases[processes.size()].mode})));
    REQUIRE(processes[i]->wait(std::chrono::seconds(120)));
    const std::string out = processes[i]->out(), error = processes[i]->error();
    CAPTURE(cases[i].mode, out, error);
    CHECK(!line_of(out, "rank 1 soon: error: ").empty());
    for (const char* others : {"rank 0 soon: consequence of ", "rank 2 soon: consequence of "})
      CHECK_THAT(line_of(out, others), ContainsSubstring("rank 1 failed first: " + cases[i].told));
    CHECK(lockstep_test::processes_left(processes[i]->marker()) == 0);
  }
}

}  // namespace faults_test
