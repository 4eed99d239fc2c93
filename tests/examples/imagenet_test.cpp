// examples/imagenet does what its first lines say, with real processes.
#include <filesystem>
#include <random>
#include <regex>

#include "examples/output.hpp"
#include "lockstep/files.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "support/images.hpp"
#include "support/temporary_folder.hpp"

namespace imagenet_test {

using namespace lockstep_test;

namespace {

std::vector<std::string> command(const std::vector<std::string>& arguments, const std::string& folder = ".") {
  return joined({"env", "--chdir=" + folder, "LOCKSTEP_DEVICE=cpu", test_program("imagenet")}, arguments);
}

// Classes that differ in colour or height, as noisy JPEG and PNG files of several sizes: 24 images to train on. Of
// three classes, `val` has three images each; of more, 1, 2, 3, 1, 2, ...
class SmallImages {
 public:
  explicit SmallImages(int classes = 3) {
    for (int c = 0; c < classes; ++c) {
      for (int i = 0; i < 24 / classes; ++i) write("train", c, i);
      for (int i = 0; i < (classes == 3 ? 3 : 1 + c % 3); ++i) write("val", c, i);
    }
  }
  [[nodiscard]] std::string path() const { return folder_.path().string(); }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

 private:
  void write(const std::string& part, int c, int i) {
    const int width = 40 + 3 * i, height = 36 + 5 * c;
    std::vector<std::uint8_t> pixels;
    for (int k = 0; k < 3 * width * height; ++k)
      pixels.push_back(static_cast<std::uint8_t>((k % 3 == c % 3 ? 180 : 40) + random_() % 60));
    const auto path = folder_ / (part + "/class" + std::to_string(c));
    std::filesystem::create_directories(path);
    std::ofstream(path / (std::to_string(i) + (i % 2 ? ".JPEG" : ".png")), std::ios::binary)
        << (i % 2 ? jpeg_file(width, height, pixels) : png_file(width, height, pixels));
  }

