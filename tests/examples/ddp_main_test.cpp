// The tutorials' template: the lines and the learning.
#include <regex>
#include <string>
#include <vector>

#include "examples/output.hpp"
#include "examples/square_digits.hpp"
#include "lockstep/files.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/precision/precision.hpp"
#include "support/temporary_folder.hpp"

namespace ddp_main_test {

using namespace lockstep_test;

namespace {

const std::regex tutorial_lines(
    "begin training of epoch 1/2\nbegin training of epoch 2/2\nbegin testing\nAccuracy is "
    "[0-9]+\\.[0-9][0-9]%\n\n"
    "time elapsed: [0-9]+\\.[0-9][0-9] seconds\n");

// A run of two epochs that saves into `saved`.
std::string two_epochs(const std::string& program, const SquareDigits& digits,
                       const std::filesystem::path& saved, const std::vector<std::string>& more) {
  const auto command = joined({test_program(program), "-e", "2", "--batch_size", "16"}, more);
  return out_of(joined(command, {"--data-dir", digits.path().string(), "--save", saved.string()}));
}

}  // namespace

TEST_CASE("the template prints the tutorial's lines, learns and saves the model, on one rank and on two") {
  const SquareDigits digits(960, 200);
  const TemporaryFolder saved;
  const auto one = two_epochs("origin_main", digits, saved / "origin.pt", {"--lr", "0.05"});
  const auto two = two_epochs("ddp_main", digits, saved / "ddp.pt", {"--lr", "0.05", "--nproc", "2"});
  for (const std::string& out : {one, two}) {
    INFO(out);
    CHECK(std::regex_match(out, tutorial_lines));
    CHECK(number_in(out, "Accuracy is ([0-9.]+)%") > 50);
  }
  for (const std::string file : {"origin.pt", "ddp.pt"})
    CHECK(lockstep::read_file(saved / file).size() > 29034 * 4);  // float32 parameters
  CHECK(lockstep::read_file(saved / "ddp.pt").find("model") != std::string::npos);
  // A second run has the same seeds, and so the same bits.
  two_epochs("ddp_main", digits, saved / "again.pt", {"--lr", "0.05", "--nproc", "2"});
  CHECK(lockstep::read_file(saved / "again.pt") == lockstep::read_file(saved / "ddp.pt"));
  // --scale-lr multiplies the rate by the number of ranks, which it also prints.
  const auto scaled =
      two_epochs("ddp_main", digits, saved / "scaled.pt", {"--lr", "0.025", "--scale-lr", "--nproc", "2"});
  CHECK(scaled.starts_with("learning rate 0.05 (linear rule: 0.025 for a batch of 16; global batch 32"));
  CHECK(lockstep::read_file(saved / "scaled.pt") == lockstep::read_file(saved / "ddp.pt"));
}

TEST_CASE("the template trains in mixed precision and saves the model with its scaler", "[.release]") {
  const SquareDigits digits(480, 40);
  const TemporaryFolder saved;
  const auto file = (saved / "amp.pt").string();
  const auto out = two_epochs("ddp_main", digits, file, {"--lr", "0.05", "--amp", "--nproc", "2"});
  CHECK(std::regex_match(out, tutorial_lines));
  CHECK(number_in(out, "Accuracy is ([0-9.]+)%") > 50);

  const auto checkpoint = lockstep::torch_load(file).toGenericDict();
  CHECK(checkpoint.size() == 2);
  lockstep::GradScaler scaler;
  lockstep::load_state_dict(scaler, checkpoint.at("scaler"));
  // 30 steps, each of which either counts or, skipped, halves the scale of 65536.
  CHECK(scaler.growth_tracker() > 20);
  CHECK(scaler.growth_tracker() <= 30);
  CHECK(scaler.get_scale() <= 65536);
  const torch::Tensor weight = checkpoint.at("model").toGenericDict().at("fc.weight").toTensor();
  CHECK(weight.sizes() == at::IntArrayRef{10, 1568});
  CHECK(weight.scalar_type() == torch::kFloat);
  CHECK(weight.isfinite().all().item<bool>());
}

TEST_CASE("the programs that take --gpu say why they compute on the CPU") {
  const SquareDigits digits(32, 16);
  const TemporaryFolder saved;
  const auto says = [&](const std::string& program, const std::string& gpu, const std::string& line,
                        Variables variables) {
    const Ended ended = run_example({test_program(program), "--gpu", gpu, "-e", "1", "--data-dir",
                                     digits.path().string(), "--save", (saved / "model.pt").string()},
                                    std::move(variables));
    INFO("out: " << ended.out << "\nerror: " << ended.error);
    CHECK(ended.code == 0);
    CHECK(count(ended.out, line) == 1);
  };
  for (const std::string program : {"ddp_main", "mnist"}) {
    const std::string why = "computing on CPUs, although CUDA_VISIBLE_DEVICES=0,1: ";
    says(program, "0,1", why + "LOCKSTEP_DEVICE=cpu\n", {{"LOCKSTEP_DEVICE", "cpu"}});
    if (!torch::cuda::is_available()) says(program, "0,1", why, {{"LOCKSTEP_DEVICE", "auto"}});
    check_refused(
        {test_program(program), "--gpu", "0,1", "--nproc", "3"},
        "the GPUs 0,1 contradict the number of processes on this host, 3: leave --nproc out, or let "
        "the launcher start 2\n",
        {{"LOCKSTEP_DEVICE", "cpu"}});
  }
  // A program of one process does not read LOCKSTEP_DEVICE.
  says("origin_main", "0", "there is no CUDA device: --gpu 0 trains on the CPU\n",
       {{"CUDA_VISIBLE_DEVICES", "-1"}});
}

}  // namespace ddp_main_test
