// LibTorch's own programs, before and after the lines that make them data-parallel.
#include <torch/serialize.h>

#include <fstream>
#include <regex>

#include "examples/full_mnist.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"

namespace libtorch_test {

using namespace lockstep_test;

namespace {

std::string out_of(const std::string& program, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {test_program(program), "--data-dir", full_mnist()});
  const Ended ended = run(arguments, {{"OMP_NUM_THREADS", "1"}}, Milliseconds(120000));
  INFO(Catch::StringMaker<std::vector<std::string>>::convert(arguments)
       << "\nout: " << ended.out << "\nerror: " << ended.error);
  CHECK(ended.code == 0);
  CHECK(ended.error.empty());
  CHECK(ended.left == 0);
  return ended.out;
}

}  // namespace

TEST_CASE("LibTorch's MNIST program learns, alone and on two ranks, and one rank changes no digit") {
  const std::vector<std::string> few{"--samples", "960", "--epochs", "2"};
  auto one_rank = few;
  one_rank.insert(one_rank.end(), {"--nproc", "1"});
  const auto plain = out_of("libtorch_mnist", few);
  INFO(plain);
  const std::string lines =
      "(Train Epoch: E \\[ *[0-9]+/  960\\] Loss: [0-9]+\\.[0-9]{4}\n){2}"
      "Test set: Average loss: [0-9]+\\.[0-9]{4} \\| Accuracy: [01]\\.[0-9]{3}\n";
  const auto epoch = [&](const char* number) {
    return std::regex_replace(lines, std::regex(" E "), std::string(" ") + number + " ");
  };
  CHECK(std::regex_match(plain, std::regex(epoch("1") + epoch("2"))));
  CHECK(out_of("libtorch_mnist_ddp", one_rank) == plain);

  const auto two = out_of("libtorch_mnist_ddp",
                          {"--nproc", "2", "--samples", "3000", "--batch-size", "8", "--epochs", "2"});
  INFO(two);
  CHECK(count(two, "Train Epoch: 1 [    0/ 3000] Loss: ") == 1);
  CHECK(count(two, "Train Epoch: 2 [ 2880/ 3000] Loss: ") == 1);
  CHECK(count(two, "Train Epoch: ") == 2 * 19);
  std::smatch found;
  REQUIRE(std::regex_search(two, found, std::regex("Accuracy: ([0-9.]+)\n$")));
  CHECK(std::stod(found[1]) > 0.6);
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
    const auto out = out_of(program, arguments);
    INFO(out);
    const std::string step = "\\] D_loss: [0-9]+\\.[0-9]{4} \\| G_loss: [0-9]+\\.[0-9]{4}\n";
    CHECK(std::regex_match(
        out, std::regex("\\[ 1/ 2\\]\\[  1/  3" + step + "\\[ 1/ 2\\]\\[  2/  3" + step +
                        "-> checkpoint 1\n\\[ 1/ 2\\]\\[  3/  3" + step + "\\[ 2/ 2\\]\\[  1/  3" + step +
                        "-> checkpoint 2\n\\[ 2/ 2\\]\\[  2/  3" + step + "\\[ 2/ 2\\]\\[  3/  3" + step +
                        "-> checkpoint 3\n")));
    CHECK(saved.files() == 4 + 3);
    torch::Tensor samples;
    torch::load(samples, (saved / "dcgan-sample-3.pt").string());
    CHECK(samples.sizes() == at::IntArrayRef{10, 1, 28, 28});
    CHECK(samples.min().item<float>() >= 0);
    CHECK(samples.max().item<float>() <= 1);

    // On a full disk it names the file, and the last checkpoint stays.
    const auto kept = [&] { return std::filesystem::file_size(saved / "generator-checkpoint.pt"); };
    const auto size = kept();
    std::vector<std::string> full{
        "sh",         "-c",        "trap '' XFSZ; ulimit -f 200; exec \"$@\"", "sh", test_program(program),
        "--data-dir", full_mnist()};
    full.insert(full.end(), arguments.begin(), arguments.end());
    const Ended ended = run(full, {{"OMP_NUM_THREADS", "1"}}, Milliseconds(120000));
    INFO("full disk: " << ended.out << ended.error);
    CHECK(ended.code == 1);
    CHECK_THAT(ended.error, ContainsSubstring("bytes to '" + (saved / "generator-checkpoint.pt").string() +
                                              "': File too large; the previous file is unchanged\n"));
    CHECK(count(ended.error, "\n") == 1);
    CHECK(ended.left == 0);
    CHECK(kept() == size);
    CHECK(saved.files() == 4 + 3);

    // A restored discriminator tells the digits apart from the first step on.
    arguments.emplace_back("--restore");
    const auto restored = out_of(program, arguments);
    const auto first_loss = [](const std::string& text) {
      std::smatch found;
      REQUIRE(std::regex_search(text, found, std::regex("D_loss: ([0-9.]+)")));
      return std::stod(found[1]);
    };
    CHECK(first_loss(restored) < 0.9 * first_loss(out));
  }
}

}  // namespace libtorch_test