  TemporaryFolder folder_;
  std::minstd_rand random_;
};

// The flags of a short run on three ranks: three steps an epoch.
std::vector<std::string> short_run(const SmallImages& images, const std::vector<std::string>& more) {
  return joined({"--nproc", "3", "-b", "9", "--image-size", "32", "--lr", "0.02", "-p", "2", images.path()},
                more);
}

// What the run printed, with X for each time in seconds.
std::string without_times(const std::string& out) {
  return std::regex_replace(out, std::regex("(Time|Data) +[0-9.]+ \\( *[0-9.]+\\)"), "$1 X");
}

void refused(const std::vector<std::string>& arguments, const std::string& why,
             const std::string& before = "") {
  check_refused(command(arguments), why, {}, before);
}

}  // namespace

TEST_CASE("imagenet trains on a folder, resumes its checkpoint to the same numbers, and evaluates it") {
  const SmallImages images;
  const TemporaryFolder whole, parts;
  const auto train = [&](const TemporaryFolder& folder, std::vector<std::string> more,
                         const std::string& warning = {}) {
    more.insert(more.end(), {"--save-dir", folder.path().string()});
    const Ended ended = run_example(command(short_run(images, more)));
    REQUIRE(ended.code == 0);
    CHECK(ended.error == warning);
    return ended.out;
  };
  const std::string out = train(whole, {"--epochs", "2"});
  const std::string number = " +[0-9.]+ \\( *[0-9.]+\\)",
                    loss = "\tLoss [0-9.]+e[+-][0-9]+ \\([0-9.]+e[+-][0-9]+\\)";
  const std::string values = loss + "\tAcc@1" + number + "\tAcc@5" + number + "\n";
  const auto epoch = [&](const std::string& number_of_epoch) {
    const std::string begin = "Epoch: \\[" + number_of_epoch + "\\]\\[";
    const std::string times = "/3\\]\tTime" + number + "\tData" + number + values;
    return begin + "1" + times + begin + "3" + times + "Test: \\[1/1\\]\tTime" + number + values +
           " \\*   Acc@1 [0-9.]+ Acc@5 100.000\n";
  };
  INFO(out);
  CHECK(std::regex_match(out, std::regex("=> creating model 'resnet18'\n" + epoch("0") + epoch("1"))));
  CHECK(std::filesystem::exists(whole / "model_best.pt"));

  train(parts, {"--epochs", "1", "-j", "0"});
  const auto checkpoint = (parts / "checkpoint.pt").string();
  // The rate is that of the file.
  const std::string resumed = train(
      parts, {"--epochs", "2", "--resume", checkpoint, "--lr", "0.5"},
      "warning: the optimizer's settings are those of the checkpoint, rate 0.02 in epoch 0; ignored: --lr\n");
  const auto all = lines_of(without_times(out)), rest = lines_of(without_times(resumed));
  REQUIRE(rest.size() == 7);
  CHECK(rest[1] == "=> loading checkpoint '" + checkpoint + "'");
  CHECK(rest[2] == "=> loaded checkpoint '" + checkpoint + "' (epoch 1)");
  CHECK(std::vector(rest.begin() + 3, rest.end()) == std::vector(all.end() - 4, all.end()));
  CHECK(lockstep::read_file(whole / "checkpoint.pt") == lockstep::read_file(checkpoint));

  for (const std::string ranks : {"1", "2"}) {
    const auto lines =
        lines_of(out_of(command({"--nproc", ranks, "-b", "8", "--image-size", "32", "-e", "--pretrained",
                                 (whole / "checkpoint.pt").string(), images.path()})));
    REQUIRE(lines.size() == 3);
    CHECK(lines[0] == "=> using pre-trained model 'resnet18'");
    CHECK(lines[2] == all.back());
  }
  refused(short_run(images, {"-a", "resnet34", "--pretrained", checkpoint}),
          "checkpoint.pt': the state dict does not fit the model: missing \"layer1.2.conv1.weight\"",
          "=> using pre-trained model 'resnet34'\n");
}

TEST_CASE(
    "imagenet begins with --start-epoch at the rate of StepLR(30, 0.1), replaces model_best.pt by a better "
    "one only, and evaluates top-1 and top-5 accuracy of --pretrained",
    "[.release]") {
  using Dict = c10::impl::GenericDict;
  const SmallImages images(8);
  const TemporaryFolder saved, unused;
  const auto checkpoint = saved / "checkpoint.pt", best = saved / "model_best.pt";
  // Trains one epoch of one step and returns the checkpoint.
  const auto train = [&](int epoch, std::vector<std::string> more) {
    more.insert(more.begin(), {"--nproc", "1", "-b", "24", "--image-size", "32", "--lr", "0.02", "--save-dir",
                               saved.path().string(), "--epochs", std::to_string(epoch + 1), images.path()});
    const Ended ended = run_example(command(more));
    REQUIRE(ended.code == 0);
    CHECK(count(ended.out, "Epoch: [") == 1);
    CHECK(count(ended.out, fmt::format("Epoch: [{}][1/1]\t", epoch)) == 1);
    Dict file = lockstep::torch_load(checkpoint).toGenericDict();
    CHECK(file.at("epoch").toInt() == epoch + 1);
    return file;
  };
  const auto rate = [](const Dict& file) {
    const auto groups = file.at("optimizer").toGenericDict().at("param_groups").toList();
    return groups.get(0).toGenericDict().at("lr").toDouble();
  };
  // Writes the checkpoint as one of another epoch and another best accuracy.
  const auto pretend = [&](Dict file, int epoch, const c10::IValue& best_acc1) {
    file.insert_or_assign("epoch", epoch);
    file.insert_or_assign("best_acc1", best_acc1);
    lockstep::torch_save(c10::IValue(file), saved / "other.pt");
    std::filesystem::remove(best);
    return std::vector<std::string>{"--resume", (saved / "other.pt").string()};
  };
  const auto about = [](double value) { return Catch::Matchers::WithinRel(value, 1e-12); };
  Dict file = train(30, {"--start-epoch", "30"});
  CHECK_THAT(rate(file), about(0.002));
  // No accuracy is above 100 %, which Python saves as a tensor.
  file = train(60, pretend(file, 60, torch::tensor(100.0F)));
  CHECK_THAT(rate(file), about(0.0002));
  CHECK(file.at("best_acc1").toDouble() == 100);
  CHECK(!std::filesystem::exists(best));
  file = train(29, pretend(file, 29, -1.0));
  CHECK(rate(file) == 0.02);
  CHECK(file.at("best_acc1").toDouble() >= 0);
  REQUIRE(std::filesystem::exists(best));
  CHECK(lockstep::read_file(best) == lockstep::read_file(checkpoint));

  // A warm-up over three epochs of one step, to a rate that --scale-lr bases on 24 images a step.
  const double base = 0.02 * 24 / 256;
  const auto scaled = [&](int epoch) {
    return rate(train(epoch, {"--start-epoch", std::to_string(epoch), "--scale-lr", "--warmup-epochs", "3"}));
  };
  CHECK_THAT(scaled(0), about(base * 0.01));
  CHECK_THAT(scaled(1), about(base * (0.01 + 0.99 / 3)));
  CHECK_THAT(scaled(3), about(base));

  // A model whose outputs do not depend on the image: the classes 2, 5, 1, 0, 7 are the largest, in this order.
  const Dict model = file.at("state_dict").toGenericDict();
  model.at("fc.weight").toTensor().zero_();
  model.at("fc.bias").toTensor().copy_(torch::tensor({4.0, 5.0, 9.0, 1.0, 2.0, 6.0, 0.0, 3.0}));
  lockstep::torch_save(c10::IValue(model), saved / "constant.pt");
  const auto out = out_of(command({"--nproc", "2", "-b", "24", "--image-size", "32", "-e", "--pretrained",
                                   (saved / "constant.pt").string(), images.path()},
                                  unused.path().string()));
  // Of 15 images, 3 are of class 2, and 3 + 3 + 2 + 1 + 2 of those five.
  CHECK(lines_of(out).back() == " *   Acc@1 20.000 Acc@5 73.333");
  CHECK(count(out, "Epoch: ") == 0);
  CHECK(unused.files() == 0);
}

TEST_CASE("imagenet augments the images that it trains on, by its seed, and not those that it validates on",
          "[.release]") {
  const SmallImages images;
  const TemporaryFolder saved;
  const auto losses = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--nproc", "1", "-b", "24", "--image-size", "32", images.path()});
    const Ended ended = run_example(command(more));
    REQUIRE(ended.code == 0);
    std::smatch found;
    REQUIRE(std::regex_search(ended.out, found, std::regex("\tLoss ([0-9.e+-]+)")));
    return found[1].str();
  };
  const auto train = [&](const std::string& folder, std::vector<std::string> more) {
    more.insert(more.end(), {"--epochs", "1", "--lr", "0", "--save-dir", (saved / folder).string()});
    std::filesystem::create_directories(saved / folder);
    return losses(more);
  };
  train("model", {});
  const std::string model = (saved / "model/checkpoint.pt").string();
  // One step with all images of an epoch: their order does not change its loss.
  const auto trained = [&](const std::string& seed) {
    return train("other", {"--pretrained", model, "--seed", seed});
  };
  const auto validated = [&](const std::string& seed) {
    return losses({"-e", "--pretrained", model, "--seed", seed});
  };
  const std::string first = trained("1");
  CHECK(trained("2") != first);
  CHECK(trained("1") == first);
  CHECK(validated("1") == validated("2"));
}

