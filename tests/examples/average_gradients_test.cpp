// average_gradients does what its first lines say, with real processes.
#include <algorithm>
#include <sstream>

#include "examples/output.hpp"
#include "examples/square_digits.hpp"
#include "lockstep/files.hpp"
#include "support/by_hand.hpp"
#include "support/temporary_folder.hpp"

namespace average_gradients_test {

using namespace lockstep_test;

namespace {

const std::string program = test_program("average_gradients");

}  // namespace

TEST_CASE("average_gradients starts processes without and with a group") {
  for (const std::string name : {"processes", "group"}) {
    const auto ended = run_example({program, name});
    CHECK(ended.code == 0);
    for (int rank = 0; rank < 4; ++rank)
      CHECK(count(ended.out, "world size:4. I'm rank " + std::to_string(rank) + ".\n") == 1);
    CHECK(count(ended.out, "\n") == 4);
  }
  // By hand as one of two: a process without a group waits for no other.
  const auto alone = run_example({program, "processes"}, by_hand(1, 2, free_port()));
  CHECK(alone.code == 0);
  CHECK(alone.out == "world size:2. I'm rank 1.\n");
}

TEST_CASE("average_gradients prints every 50 steps, learns and plots its curve", "[.release]") {
  const SquareDigits digits(600, 600);
  const TemporaryFolder plots;
  const auto path = (plots / "curve.csv").string();
  const auto ended = run_example({program, "--nproc", "2", "--epochs", "2", "-b", "10", "--data-dir",
                                  digits.path().string(), "--plot", path, "--test"});
  CHECK(ended.code == 0);
  const double accuracy = number_in(ended.out,
                                    "^cpu\nEpoch \\[1/2\\], Step \\[50/60\\], Loss: [0-9]+\\.[0-9]{4},"
                                    "acc:[01]\\.[0-9]{2}\n"
                                    "Epoch \\[2/2\\], Step \\[50/60\\], Loss: [0-9]+\\.[0-9]{4},"
                                    "acc:[01]\\.[0-9]{2}\n"
                                    "Accuracy of the test: ([0-9.]+) %\n$");
  CHECK(accuracy > 50);
  std::istringstream curve(lockstep::read_file(path));
  std::string line;
  std::getline(curve, line);
  CHECK(line == "step,loss,accuracy");
  std::vector<double> losses;
  while (std::getline(curve, line)) {
    int step = 0;
    double loss = 0, accuracy = 0;
    REQUIRE(std::sscanf(line.c_str(), "%d,%lf,%lf", &step, &loss, &accuracy) == 3);
    losses.push_back(loss);
    CHECK(step == static_cast<int>(losses.size()));
  }
  REQUIRE(losses.size() == 120);
  CHECK(losses.back() < losses.front() / 2);
}

TEST_CASE("average_gradients draws its curve as SVG") {
  const SquareDigits digits(600, 600);
  const TemporaryFolder plots;
  const auto path = (plots / "curve.svg").string();
  // In a batch script of Slurm, as by hand.
  const Variables batch{{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}};
  CHECK(run_example({program, "--nproc", "1", "--data-dir", digits.path().string(), "--plot", path}, batch)
            .code == 0);
  const auto drawing = lockstep::read_file(path);
  CHECK(drawing.starts_with("<svg "));
  CHECK(drawing.ends_with("</svg>\n"));
  CHECK(count(drawing, "<polyline ") == 2);
  for (const char* label : {"step 6<", "epochs: 1<"}) CHECK_THAT(drawing, ContainsSubstring(label));
}

TEST_CASE("average_gradients compares its bits with DistributedDataParallel's") {
  const SquareDigits digits(600, 600);
  const auto compared = [&](const std::string& nproc) {
    const auto out = out_of({program, "--compare", "--nproc", nproc, "--data-dir", digits.path().string()});
    const std::string number = "([0-9.e+-]+)";
    CHECK(number_in(out, "multiplied by 1 / size, then sum: " + number + " of 10 gradients") == 10);
    CHECK(number_in(out, "running statistics of SyncBatchNorm: " + number + " apart") == 0);
    CHECK(number_in(out, "running statistics of BatchNorm: " + number + " apart") > 0);
    return number_in(out, "sum, then divided by size: " + number + " of 10 gradients");
  };
  CHECK(compared("4") == 10);
  CHECK(compared("3") < 10);
}

}  // namespace average_gradients_test
