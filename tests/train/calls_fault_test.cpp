// A mistake in the program's control flow leads the ranks into different calls: the error names the call of each
// rank, long before the timeout.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace calls_fault_test {

TEST_CASE("ranks in different calls are told which, and a rank that ends early is the culprit") {
  struct Case {
    std::string mode;
    std::vector<std::string> texts;
  };
  const std::string backward = "DistributedDataParallel::backward";
  const std::vector<Case> cases{
      {"evaluate", {"rank 0 is in Trainer::evaluate, rank 1 in Trainer::fit; call both on every rank"}},
      {"evaluate or save",
       {"rank 0 is in Trainer::evaluate, rank 1 in Trainer::save_checkpoint; call both on every rank"}},
      {"load or load if it exists",
       {"rank 0 is in Trainer::load_checkpoint, rank 1 in Trainer::load_checkpoint_if_exists; call both"}},
      {"evaluate in a callback", {"rank 0 is in Trainer::evaluate, rank 1 in Trainer::fit", "; call both"}},
      {"evaluate after a page on rank 0",
       {"rank 0 is in RunReport::on_epoch, rank 1 in Trainer::evaluate; call both"}},
      {"skip a backward",
       {"rank 0 is in " + backward +
        ", rank 1 in the forward of DistributedDataParallel (buffers); call both"}},
      {"break",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in all_reduce #", " of " + backward,
        "; every rank must make the same calls, and equally many; noticed by rank 0 (pid "}},
      {"break, then save", {"rank 0 is in " + backward + ", rank 1 in save_model", "; call both"}},
      // Gloo throws on a thread of its own.
      {"break, then average", {"rank 0 is in " + backward + ", rank 1 in average_parameters; call both"}},
      {"exit",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in ",
        "; every rank must make the same calls, and equally many; noticed by rank 0 (pid "}},
  };
  std::vector<std::unique_ptr<lockstep_test::Process>> processes;
  for (const Case& one : cases)
    processes.emplace_back(new lockstep_test::Process(
        lockstep_test::start({lockstep_test::test_program("calls_program"), "--nproc", "2", one.mode})));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    REQUIRE(processes[i]->wait(std::chrono::seconds(60)));
    const std::string error = processes[i]->error();
    CAPTURE(cases[i].mode, error);
    CHECK(processes[i]->exit_code() == 1);
    for (const std::string& text : cases[i].texts) CHECK_THAT(error, ContainsSubstring(text));
    CHECK(lockstep_test::processes_left(processes[i]->marker()) == 0);
  }
}

}  // namespace calls_fault_test