TEST_CASE("imagenet names a damaged image") {
  const SmallImages images;
  const auto damaged = images / "train/class1/3.JPEG";
  std::filesystem::resize_file(damaged, std::filesystem::file_size(damaged) / 2);
  const TemporaryFolder saved;
  const Ended ended =
      run_example(command(short_run(images, {"--epochs", "1", "--save-dir", saved.path().string()})));
  CHECK(ended.code == 1);
  CHECK(count(ended.error, damaged.string() + ": cannot be decoded: Premature end of JPEG file") == 1);
  CHECK(std::count(ended.error.begin(), ended.error.end(), '\n') == 1);
}

TEST_CASE("imagenet refuses what it cannot use on one line") {
  const SmallImages images;
  refused({"-a", "resnet19"}, "--arch");
  refused({"-b", "0"}, "--batch-size");
  refused({"-e", "--epochs", "7"}, "--epochs: with -e it has no use");
  refused({"-e", "--scale-lr"}, "--scale-lr: with -e it has no use");
  refused({"--lr", "nan"}, "nan is not a number");
  refused({"--nproc", "2", (images / "absent").string()}, "absent/train: cannot be read: No such file");
  const std::string dummy = "=> Dummy data is used!\n";
  refused({"--nproc", "2", "-b", "1", "--dummy"}, "-b 1: give an image or more for each of 2 ranks", dummy);
  const auto text = images / "text";
  std::ofstream(text) << "no checkpoint";
  refused({"--nproc", "2", "--resume", text.string()}, "text' (13 bytes): it is no file of torch.save",
          dummy + "=> creating model 'resnet18'\n=> loading checkpoint '" + text.string() + "'\n");
}

}  // namespace imagenet_test
