// LibTorch's own programs, before and after the lines that make them data-parallel.
#include <torch/serialize.h>

#include <regex>

#include "examples/full_mnist.hpp"
#include "examples/output.hpp"
#include "support/temporary_folder.hpp"

namespace libtorch_test {

using namespace lockstep_test;

namespace {

std::vector<std::string> command_of(const std::string& program, const std::vector<std::string>& arguments) {
  return joined({test_program(program), "--data-dir", full_mnist()}, arguments);
}

}  // namespace

TEST_CASE("LibTorch's MNIST program learns, alone and on two ranks, and one rank changes no digit") {
  const std::vector<std::string> few{"--samples", "960", "--epochs", "2"};
  const auto plain = out_of(command_of("libtorch_mnist", few));
  INFO(plain);
  const std::string lines =
      "(Train Epoch: E \\[ *[0-9]+/  960\\] Loss: [0-9]+\\.[0-9]{4}\n){2}"
      "Test set: Average loss: [0-9]+\\.[0-9]{4} \\| Accuracy: [01]\\.[0-9]{3}\n";
  const auto epoch = [&](const char* number) {
    return std::regex_replace(lines, std::regex(" E "), std::string(" ") + number + " ");
  };
  CHECK(std::regex_match(plain, std::regex(epoch("1") + epoch("2"))));
  CHECK(out_of(command_of("libtorch_mnist_ddp", joined(few, {"--nproc", "1"}))) == plain);

  const auto two = out_of(command_of(
      "libtorch_mnist_ddp", {"--nproc", "2", "--samples", "3000", "--batch-size", "8", "--epochs", "2"}));
  INFO(two);
  CHECK(count(two, "Train Epoch: 1 [    0/ 3000] Loss: ") == 1);
  CHECK(count(two, "Train Epoch: 2 [ 2880/ 3000] Loss: ") == 1);
  CHECK(count(two, "Train Epoch: ") == 2 * 19);
  CHECK(number_in(two, "Accuracy: ([0-9.]+)\n$") > 0.4);  // it guesses 0.1
}

TEST_CASE("LibTorch's DCGAN program saves and restores, alone and on two ranks", "[.release]") {
  for (const bool ddp : {false, true}) {
    CAPTURE(ddp);
    const TemporaryFolder saved;
    std::vector<std::string> arguments{
        "--samples", ddp ? "48" : "24", "--batch-size",       "8", "--epochs", "2", "--checkpoint-every",
        "2",         "--save-dir",      saved.path().string()};
    if (ddp) arguments.insert(arguments.end(), {"--nproc", "2"});
    const auto program = ddp ? "libtorch_dcgan_ddp" : "libtorch_dcgan";
    const auto out = out_of(command_of(program, arguments));
    INFO(out);
    const std::string step = "\\] D_loss: [0-9]+\\.[0-9]{4} \\| G_loss: [0-9]+\\.[0-9]{4}\n";
    CHECK(std::regex_match(
        out, std::regex("\\[ 1/ 2\\]\\[  1/  3" + step + "\\[ 1/ 2\\]\\[  2/  3" + step +
                        "-> checkpoint 1\n\\[ 1/ 2\\]\\[  3/  3" + step + "\\[ 2/ 2\\]\\[  1/  3" + step +
                        "-> checkpoint 2\n\\[ 2/ 2\\]\\[  2/  3" + step + "\\[ 2/ 2\\]\\[  3/  3" + step +
                        "-> checkpoint 3\n")));
    CHECK(saved.files() == (ddp ? 6 : 4) + 3);
    torch::Tensor samples;
    torch::load(samples, (saved / "dcgan-sample-3.pt").string());
    CHECK(samples.sizes() == at::IntArrayRef{10, 1, 28, 28});
    CHECK(samples.min().item<float>() >= 0);
    CHECK(samples.max().item<float>() <= 1);

    // On a full disk it names the file, and the last checkpoint stays.
    const auto kept = [&] { return std::filesystem::file_size(saved / "generator-checkpoint.pt"); };
    const auto size = kept();
    const Ended ended = run_example(joined({"sh", "-c", "trap '' XFSZ; ulimit -f 200; exec \"$@\"", "sh"},
                                           command_of(program, arguments)));
    INFO("full disk: " << ended.out << ended.error);
    CHECK(ended.code == 1);
    CHECK(ended.error.ends_with(" bytes to '" + (saved / "generator-checkpoint.pt").string() +
                                "': File too large; the previous file is unchanged\n"));
    CHECK(count(ended.error, "error: ") == 1);
    CHECK(kept() == size);
    CHECK(saved.files() == (ddp ? 6 : 4) + 3);

    // A restored discriminator tells the digits apart from the first step on.
    arguments.emplace_back("--restore");
    const auto restored = out_of(command_of(program, arguments));
    const std::string first_loss = "D_loss: ([0-9.]+)";
    CHECK(number_in(restored, first_loss) < 0.9 * number_in(out, first_loss));
  }
}

}  // namespace libtorch_test
