#include "lockstep/log/log.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/written.hpp"

using lockstep::Level;
using lockstep::Log;

TEST_CASE("rank 0 writes, without a prefix") {
  CHECK(written(1, [] { Log(0).info("accuracy {:.2f} %", 89.214); }) == "accuracy 89.21 %\n");
  CHECK(written(1, [] { Log(1).info("accuracy {:.2f} %", 89.214); }).empty());
}

TEST_CASE("all ranks speak on request, with their rank in front of each line") {
  CHECK(written(1, [] { Log(3).all().info("a\nb"); }) == "[rank 3] a\n[rank 3] b\n");
  CHECK(written(1, [] { Log(0).all().info("a"); }) == "[rank 0] a\n");
}

TEST_CASE("levels choose what is said, and where") {
  const auto speak = [] {
    const Log log(0);
    log.debug("d");
    log.info("i");
    log.warning("w");
    log.error("e");
  };
  CHECK(written(1, speak) == "i\n");
  CHECK(written(2, speak) == "warning: w\nerror: e\n");
  CHECK(written(1, [] { Log(0).at(Level::debug).debug("d"); }) == "debug: d\n");
  CHECK(written(2, [] { Log(0).at(Level::error).warning("w"); }).empty());
  CHECK(Log(0).should_log());
  CHECK_FALSE(Log(1).should_log(Level::error));
  CHECK_FALSE(Log(0).at(Level::warning).should_log(Level::info));
}

TEST_CASE("LOCKSTEP_LOG_LEVEL sets the level of the program") {
  setenv("LOCKSTEP_LOG_LEVEL", "debug", 1);
  CHECK(Log(0).should_log(Level::debug));
  setenv("LOCKSTEP_LOG_LEVEL", "error", 1);
  CHECK_FALSE(Log(0).should_log(Level::warning));
  setenv("LOCKSTEP_LOG_LEVEL", "loud", 1);
  CHECK(Log(0).should_log(Level::info));
  CHECK_FALSE(Log(0).should_log(Level::debug));
  unsetenv("LOCKSTEP_LOG_LEVEL");
}

TEST_CASE("a progress line tells rate, loss and time left") {
  const lockstep::detail::ProgressState state{"epoch 1/3", 25, 100, 10.0, 1600.0, 0.43214};
  CHECK(lockstep::detail::progress_line(state) == "epoch 1/3: 25/100, 160 samples/s, loss 0.4321, 0:30 left");
  CHECK(lockstep::detail::progress_line({"", 100, 100, 50.0, 100.0, {}}) ==
        "100/100, 2.00 samples/s, 0:50 in all");
  CHECK(lockstep::detail::progress_line({"t", 0, 10, 0.0, 0.0, {}}) == "t: 0/10, 0.00 samples/s, 0:00 left");
  CHECK(lockstep::detail::progress_line({"", 1, 1, 754.0, 0.0, {}}) == "1/1, 0.00 samples/s, 12:34 in all");
  CHECK(lockstep::detail::progress_line({"", 1, 1, 3723.0, 0.0, {}}) ==
        "1/1, 0.00 samples/s, 1:02:03 in all");
}

TEST_CASE("a bar fits its terminal") {
  const lockstep::detail::ProgressState state{"epoch 1/3", 25, 100, 10.0, 1600.0, 0.43214};
  CHECK(lockstep::detail::progress_bar(state, 200) ==
        "epoch 1/3  25 % [##########..............................] 25/100, 160 samples/s, loss 0.4321, 0:30 "
        "left");
  for (int columns = 1; columns < 200; ++columns)
    REQUIRE(lockstep::detail::progress_bar(state, columns).size() < static_cast<std::size_t>(columns));
  const lockstep::detail::ProgressState over{"", 7, 5, 1.0, 1.0, {}};
  CHECK_THAT(lockstep::detail::progress_bar(over, 100), ContainsSubstring("100 % [####"));
}

TEST_CASE("progress towards an unknown end tells what was done") {
  const lockstep::detail::ProgressState state{"epoch 1/1", 25, 0, 10.0, 1600.0, 0.5};
  const std::string line = "epoch 1/1: 25, 160 samples/s, loss 0.5000, 0:10 in all";
  CHECK(lockstep::detail::progress_line(state) == line);
  CHECK(lockstep::detail::progress_bar(state, 200) == line);
  CHECK(lockstep::detail::progress_bar(state, 20) == line.substr(0, 19));
}

TEST_CASE("without a terminal progress is said now and then, and by rank 0 alone") {
  const auto loop = [](int rank, std::chrono::milliseconds every) {
    lockstep::Progress progress(Log(rank), 10, {.title = "t", .line_every = every});
    for (int step = 0; step < 10; ++step) {
      usleep(10000);
      progress.advance(1);
    }
  };
  const auto begin = std::chrono::steady_clock::now();
  const auto often = written(1, [&] { loop(0, std::chrono::milliseconds(35)); });
  const auto took = std::chrono::steady_clock::now() - begin;
  const auto lines = std::count(often.begin(), often.end(), '\n');
  CHECK(lines >= 2);
  CHECK(lines <= took / std::chrono::milliseconds(35) + 1);
  CHECK_THAT(often, ContainsSubstring("t: 10/10, "));
  CHECK(often.find('\r') == std::string::npos);
  CHECK(written(1, [&] { loop(0, std::chrono::seconds(10)); }).empty());
  CHECK(written(1, [&] { loop(1, std::chrono::milliseconds(35)); }).empty());
}

TEST_CASE("the last line shows the loss of the end, never that of an earlier step") {
  const auto last_line = [](std::optional<double> last_step, std::optional<double> whole) {
    const auto text = written(1, [&] {
      lockstep::Progress progress(Log(0), 2, {.title = "t", .line_every = std::chrono::milliseconds(100)});
      usleep(110000);
      progress.advance(1, 9.0);  // shown
      progress.advance(1, last_step);
      progress.finish(whole);
    });
    return text.substr(text.find('\n') + 1);
  };
  CHECK_THAT(last_line({}, 0.25), ContainsSubstring(", loss 0.2500, "));
  CHECK_THAT(last_line(0.5, {}), ContainsSubstring(", loss 0.5000, "));
  CHECK_THAT(last_line({}, {}), ContainsSubstring("2/2, ") && !ContainsSubstring("loss"));
}
