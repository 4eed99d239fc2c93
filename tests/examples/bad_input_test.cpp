// What a user can get wrong: one line of plain words, exit code 2, no training, nothing left behind.
#include "examples/small_mnist.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace bad_input_test {

using namespace lockstep_test;

namespace {

// The one line that a wrong command ends with; `before` is what it may say first.
std::string refusal(std::vector<std::string> arguments, const Variables& variables = {},
                    const std::string& before = "", const std::string& program = "mnist") {
  arguments.insert(arguments.begin(), test_program(program));
  const Ended ended = run(arguments, variables);
  INFO(Catch::StringMaker<std::vector<std::string>>::convert(arguments)
       << "\nout: " << ended.out << "\nerror: " << ended.error);
  CHECK(ended.code == 2);
  CHECK(ended.out == before);
  CHECK(std::count(ended.error.begin(), ended.error.end(), '\n') == 1);
  CHECK(ended.error.find("terminate") == std::string::npos);
  CHECK(ended.error.find("#1") == std::string::npos);
  CHECK(ended.left == 0);
  return ended.error;
}

}  // namespace

TEST_CASE("wrong flags are refused on one line") {
  CHECK_THAT(refusal({"--learning-speed", "3"}), ContainsSubstring("--learning-speed"));
  CHECK_THAT(refusal({"stray"}), ContainsSubstring("stray"));
  CHECK_THAT(refusal({"--batch-size", "0"}), ContainsSubstring("--batch-size: Value 0 not in range"));
  CHECK_THAT(refusal({"--batch_size=0"}), ContainsSubstring("--batch-size: Value 0 not in range"));
  CHECK_THAT(refusal({"--epochs", "-1"}), ContainsSubstring("--epochs: Value -1 not in range"));
  CHECK_THAT(refusal({"-e", "three"}), ContainsSubstring("--epochs: Value three not in range"));
  CHECK_THAT(refusal({"--epochs"}), ContainsSubstring("--epochs"));
  CHECK_THAT(refusal({"--workers", "-2"}), ContainsSubstring("--workers: Value -2 not in range"));
  for (const std::string rate : {"fast", "-1", "inf", "1e-4x", "1e400"})
    CHECK_THAT(refusal({"--lr", rate}), ContainsSubstring("--lr: Value " + rate + " not in range"));
  CHECK_THAT(refusal({"--lr", "nan"}), ContainsSubstring("--lr: nan is not a number"));
  CHECK_THAT(refusal({"--gpu", "all"}), ContainsSubstring("'all' is not a list of device numbers"));
}

TEST_CASE("numbers that are too large are refused, not made smaller") {
  const auto refused = [](const std::string& flag, const std::string& number) {
    CHECK_THAT(refusal({flag, number}), ContainsSubstring(flag + ": Value " + number + " not in range"));
  };
  for (const std::string flag : {"--batch-size", "--epochs", "--workers", "--seed"})
    refused(flag, "99999999999999999999999");
  refused("--seed", "18446744073709551616");
  refused("--batch-size", "9223372036854775808");
  refused("--seed", "-18446744073709551616");
}

TEST_CASE("empty values are refused, as a variable of the shell that is not set gives them") {
  for (const std::string flag : {"--save", "--data-dir", "--mirror", "--gpu", "--lr"})
    CHECK_THAT(refusal({flag, ""}), ContainsSubstring(flag + ": the value is empty;"));
}

TEST_CASE("an empty value behind an equals sign does not swallow what comes next") {
  for (const std::string flag : {"--save", "--data-dir", "--epochs"})
    CHECK_THAT(refusal({flag + "=", "X"}), ContainsSubstring(flag + "=: the value is empty;"));
}

TEST_CASE("the small examples refuse bad input on one line as well") {
  const auto refused = [](const std::string& program, const std::vector<std::string>& arguments) {
    return refusal(arguments, {}, "", program);
  };
  CHECK_THAT(refused("five_lines", {"--epochs", "three"}),
             ContainsSubstring("--epochs: Value three not in range"));
  CHECK_THAT(refused("five_lines", {"--nproc", "0"}), ContainsSubstring("--nproc 0"));
  CHECK_THAT(refused("five_lines", {"--epoch", "1"}), ContainsSubstring("--epoch"));
  CHECK_THAT(refused("gan", {"--steps", "0"}), ContainsSubstring("--steps: Value 0 not in range"));
  CHECK_THAT(refused("gan", {"--digits=", "1"}), ContainsSubstring("--digits=: the value is empty;"));
}

TEST_CASE("the help is printed once") {
  for (const std::string program : {"mnist", "five_lines", "gan"}) {
    const Ended ended = run({test_program(program), "--nproc", "2", "--help"});
    CHECK(ended.code == 0);
    CHECK(ended.error.empty());
    const auto usage = ended.out.find("Usage:");
    CHECK(usage != std::string::npos);
    CHECK(ended.out.find("Usage:", usage + 1) == std::string::npos);
    CHECK_THAT(ended.out, ContainsSubstring("--nproc N"));
  }
}

TEST_CASE("a wrong number of processes is refused on one line") {
  CHECK_THAT(refusal({"--nproc", "0"}), ContainsSubstring("--nproc 0"));
  CHECK_THAT(refusal({"--nproc", "two"}), ContainsSubstring("--nproc two"));
  CHECK_THAT(refusal({"--prefix", "perhaps"}), ContainsSubstring("--prefix perhaps"));
  CHECK_THAT(refusal({"--nproc", "2"}, {{"WORLD_SIZE", "3"}}), ContainsSubstring("WORLD_SIZE=3"));
  const auto rank = [](const std::string& number) {
    return Variables{{"RANK", number},
                     {"WORLD_SIZE", "2"},
                     {"LOCAL_RANK", "0"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", "29500"}};
  };
  CHECK_THAT(refusal({}, rank("5")), ContainsSubstring("RANK=5 is out of range"));
  CHECK_THAT(refusal({}, rank("x")), ContainsSubstring("RANK=x is not a whole number"));
}

TEST_CASE("a data folder that is none is refused on one line before training") {
  SmallMnist folder;
  const auto in = [&](const std::filesystem::path& path) {
    return refusal({"--nproc", "2", "--data-dir", path.string()});
  };
  CHECK_THAT(in(folder / "absent"), ContainsSubstring("absent"));
  const TemporaryFolder empty;
  CHECK_THAT(in(empty.path()), ContainsSubstring("there is no train-images-idx3-ubyte"));

  folder.write("t10k-images-idx3-ubyte", "this is no picture of a digit");
  CHECK_THAT(in(folder.path()), ContainsSubstring("t10k-images-idx3-ubyte: offset 0"));
}

TEST_CASE("a mirror that has nothing is refused on one line") {
  const TemporaryFolder empty, target;
  const auto url = "file://" + empty.path().string();
  CHECK_THAT(
      refusal({"--nproc", "2", "--download", "--data-dir", target.path().string()},
              {{"LOCKSTEP_MNIST_MIRROR", url}}, "[rank 0] fetching " + url + "/train-images-idx3-ubyte.gz\n"),
      ContainsSubstring("train-images-idx3-ubyte.gz could not be downloaded"));
}

TEST_CASE("a place where the model cannot be saved is refused on one line before training") {
  const SmallMnist folder;
  CHECK_THAT(refusal({"--data-dir", folder.path().string(), "--save", (folder / "absent" / "m.pt").string()}),
             ContainsSubstring("cannot save to"));
  CHECK_THAT(refusal({"--data-dir", folder.path().string(), "--save", folder.path().string()}),
             ContainsSubstring("cannot save to"));
}

}  // namespace bad_input_test
