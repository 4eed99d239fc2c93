// Each example does what its first lines say, with real processes.
#include <torch/csrc/jit/serialization/import.h>

#include <regex>

#include "examples/output.hpp"
#include "examples/small_mnist.hpp"
#include "support/folder_watch.hpp"

namespace examples_test {

using namespace lockstep_test;

namespace {

const std::string accuracy_pattern = "Accuracy is ([0-9.]+)%";

}  // namespace

TEST_CASE("mnist prints the tutorial's lines and learns") {
  const SmallMnist folder;
  const TemporaryFolder saved;
  const auto model = (saved / "model.pt").string();
  const auto out = out_of({test_program("mnist"), "--nproc", "2", "--epochs", "3", "--batch_size", "16",
                           "--lr", "0.05", "--data-dir", folder.path().string(), "--save", model});
  const std::regex lines(
      "begin training of epoch 1/3\nbegin training of epoch 2/3\nbegin training of epoch 3/3\nbegin testing\n"
      "Accuracy is [0-9]+\\.[0-9][0-9]%\n\ntime elapsed: [0-9]+\\.[0-9][0-9] seconds\n");
  INFO(out);
  CHECK(std::regex_match(out, lines));
  CHECK(number_in(out, accuracy_pattern) > 50);
  std::int64_t parameters = 0;
  for (const at::Tensor& tensor : torch::jit::load(model).parameters()) parameters += tensor.numel();
  CHECK(parameters == 29034);
}

TEST_CASE("mnist gives the same with and without workers, and in one process other digits a step") {
  const SmallMnist folder;
  const auto accuracy = [&](const std::string& nproc, const std::string& workers) {
    return number_in(out_of({test_program("mnist"), "--nproc", nproc, "-e", "1", "-b", "16", "--lr", "0.05",
                             "--workers", workers, "--data-dir", folder.path().string()}),
                     accuracy_pattern);
  };
  CHECK(accuracy("2", "0") == accuracy("2", "2"));
  CHECK(accuracy("1", "0") > 20);
}

TEST_CASE("mnist without data draws digits once, and says so") {
  const TemporaryFolder cache;
  std::filesystem::create_directory(cache / "lockstep");
  FolderWatch watch(cache / "lockstep");
  const Variables variables{{"XDG_CACHE_HOME", cache.path().string()}};
  for (const std::size_t drawn : {1, 0}) {  // in the first run by one of the ranks, in the second by none
    const auto out = out_of({test_program("mnist"), "--nproc", "2", "--epochs", "0"}, variables);
    CHECK(out.starts_with("training on 60000 digits drawn by this program, kept in "));
    CHECK(lines_of(out).at(1) == "training on the first 20000 of 60000 digits");
    CHECK(watch.made().size() == drawn);
  }
}

TEST_CASE("mnist trains on the first --samples digits") {
  const SmallMnist folder;
  const auto out = out_of({test_program("mnist"), "--nproc", "1", "-e", "1", "-b", "16", "--samples", "16",
                           "--data-dir", folder.path().string()});
  CHECK(out.starts_with("training on the first 16 of 960 digits\nbegin training of epoch 1/1\n"));
}

TEST_CASE("five lines make a loop data-parallel") {
  const auto loss = [](const std::string& nproc) {
    const auto out = out_of({test_program("five_lines"), "--nproc", nproc, "--epochs", "10"});
    const std::string last = "Epoch 9 \\| Batchsize: 32 \\| ";
    CHECK(number_in(out, last + "Steps: ([0-9]+)") * std::stoi(nproc) == 64);
    return number_in(out, last + "Steps: [0-9]+ \\| Loss ([0-9.]+)");
  };
  CHECK(loss("1") < 0.05);
  CHECK(loss("2") < 0.05);
}

TEST_CASE("two models and two optimizers stay in step") {
  const auto out = out_of({test_program("gan"), "--nproc", "3", "--steps", "101", "--digits", "960"});
  INFO(out);
  std::smatch found;
  const std::string losses = "discriminator ([0-9]+\\.[0-9]{4}), generator ([0-9]+\\.[0-9]{4})\n";
  REQUIRE(std::regex_match(out, found,
                           std::regex("step 0: " + losses + "step 100: " + losses +
                                      "done: 101 steps of two models on 3 ranks\n")));
  CHECK(std::stod(found[3]) < 0.9 * std::stod(found[1]));  // it tells the drawn digits from the real ones
}

}  // namespace examples_test
