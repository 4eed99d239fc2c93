#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/report/run_report.hpp"
#include "lockstep/report/trace.hpp"
#include "report/training.hpp"
#include "report/wide_network.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"
#include "support/written.hpp"

namespace run_report_ranks_test {

namespace {

using lockstep_test::count;

std::string text_of_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("the page of a run is written after each epoch, and again for values added later") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto path = folder / "runs/report.html";
  ReportTrainer trainer{world, short_run(2)};
  std::vector<std::string> pages;
  {
    lockstep::RunReport page{trainer.comm(), path, {.title = "a </script> title"}};
    trainer.fit(three_classes(32), cross_entropy_of, page,
                lockstep::OnEpoch{[&](const auto&) { pages.push_back(text_of_file(path)); }});
    page.add_scalar("accuracy", 0.5, 7);
  }
  pages.push_back(text_of_file(path));
  if (world.rank() != 0) {
    CHECK(!std::filesystem::exists(folder / "runs"));
    return;
  }
  for (int i = 0; i < 3; ++i) {
    INFO(i);
    const std::string& written_page = pages[static_cast<std::size_t>(i)];
    CHECK(count(written_page, "</script>") == 1);  // the title's is escaped
    CHECK(count(written_page, R"("title":"a \u003c/script> title")") == 1);
    CHECK(count(written_page, R"("skipped":0)") == std::min(i + 1, 2));  // one for each epoch
    CHECK(count(written_page, R"("host":)") == world.size());
    CHECK(count(written_page, R"({"tag":"accuracy","points":[[7,0.5]]})") == (i == 2 ? 1 : 0));
  }
}

TEST_CASE("a series keeps 1024 values at most") {
  lockstep::detail::SparseSeries series;
  int wanted = 0;
  for (int i = 0; i < 100000; ++i)
    series.add(i, [&] {
      ++wanted;
      return 2.0 * i;
    });
  CHECK(wanted < 6000);
  const std::string json = series.json();
  CHECK(json.starts_with("[[0,0],[128,256],[256,512]"));
  CHECK(count(json, "],[") + 1 == 782);
}

TEST_CASE("a trainer without other ranks has a page and a trace without buckets") {
  const lockstep::World alone;
  const TemporaryFolder folder;
  lockstep::Trainer trainer{alone, short_run(1), TinyNet(), lockstep::LocalComm(alone)};
  lockstep::RunReport page{trainer.comm(), folder / "report.html"};
  lockstep::Trace trace{trainer.comm(), folder / "trace.json", {.from = 0, .to = 4}};
  trainer.fit(three_classes(32), cross_entropy_of, page, trace);
  CHECK(count(text_of_file(folder / "report.html"), R"("buckets":[]})") == 1);
  CHECK(count(text_of_file(folder / "trace.json"), "\"name\":\"backward\"") == 4);
}

TEST_CASE("buckets in flight at one time have lanes of their own") {
  const auto bucket = [](double launched, double completed) {
    lockstep::BucketReport made;
    made.launched = launched;
    made.completed = completed;
    return made;
  };
  CHECK(lockstep::detail::bucket_lanes({bucket(1, 4), bucket(2, 3), bucket(3, 6), bucket(5, 7)}) ==
        std::vector<int>{0, 1, 1, 0});
}

TEST_CASE("a trace holds the asked steps of all ranks, also of a run that ends before the last of them") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto path = folder / "trace.json";
  ReportTrainer trainer{world, short_run(1)};
  const int steps = 8 / world.size();
  lockstep::Trace whole{trainer.comm(), path, {.from = 1, .to = 3}};
  lockstep::Trace cut{trainer.comm(), folder / "cut.json", {.from = steps - 1, .to = 1000}};
  lockstep::Trace none{trainer.comm(), folder / "none.json", {.from = 500, .to = 1000}};
  trainer.fit(three_classes(32), cross_entropy_of, whole, cut, none);
  CHECK(!std::filesystem::exists(folder / "none.json"));
  CHECK_THROWS_AS(lockstep::Trace(trainer.comm(), path, {.from = 3, .to = 3}), lockstep::UsageError);
  if (world.rank() != 0) return;
  const int ranks = world.size();
  const std::string text = text_of_file(path), rest = text_of_file(folder / "cut.json");
  for (const char* name : {"step 1", "step 2"})
    CHECK(count(text, "\"name\":\"" + std::string(name) + '"') == ranks);
  CHECK(count(text, "\"name\":\"step 3\"") == 0);
  CHECK(count(text, "\"name\":\"bucket 1 of ") == 2 * ranks);
  CHECK(count(rest, "\"name\":\"step " + std::to_string(steps - 1)) == ranks);
}

TEST_CASE("a trace whose steps are not run is warned of on rank 0") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto warned = [&](lockstep::TraceOptions options, bool train) {
    return written(2, [&] {
      ReportTrainer trainer{world, short_run(1)};
      lockstep::Trace trace{trainer.comm(), folder / "trace.json", options};
      if (train) trainer.fit(three_classes(32), cross_entropy_of, trace);
    });
  };
  const int last = 8 / world.size() - 1;
  CHECK(warned({.from = 0, .to = 1000}, true).empty());
  CHECK(warned({.from = last + 1, .to = 1000}, false).empty());
  const auto warning = warned({.from = last + 1, .to = 1000}, true);
  INFO(warning);
  CHECK(count(warning,
              fmt::format("trace.json' was written: no step of [{}, 1000) was run, the steps were 0 to {};",
                          last + 1, last)) == (world.rank() == 0 ? 1 : 0));
  CHECK(count(warning, "\n") == (world.rank() == 0 ? 1 : 0));
}

TEST_CASE("the page of an earlier run is kept under the next free name") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto path = folder.write("report.html", "of the first run");
  std::string told;
  for (int run = 0; run < 2; ++run)
    told += written(1, [&] {
      ReportTrainer trainer{world, short_run(2)};
      lockstep::RunReport page{trainer.comm(), path, {.title = fmt::format("run {}", run)}};
      trainer.fit(three_classes(32), cross_entropy_of, page);
    });
  if (world.rank() != 0) {
    CHECK(folder.files() == 1);
    return;
  }
  CHECK(folder.files() == 3);  // one for each run, not for each epoch
  CHECK(text_of_file(folder / "report.1.html") == "of the first run");
  CHECK(count(text_of_file(folder / "report.2.html"), R"("title":"run 0")") == 1);
  CHECK(count(text_of_file(path), R"("title":"run 1")") == 1);
  CHECK_THAT(told, ContainsSubstring("report.html' is now '" + (folder / "report.2.html").string() + "'\n"));
}

TEST_CASE("a page or a trace that cannot be written is warned of once and stops nothing") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto in_the_way = folder.write("file", "");
  const auto warnings = written(2, [&] {
    ReportTrainer trainer{world, short_run(3)};
    lockstep::RunReport page{trainer.comm(), in_the_way / "report.html"};
    lockstep::Trace trace{trainer.comm(), "/dev/full", {.from = 0, .to = 1000}};
    CHECK(trainer.fit(three_classes(32), cross_entropy_of, page, trace).step == 24 / world.size());
    page.add_scalar("a", 1, 2);
  });
  INFO(warnings);
  const int writers = world.rank() == 0 ? 1 : 0;
  CHECK(count(warnings, "report.html': ") == writers);
  CHECK(count(warnings, "/dev/full': ") == writers);
  CHECK(count(warnings, "the training continues without it\n") == 2 * writers);
}

}  // namespace run_report_ranks_test
