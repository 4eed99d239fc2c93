// More ranks make fewer and larger steps: at an unchanged learning rate a model learns less in as many epochs, at a rate
// in proportion to the global batch as much. The tutorial of ddp_main keeps the rate and loses accuracy.
#include <string>
#include <vector>

#include "examples/output.hpp"
#include "examples/small_mnist.hpp"

namespace scaled_rate_test {

using namespace lockstep_test;

TEST_CASE("four ranks learn less than one at the same rate, and as much at four times the rate",
          "[.release]") {
  const SmallMnist digits(960, 300);
  const auto accuracy_of = [&](const std::vector<std::string>& more) {
    const std::vector<std::string> command{test_program("ddp_main"), "-e", "1", "-b", "8", "--lr", "1e-3"};
    const std::vector<std::string> paths{"--save", (digits / "model.pt").string(), "--data-dir",
                                         digits.path().string()};
    return number_in(run_example(joined(joined(command, paths), more)).out, "Accuracy is ([0-9.]+)%");
  };
  const double one = accuracy_of({"--nproc", "1"}), same_rate = accuracy_of({"--nproc", "4"}),
               scaled = accuracy_of({"--nproc", "4", "--scale-lr"});
  INFO("accuracy of one rank: " << one << " %; of four: " << same_rate << " %; with --scale-lr: " << scaled
                                << " %");
  CHECK(same_rate < one - 15);
  CHECK(scaled > one - 5);
}

}  // namespace scaled_rate_test
