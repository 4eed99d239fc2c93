// Ctrl-C and Ctrl-Z on a real training program, as a terminal sends them: to the whole process group.
#include <chrono>
#include <string>
#include <thread>

#include "support/catch.hpp"
#include "support/process.hpp"

namespace interrupt_fault_test {

using namespace std::chrono_literals;
using namespace lockstep_test;

namespace {

constexpr int ranks = 3;

Process training(const std::string& mode) {
  return start({test_program("training_program"), mode, "--nproc", "3"});
}

// Every rank has trained for some steps.
void wait_until_trained(Process& process) {
  for (int rank = 0; rank < ranks; ++rank)
    REQUIRE(process.wait_for_output(fmt::format("[rank {}] step 40\n", rank), 60s));
  REQUIRE(processes_with(process.marker()).size() == ranks + 1);
}

// Whether all processes with the marker are stopped, or none is, within a few seconds.
bool all_are(const std::string& marker, bool stopped) {
  for (int i = 0; i < 500; ++i) {
    std::size_t found = 0;
    const auto all = processes_with(marker);
    for (const pid_t pid : all) found += (process_state(pid).state == 'T') == stopped ? 1 : 0;
    if (all.size() == ranks + 1 && found == all.size()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

}  // namespace

TEST_CASE("Ctrl-C ends a training in good order") {
  auto process = training("plain");
  wait_until_trained(process);
  process.signal_group(SIGINT);
  REQUIRE(process.wait(20s));
  INFO(process.error());
  CHECK(process.exit_code() == 130);
  CHECK(process.error().empty());
  CHECK(process.out().ends_with('\n'));
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("a second Ctrl-C ends at once a training that did not heed the first") {
  auto process = training("deaf");
  wait_until_trained(process);
  process.signal_group(SIGINT);
  REQUIRE(process.wait_for_output("not now"));
  CHECK_FALSE(process.wait(1s));  // it goes on training
  CHECK(processes_with(process.marker()).size() == ranks + 1);
  process.signal_group(SIGINT);
  REQUIRE(process.wait(20s));                         // else it would train for ever
  CHECK(count(process.out(), "not now\n") == ranks);  // the second was no mere signal
  CHECK(process.exit_code() == 130);
  CHECK(process.error().empty());
  CHECK(processes_left(process.marker()) == 0);
}

TEST_CASE("Ctrl-Z stops a training, and fg lets it go on") {
  auto process = training("plain");
  wait_until_trained(process);
  process.signal_group(SIGTSTP);
  CHECK(all_are(process.marker(), true));
  CHECK_FALSE(process.wait(300ms));  // reads what was on its way
  const auto before = process.out();
  CHECK_FALSE(process.wait(700ms));
  CHECK(process.out() == before);  // no step
  process.signal_group(SIGCONT);
  CHECK(all_are(process.marker(), false));
  const int steps = count(before, "] step ");
  for (int i = 0; i < 200 && count(process.out(), "] step ") < steps + 10; ++i) (void)process.wait(50ms);
  CHECK(count(process.out(), "] step ") >= steps + 10);
  process.signal_group(SIGINT);
  REQUIRE(process.wait(20s));
  CHECK(process.exit_code() == 130);
  CHECK(process.error().empty());
  CHECK(processes_left(process.marker()) == 0);
}

}  // namespace interrupt_fault_test
