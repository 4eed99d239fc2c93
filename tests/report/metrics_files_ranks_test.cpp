#include <sys/resource.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "lockstep/report/metrics_files.hpp"
#include "lockstep/report/tensorboard.hpp"
#include "report/training.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"
#include "support/written.hpp"

namespace metrics_files_ranks_test {

namespace {

using lockstep_test::count;

const std::string header = "time,event,epoch,step,loss,lr,samples_per_second,seconds,skipped,tag,value";

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields{""};
  for (const char character : line)
    if (character == ',')
      fields.emplace_back();
    else
      fields.back() += character;
  return fields;
}

void says(const std::string& text, const std::string& words) {
  CHECK_THAT(text, ContainsSubstring(words));
}

}  // namespace

TEST_CASE("a CSV file has a row for every n-th step, each epoch and each scalar, on rank 0 alone") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto path = folder / "runs/one/metrics.csv";
  const std::size_t steps = 32 / 4 / static_cast<std::size_t>(world.size());
  std::vector<double> losses;
  for (int run = 0; run < 2; ++run) {  // the second appends
    ReportTrainer trainer{world, short_run(1)};
    lockstep::CsvLog csv{world, path, {.every = 2}};
    losses.clear();
    const auto report =
        trainer.fit(three_classes(32), cross_entropy_of,
                    lockstep::OnStep{[&](const auto& step) { losses.push_back(step.loss()); }}, csv);
    csv.add_scalar("accuracy, \"top\n1\"", 0.5, trainer.step());
    csv.add_scalar("nothing", std::numeric_limits<double>::quiet_NaN(), 0);
    if (world.rank() != 0) {
      CHECK(!std::filesystem::exists(folder / "runs"));
      continue;
    }
    const auto lines = lines_of(path);
    const std::size_t rows = steps / 2 + 3;
    REQUIRE(lines.size() == 1 + rows * static_cast<std::size_t>(run + 1));
    CHECK(lines[0] == header);
    CHECK(std::count(lines.begin(), lines.end(), header) == 1);
    const auto* own = &lines[lines.size() - rows];
    for (std::size_t i = 0; i < steps / 2; ++i) {
      const auto row = fields_of(own[i]);
      REQUIRE(row.size() == 11);
      CHECK(row[1] + row[2] == "step0");
      CHECK(row[3] == std::to_string(2 * i + 1));
      CHECK(std::stod(row[4]) == losses[2 * i + 1]);
      CHECK(row[5] == "0.1");
      CHECK(std::stod(row[6]) > 0);
      CHECK(std::stod(row[7]) > 0);
      CHECK(row[8] + row[9] + row[10] == "");
    }
    const auto epoch = fields_of(own[rows - 3]);
    CHECK(epoch[1] == "epoch");
    CHECK(epoch[3] == std::to_string(steps));
    CHECK(std::stod(epoch[4]) == report.loss);
    says(own[rows - 2], ",\"accuracy, \"\"top 1\"\"\",0.5");
    says(own[rows - 1], ",nothing,nan");
  }
}

TEST_CASE("JSON lines escape their text, and have words for values that are not finite") {
  const TemporaryFolder folder;
  const auto path = folder / "metrics.jsonl";
  lockstep::JsonLines json{test_world(), path};
  json.add_scalar("a\"\\\t<\xc3\xa4\xff", std::numeric_limits<double>::quiet_NaN(), 1);
  json.add_scalar("b", -std::numeric_limits<double>::infinity(), 2);
  json.add_scalar("c", 1e-7, 3);
  ReportTrainer trainer{test_world(), short_run(1)};
  trainer.fit(three_classes(16), cross_entropy_of, json);
  CHECK(std::filesystem::exists(path) == (test_world().rank() == 0));
  if (test_world().rank() != 0) return;
  const auto lines = lines_of(path);
  REQUIRE(lines.size() == 4 + 16 / 4 / static_cast<std::size_t>(test_world().size()));
  says(lines[0], R"("event":"scalar","step":1,"tag":"a\"\\\u0009\u003cä)"
                 "\xef\xbf\xbd"
                 R"(","value":"NaN"})");
  says(lines[1], R"("tag":"b","value":"-Infinity"})");
  says(lines[2], R"("value":1e-07})");
  says(lines[3], R"("event":"step","epoch":0,"step":0,"loss":)");
  says(lines.back(), R"("event":"epoch","epoch":0,"step":)");
}

