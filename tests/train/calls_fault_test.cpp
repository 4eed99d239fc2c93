// A mistake in the program's control flow leads the ranks into different calls: the error names the call of each
// rank, long before the timeout.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace calls_fault_test {

TEST_CASE("ranks in different calls are told which, and a rank that ends early is the culprit") {
  struct Case {
    std::string mode;
    std::vector<std::string> texts;
    std::string timeout = {};
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
      // The later backwards of rank 1 were paired with the earlier ones of rank 0.
      {"skip a backward of a model without buffers",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in all_reduce #", " of " + backward}},
      {"break",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in all_reduce #", " of " + backward,
        "; every rank must make the same calls, and equally many; noticed by rank 0 (pid "}},
      {"break, then save", {"rank 0 is in " + backward + ", rank 1 in save_model", "; call both"}},
      // Gloo throws on a thread of its own.
      {"break, then average", {"rank 0 is in " + backward + ", rank 1 in average_parameters; call both"}},
      {"exit",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in ",
        "; every rank must make the same calls, and equally many; noticed by rank 0 (pid "}},
      {"start: return before the rendezvous",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in the constructor of Trainer "
        "(rendezvous); every rank must make the same calls, and equally many; noticed by rank 0 (pid "}},
      {"start: return before the communicator",
       {"error: rank 1 has ended with exit code 0 while rank 0 waits in the constructor of Trainer "
        "(communicator 'lockstep/comm/0'); every rank must make the same calls, and equally many; noticed by "
        "rank 0 (pid "}},
      {"start: sleep",
       {"warning: rank 1 has not come to make the communicator 'lockstep/comm/0' in the constructor of "
        "Trainer after 5 s (the timeout is 7 s)",
        "rank 1 has not come to make the communicator 'lockstep/comm/0' in the constructor of Trainer after "
        "7 s"},
       "7"},
      {"start: save",
       {"rank 0 is in the constructor of Trainer, rank 1 in save_model; call both on every rank, and equally "
        "often"}},
      {"two trainers",
       {" has entered all_gather_bytes #", " in the communicator 'lockstep/comm/",
        " has not: every rank must make the calls of all communicators in the same order"},
       "6"},
  };
  std::vector<std::unique_ptr<lockstep_test::Process>> processes;
  for (const Case& one : cases)
    processes.emplace_back(new lockstep_test::Process(
        lockstep_test::start({lockstep_test::test_program("calls_program"), "--nproc", "2", one.mode},
                             {{"LOCKSTEP_TIMEOUT", one.timeout}})));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    REQUIRE(processes[i]->wait(std::chrono::seconds(60)));
    const std::string error = processes[i]->error();
    CAPTURE(cases[i].mode, error);
    CHECK(processes[i]->exit_code() == 1);
    for (const std::string& text : cases[i].texts) CHECK_THAT(error, ContainsSubstring(text));
    CHECK(lockstep_test::processes_left(processes[i]->marker()) == 0);
  }
}

TEST_CASE("without a launcher a rank that ends early is the culprit") {
  const auto program = lockstep_test::test_program("calls_program");
  lockstep_test::Together host({program, "exit on rank 0"}, 2),
      other({program, "start: return before the communicator"}, 2);
  CHECK(host.wait() == std::vector<int>{0, 1});
  INFO(host[1].error());
  CHECK_THAT(host[1].error(),
             ContainsSubstring("rank 0 has ended, and the store with it, while rank 1 waits in "
                               "all_reduce #") &&
                 ContainsSubstring(" of DistributedDataParallel::backward; noticed by rank 1"));
  CHECK(other.wait() == std::vector<int>{1, 0});
  INFO(other[0].error());
  CHECK_THAT(other[0].error(),
             ContainsSubstring("rank 1 has ended with exit code 0 while rank 0 waits in the constructor of "
                               "Trainer (communicator 'lockstep/comm/0'); every rank must"));
}

}  // namespace calls_fault_test
