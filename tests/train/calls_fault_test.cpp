// A mistake in the program's control flow leads the ranks into different calls: the error names the call of each
// rank, long before the timeout.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/files.hpp"
#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"

namespace calls_fault_test {

namespace {

void says(const std::string& error, const std::vector<std::string>& words) {
  CAPTURE(error);
  for (const std::string& each : words) CHECK_THAT(error, ContainsSubstring(each));
}

}  // namespace

TEST_CASE("ranks in different calls are told which, and a rank that ends early is the culprit") {
  struct Case {
    std::string mode;
    std::vector<std::string> texts;
    std::string timeout = {};
  };
  const std::string backward = "DistributedDataParallel::backward";
  const std::string ended = "error: rank 1 has ended with exit code 0 while rank 0 waits in ",
                    start = "the constructor of Trainer";
  const std::vector<Case> cases{
      {"evaluate", {"rank 0 is in Trainer::evaluate, rank 1 in Trainer::fit; call both on every rank"}},
      {"evaluate or save", {"rank 0 is in Trainer::evaluate, rank 1 in Trainer::save_checkpoint;"}},
      {"load or load if it exists",
       {"rank 0 is in Trainer::load_checkpoint, rank 1 in Trainer::load_checkpoint_if_exists;"}},
      {"evaluate in a callback", {"rank 0 is in Trainer::evaluate, rank 1 in Trainer::fit"}},
      {"evaluate after a page on rank 0", {"rank 0 is in RunReport::on_epoch, rank 1 in Trainer::fit;"}},
      {"skip a backward",
       {"rank 0 is in " + backward + ", rank 1 in the forward of DistributedDataParallel (buffers);"}},
      // The later backwards of rank 1 were paired with the earlier ones of rank 0.
      {"skip a backward of a model without buffers", {ended + "all_reduce #", " of " + backward}},
      {"break", {ended + "all_reduce #", " of " + backward}},
      {"break, then save", {"rank 0 is in " + backward + ", rank 1 in save_model"}},
      // Gloo throws on a thread of its own.
      {"break, then average", {"rank 0 is in " + backward + ", rank 1 in average_parameters;"}},
      {"exit", {ended}},
      {"start: return before the rendezvous", {ended + start + " (rendezvous);"}},
      {"start: return before the communicator", {ended + start + " (communicator 'lockstep/comm/0');"}},
      {"start: sleep",
       {"warning: rank 1 has not come to make the communicator 'lockstep/comm/0' in " + start +
            " after 5 s (the timeout is 7 s)",
        "rank 1 has not come to make the communicator 'lockstep/comm/0' in " + start + " after 7 s"},
       "7"},
      {"start: save", {"rank 0 is in " + start + ", rank 1 in save_model;"}},
      {"two trainers", {" has entered all_gather_bytes #", " in the communicator 'lockstep/comm/"}, "6"},
  };
  std::vector<std::unique_ptr<lockstep_test::Process>> processes;
  for (const Case& one : cases)
    processes.emplace_back(new lockstep_test::Process(
        lockstep_test::start({lockstep_test::test_program("calls_program"), "--nproc", "2", one.mode},
                             {{"LOCKSTEP_TIMEOUT", one.timeout}})));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    REQUIRE(processes[i]->wait(std::chrono::seconds(60)));
    CAPTURE(cases[i].mode);
    CHECK(processes[i]->exit_code() == 1);
    says(processes[i]->error(), cases[i].texts);
    CHECK(lockstep_test::processes_left(processes[i]->marker()) == 0);
  }
}

TEST_CASE("no result of calls that differ is written or returned") {
  const TemporaryFolder folder;
  const auto path = folder.write("model.pt", "the last good model");
  for (const std::string& mode : {"save " + path.string(), std::string("evaluate"), std::string("fit")}) {
    CAPTURE(mode);
    const auto run = lockstep_test::run(
        {lockstep_test::test_program("calls_program"), "--nproc", "2", "reduce, then " + mode});
    CHECK(run.code == 1);
    CHECK(run.out.empty());
    says(run.error, {"the ranks disagree on collective #", "rank 1 called all_reduce of sum, [4] int32"});
  }
  CHECK(lockstep::read_file(path) == "the last good model");
}

TEST_CASE("without a launcher a rank that ends early is the culprit") {
  const auto program = lockstep_test::test_program("calls_program");
  lockstep_test::Together host({program, "exit on rank 0"}, 2),
      other({program, "start: return before the communicator"}, 2);
  CHECK(host.wait() == std::vector<int>{0, 1});
  says(host[1].error(), {"rank 0 has left after all_reduce #", " while rank 1 waits in all_reduce #"});
  CHECK(other.wait() == std::vector<int>{1, 0});
  says(other[0].error(),
       {"rank 1 has ended with exit code 0 while rank 0 waits in the constructor of Trainer"});
}

}  // namespace calls_fault_test