TEST_CASE("a line that a kill has torn is removed, and a file of another kind stays as it is") {
  const lockstep::World alone;
  const TemporaryFolder folder;
  const auto path = folder.write("metrics.csv", header + "\n1,scalar,,7,,,,,,a,1\n2,scalar,,8,,,");
  lockstep::CsvLog(alone, path).add_scalar("a", 2, 9);
  const auto lines = lines_of(path);
  REQUIRE(lines.size() == 3);
  CHECK(lines[1] == "1,scalar,,7,,,,,,a,1");
  says(lines[2], ",scalar,,9,,,,,,a,2");

  const auto torn_header = folder.write("torn.csv", "time,ev");
  lockstep::CsvLog(alone, torn_header).add_scalar("a", 2, 9);
  CHECK(lines_of(torn_header).at(0) == header);
  CHECK(lines_of(torn_header).size() == 2);

  // Longer than the block in which the file is read.
  const std::string row =
      R"({"time":1.000,"event":"scalar","step":1,"tag":")" + std::string(5000, 'x') + "\"}\n";
  for (const std::string& torn :
       {std::string("{"), std::string("{\"time\":"), row.substr(0, row.size() - 1)}) {
    INFO(torn);
    const auto json = folder.write("metrics.jsonl", row + row + torn);
    lockstep::JsonLines(alone, json).add_scalar("a", 2, 9);
    const auto kept = lines_of(json);
    REQUIRE(kept.size() == 3);
    CHECK(kept[1] + '\n' == row);
    says(kept[2], R"("event":"scalar","step":9)");
  }

  const auto stays = [&](const std::string& content, const char* why, auto write) {
    INFO(content);
    const auto other = folder.write("other", content);
    const auto warning = written(2, [&] { write(other); });
    says(warning, why);
    std::ifstream file(other);
    CHECK(std::string{std::istreambuf_iterator<char>(file), {}} == content);
  };
  for (const std::string& content :
       {std::string("name,age\nx,3\n"), std::string("name,age\nx,3\ny,4"), std::string("name,age"),
        header + ",more", header.substr(0, 9) + '\n', std::string("\n")})
    stays(content, "its first line is not the header of a CsvLog",
          [&](const auto& path) { lockstep::CsvLog(alone, path).add_scalar("a", 2, 9); });
  for (const std::string& content : {std::string(R"({"config": 1})"), std::string("{\"a\":1}\n{\"a\":2}"),
                                     std::string(R"({"time": 1})"), std::string(10000, '{')})
    stays(content, "its last line has no newline, and is not one of a JsonLines",
          [&](const auto& path) { lockstep::JsonLines(alone, path).add_scalar("a", 2, 9); });
}

TEST_CASE("a file that cannot be written is warned of once and stops nothing") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto in_the_way = folder.write("file", "");
  const auto fit_with = [&](const std::filesystem::path& to) {
    return written(2, [&] {
      ReportTrainer trainer{world, short_run(2)};
      lockstep::CsvLog csv{world, to};
      lockstep::JsonLines json{world, to};
      CHECK(trainer.fit(three_classes(32), cross_entropy_of, csv, json).step == 16 / world.size());
      csv.add_scalar("a", 1, 2);
    });
  };
  const int writers = world.rank() == 0 ? 2 : 0;
  // A file where a folder must be, which root cannot write either; a device without space; a folder.
  for (const std::filesystem::path& to :
       {in_the_way / "metrics", std::filesystem::path("/dev/full"), folder.path()}) {
    INFO(to);
    const auto warnings = fit_with(to);
    INFO(warnings);
    CHECK(count(warnings, "could not write '" + to.string() + "': ") == writers);
    CHECK(count(warnings, "\n") == writers);
  }
  CHECK_THROWS_AS(lockstep::CsvLog(world, folder / "a", {.every = 0}), lockstep::UsageError);
}

TEST_CASE("a TensorBoard whose folder cannot be written is warned of once and stops nothing") {
  const auto& world = test_world();
  const TemporaryFolder folder;
  const auto to = folder.write("file", "") / "board";
  const auto warnings = written(2, [&] {
    ReportTrainer trainer{world, short_run(2)};
    lockstep::TensorBoard board{world, to};
    CHECK(trainer.fit(three_classes(32), cross_entropy_of, board).step == 16 / world.size());
    board.add_scalar("a", 1, 2);
  });
  INFO(warnings);
  CHECK(count(warnings, "could not write '" + to.string()) == (world.rank() == 0 ? 1 : 0));
  CHECK(count(warnings, "\n") == (world.rank() == 0 ? 1 : 0));
}

TEST_CASE("a row of which the disk took a part is cut off again") {
  const lockstep::World alone;
  const TemporaryFolder folder;
  const auto path = folder / "metrics.csv";
  const std::string long_tag(200, 'x');
  {
    lockstep::CsvLog csv{alone, path};
    csv.add_scalar(long_tag, 1, 1);
    const auto full = static_cast<rlim_t>(std::filesystem::file_size(path)) + 100;
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
    const std::string warning = written(2, [&] {
      const rlimit small{full, before.rlim_max};
      setrlimit(RLIMIT_FSIZE, &small);
      csv.add_scalar(long_tag, 2, 2);
      setrlimit(RLIMIT_FSIZE, &before);
      csv.add_scalar(long_tag, 3, 3);
    });
    std::signal(SIGXFSZ, signal_before);
    says(warning, "File too large");
  }
  CHECK(lines_of(path).size() == 2);
  std::ifstream file(path);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  CHECK(all.ends_with(",1\n"));
}

}  // namespace metrics_files_ranks_test
