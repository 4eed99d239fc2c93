// A training that a signal of the scheduler stops: the ranks agree on the step, save, and the next start goes on.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "support/by_hand.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/torchrun.hpp"

namespace stop_fault_test {

using namespace std::chrono_literals;
using namespace lockstep_test;
using Strings = std::vector<std::string>;

namespace {

const std::string program = test_program("stop_program");
const Variables one_thread{{"OMP_NUM_THREADS", "1"}};

struct Checkpoint {
  std::string path = fmt::format("/tmp/lockstep_stop_{}", new_marker());
  ~Checkpoint() { std::remove(path.c_str()); }
};

// The last line of an uninterrupted run of two ranks.
std::string finished() {
  const Checkpoint none;
  const auto result = run({program, none.path, "--nproc", "2"}, one_thread);
  const auto at = result.out.find("finished after ");
  REQUIRE(at != std::string::npos);
  return result.out.substr(at);
}

// One line says after which step and why the run has stopped.
void check_stopped(const std::string& error, int number, const std::string& rank = "") {
  CHECK(error.starts_with("warning: stopped after step "));
  CHECK_THAT(error, ContainsSubstring(fmt::format(", as SIG{} on rank {}", sigabbrev_np(number), rank)));
  CHECK(count(error, "\n") == 1);
}

}  // namespace

TEST_CASE(
    "a signal to the launcher stops every rank after one step, with exit code 75, and the next start goes "
    "on") {
  const auto end = finished();
  CHECK(end.starts_with("finished after 120 steps"));
  for (const int number : {SIGUSR1, SIGTERM}) {
    const Checkpoint checkpoint;
    auto first = start({program, checkpoint.path, "20", "--nproc", "2"}, one_thread);
    REQUIRE(first.wait_for_output("step 10\n"));
    first.signal(number);
    REQUIRE(first.wait(20s));
    INFO(first.out() << first.error());
    CHECK(first.exit_code() == 75);
    check_stopped(first.error(), number);
    CHECK(processes_left(first.marker()) == 0);

    const auto second = run({program, checkpoint.path, "--nproc", "2"}, one_thread);
    INFO(second.out << second.error);
    CHECK(second.code == 0);
    CHECK(second.out.starts_with("resumed\n"));
    CHECK(second.out.ends_with(end));  // bitwise as without the stop
  }
}

TEST_CASE("a run whose rank is killed goes on from its checkpoint, and ends as one without that") {
  const Checkpoint checkpoint;
  auto variables = one_thread;
  variables["KILLED_AFTER"] = "50";
  const auto result = run({program, checkpoint.path, "--nproc", "2", "--max-restarts", "1"}, variables);
  INFO(result.out << result.error);
  CHECK(result.code == 0);
  CHECK(count(result.out, "resumed\n") == 1);
  CHECK(count(result.out, "[rank 1] step 40\n") == 1);
  CHECK(count(result.out, "[rank 1] step 50\n") == 2);                             // again after the restart
  CHECK(count(result.error, "restart 1, after this: rank 1 died (SIGKILL") == 1);  // in rank 0's log
  CHECK(result.out.ends_with(finished()));
  CHECK(result.left == 0);
}

TEST_CASE("a signal to the launcher does not start the ranks again") {
  const Checkpoint checkpoint;
  auto running = start({program, checkpoint.path, "20", "--nproc", "2", "--max-restarts", "3"}, one_thread);
  REQUIRE(running.wait_for_output("step 10\n"));
  running.signal(SIGTERM);
  REQUIRE(running.wait(20s));
  INFO(running.out() << running.error());
  CHECK(running.exit_code() == 75);
  check_stopped(running.error(), SIGTERM);
}

TEST_CASE("a signal to one rank alone stops the others too") {
  const Checkpoint checkpoint;
  for (const char* every : {"1", "7"}) {
    Together ranks({program, checkpoint.path, "20", every}, 2, one_thread);
    REQUIRE(ranks[1].wait_for_output("step 10\n"));
    ranks[1].signal(SIGTERM);
    CHECK(ranks.wait() == std::vector<int>{75, 75});
    INFO(ranks[0].error() << ranks[1].error());
    check_stopped(ranks[0].error(), SIGTERM, "1");
    CHECK(ranks[1].error().empty());
    std::remove(checkpoint.path.c_str());
  }
}

TEST_CASE("StopOptions::signals replaces the signals that stop a run") {
  const auto one_signal = [](const Checkpoint& checkpoint, int number) {
    return Strings{program, checkpoint.path, "20", "1", std::to_string(number), "--nproc", "2"};
  };
  for (const int number : {SIGUSR2, SIGHUP, SIGXCPU}) {
    const Checkpoint checkpoint;
    auto chosen = start(one_signal(checkpoint, number), one_thread);
    REQUIRE(chosen.wait_for_output("step 10\n"));
    chosen.signal(number);
    REQUIRE(chosen.wait(20s));
    INFO(chosen.out() << chosen.error());
    CHECK(chosen.exit_code() == 75);
    check_stopped(chosen.error(), number);
    CHECK(access(checkpoint.path.c_str(), R_OK) == 0);
  }

  // A default that is not among them ends the run as it ends any program.
  const Checkpoint none;
  auto other = start(one_signal(none, SIGUSR2), one_thread);
  REQUIRE(other.wait_for_output("step 10\n"));
  other.signal(SIGUSR1);
  REQUIRE(other.wait(40s));
  INFO(other.out() << other.error());
  CHECK(other.exit_code() == 128 + SIGUSR1);
  CHECK(access(none.path.c_str(), R_OK) != 0);

  const auto refused = run(one_signal(none, SIGKILL), one_thread);
  CHECK(refused.code == 2);
  CHECK(refused.error == "error: StopOptions::signals: signal 9 cannot be caught\n");
  const auto kept = run(one_signal(none, SIGURG), one_thread);
  CHECK(kept.code == 2);
  CHECK(kept.error ==
        fmt::format(
            "error: StopOptions::signals: `launch` does not pass signal {} on to the ranks: use SIGTERM, "
            "SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM or SIGXCPU, or a launcher that passes it "
            "on\n",
            SIGURG));
}

TEST_CASE("a signal to mpirun, mpiexec or torchrun stops its ranks, and the next start goes on",
          "[.release]") {
  struct Preemption {
    std::string launcher;
    Strings options;
    int signal;
    int code;  // torchrun returns 1 whatever the ranks return
    bool resumed;
  };
  // Hydra 4 forgets the exit codes of ranks that end at one moment after it has passed a signal on, and then returns 0: a shell around each
  // rank writes the rank's exit code.
  const Strings writes_code{
      "/bin/sh", "-c", R"(trap : TERM USR1; "$@"; code=$?; echo "a rank returned $code" >&2; exit $code)",
      "sh"};
  const auto given = GENERATE(
      values<Preemption>({{"mpirun.openmpi", {"--allow-run-as-root", "--oversubscribe"}, SIGUSR1, 75, true},
                          {"mpiexec.hydra", {}, SIGUSR1, 75, true},
                          {"mpiexec.hydra", {}, SIGTERM, 75, false},
                          {"torchrun", {}, SIGTERM, 1, true},
                          {"torchrun", {"--signals-to-handle=SIGUSR1"}, SIGUSR1, 1, false}}));
  CAPTURE(given.launcher, given.signal);
  const bool elastic = given.launcher == "torchrun";
  const bool hydra = given.launcher == "mpiexec.hydra";
  const std::string path = elastic ? torchrun() : "/usr/bin/" + given.launcher;
  if (path.empty()) return;
  if (access(path.c_str(), X_OK) != 0) {
    WARN("SKIPPED: no " << path);
    return;
  }
  const Checkpoint checkpoint;
  const auto command = [&](const Strings& more) {
    Strings all{path};
    all.insert(all.end(), given.options.begin(), given.options.end());
    if (elastic)
      all.insert(all.end(), {"--no-python", "--standalone", "--nproc-per-node=2"});
    else
      all.insert(all.end(), {"-n", "2"});
    if (hydra) all.insert(all.end(), writes_code.begin(), writes_code.end());
    all.insert(all.end(), {program, checkpoint.path});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  auto first = start(command({"20"}), one_thread);
  const bool began = first.wait_for_output("step 10\n", 120s);
  if (!began && count(first.error(), "unrecognized arguments") > 0) {
    WARN("SKIPPED: this torchrun has no --signals-to-handle");
    return;
  }
  REQUIRE(began);
  first.signal(given.signal);
  REQUIRE(first.wait(60s));
  INFO(first.out() << first.error());
  if (hydra)
    CHECK(count(first.error(), fmt::format("a rank returned {}\n", given.code)) == 2);
  else
    CHECK(first.exit_code() == given.code);
  CHECK(count(first.error(), "warning: stopped after step ") == 1);
  CHECK(count(first.error(), fmt::format(", as SIG{} on rank ", sigabbrev_np(given.signal))) == 1);
  CHECK(count(first.out(), "finished after ") == 0);
  CHECK(processes_left(first.marker()) == 0);
  REQUIRE(access(checkpoint.path.c_str(), R_OK) == 0);
  if (!given.resumed) return;

  static const std::string end = finished();
  const auto second = run(command({}), one_thread, 120s);
  INFO(second.out << second.error);
  CHECK(second.code == 0);
  CHECK(count(second.out, "resumed\n") == 1);
  CHECK(count(second.out, end) == 1);  // bitwise as without the stop
}

}  // namespace stop_fault_test
