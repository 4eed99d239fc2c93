// A run that is killed while it saves: the next one finds a whole checkpoint.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"

namespace killed_writer_test {

TEST_CASE("a run that is killed 200 times while it saves goes on from a whole checkpoint each time",
          "[.release]") {
  const TemporaryFolder folder;
  std::mt19937 random(1);
  int last = 0, begun = 0;
  for (int kill = 0; kill <= 200; ++kill) {
    lockstep_test::Process run(lockstep_test::start(
        {lockstep_test::test_program("train_fault_program"), "save in " + folder.path().string()}));
    const bool trains =
        run.wait_for_output("goes on at ", std::chrono::seconds(60)) && run.wait_for_output(".\n");
    CAPTURE(kill, run.out(), run.error());
    REQUIRE(trains);
    const int step = std::stoi(run.out().substr(run.out().find("goes on at ") + 11));
    REQUIRE(step == last);  // of the newest file that the one before has left
    usleep(static_cast<useconds_t>(random() % 100'000));
    ::kill(run.pid(), SIGKILL);
    REQUIRE(run.wait(std::chrono::seconds(60)));
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      REQUIRE(entry.path().extension() != ".damaged");
      begun += entry.path().extension() == ".tmp";
      if (entry.path().extension() == ".ckpt")
        last = std::max(last, std::stoi(entry.path().stem().string().substr(5)));
    }
  }
  CHECK(last > 50);   // they came forward,
  CHECK(begun > 20);  // and many died while they wrote
}

}  // namespace killed_writer_test
