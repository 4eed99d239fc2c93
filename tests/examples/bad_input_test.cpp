// What a user can get wrong: one line of plain words, exit code 2, no training, nothing left behind.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <list>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "examples/output.hpp"
#include "examples/small_mnist.hpp"

namespace bad_input_test {

using namespace lockstep_test;

namespace {

using Words = std::vector<std::string>;

// An example, the arguments that every run of it needs, the options that its help names, an option that takes
// a value, and whether `launch` starts its ranks.
struct Example {
  std::string name;
  Words arguments, options;
  std::string valued;
  bool launched = true;
};

Words words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// All programs of examples/.
std::vector<Example> all_examples() {
  std::vector<Example> all{
      {"five_lines", {}, words("--epochs"), "--epochs"},
      {"libtorch_mnist", {}, words("--data-dir --samples --batch-size --epochs"), "--samples", false},
      {"libtorch_mnist_ddp", {}, words("--data-dir --samples --batch-size --epochs"), "--samples"},
      {"libtorch_dcgan",
       {},
       words("--data-dir --samples --batch-size --epochs --save-dir --checkpoint-every --restore"),
       "--save-dir",
       false},
      {"libtorch_dcgan_ddp",
       {},
       words("--data-dir --samples --batch-size --epochs --save-dir --checkpoint-every --restore"),
       "--save-dir"},
      {"mnist",
       {},
       words("-e --epochs -b --batch-size --batch_size --lr --sync-batchnorm --seed --samples --workers "
             "--data-dir --data_dir --download --mirror --gpu --save"),
       "--save"},
      {"origin_main",
       {},
       words("--gpu -e --epochs -b --batch-size --batch_size --samples --lr --save --data-dir --data_dir"),
       "--save",
       false},
      {"ddp_main",
       {},
       words("--gpu -e --epochs -b --batch-size --batch_size --samples --lr --scale-lr --amp --save "
             "--data-dir --data_dir"),
       "--save"},
      {"ddp_gpus", {}, words("--max_epochs --max-epochs --batch_size --batch-size --loss --save"), "--save"},
      {"single_gpu",
       {"1", "1"},
       words("total_epochs save_every --batch_size --batch-size --loss"),
       "--loss",
       false},
      {"multigpu", {"1", "1"}, words("total_epochs save_every --batch_size --batch-size --loss"), "--loss"},
      {"multigpu_torchrun",
       {"1", "1"},
       words("total_epochs save_every --batch_size --batch-size --momentum --snapshot_path --snapshot-path "
             "--loss"),
       "--snapshot_path"},
      {"ddp_toy", {"checkpoint"}, words("demo --nproc-per-node --cpu-devices --checkpoint"), "--checkpoint"},
      {"average_gradients",
       {},
       words("program -e --epochs -b --batch-size --batch_size --compare --plot --data-dir --data_dir "
             "--samples --test"),
       "--plot"},
      {"ring_all_reduce", {}, words("--elements"), "--elements"},
      {"gan", {}, words("--steps --digits"), "--steps"},
      {"imagenet",
       {},
       words("data -a --arch -j --workers --epochs --start-epoch -b --batch-size --lr --learning-rate "
             "--momentum --wd --weight-decay --warmup-epochs --scale-lr -p --print-freq --resume -e "
             "--evaluate --pretrained --seed --image-size --save-dir --dummy"),
       "--resume"},
      {"mingpt", {}, words("--config --data-path overrides"), "--config"},
  };
  for (Example& each : all) {
    each.options.insert(each.options.end(), {"-h", "--help"});
    if (each.launched)
      each.options.insert(each.options.end(), {"--nproc", "--prefix", "--timeout", "--threads"});
  }
  // Without libjpeg, or without toml++, CMake leaves these out.
  std::erase_if(all, [](const Example& each) {
    const bool optional = each.name == "imagenet" || each.name == "mingpt";
    return optional && !std::filesystem::exists(test_program(each.name));
  });
  return all;
}

// Runs commands, four at a time, and returns their ends in order.
std::vector<Ended> run_all(const std::vector<Words>& commands) {
  std::vector<Ended> all;
  std::list<Process> running;
  for (auto next = commands.begin(); all.size() < commands.size();) {
    for (; next != commands.end() && running.size() < 4; ++next)
      running.emplace_back(*next, Variables{{"OMP_NUM_THREADS", "1"}}, StartOptions{});
    Process& first = running.front();
    REQUIRE(first.wait());
    all.push_back(
        {first.exit_code(), first.out(), first.error(), processes_left(first.marker()), first.about_run()});
    running.pop_front();
  }
  return all;
}

// A command that a program refuses before it trains, and what its one line says.
struct Refusal {
  std::string program;
  Words arguments;
  std::string error, and_also = {};
};

// A refusal's exit code, and what its first write to stderr wrote: a pipe of packets keeps writes apart.
struct FirstWrite {
  explicit FirstWrite(const Words& command) {
    std::array<int, 2> ends{};
    REQUIRE(pipe2(ends.data(), O_DIRECT | O_CLOEXEC) == 0);
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      dup2(ends[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(ends[1]);
    std::array<char, 4096> buffer{};
    if (const ssize_t length = read(ends[0], buffer.data(), buffer.size()); length > 0)
      text.assign(buffer.data(), static_cast<std::size_t>(length));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  std::string text;
  int code = -1;
};

// Leaves out the programs that CMake has left out.
void keep_built(std::vector<Refusal>& table) {
  std::set<std::string> built;
  for (const Example& each : all_examples()) built.insert(each.name);
  std::erase_if(table, [&](const Refusal& each) { return !built.contains(each.program); });
}

void check_refusals(const std::vector<Refusal>& table) {
  std::vector<Words> commands;
  for (const Refusal& each : table) {
    commands.push_back(joined({test_program(each.program)}, each.arguments));
  }
  const std::vector<Ended> all = run_all(commands);
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO(Catch::StringMaker<Words>::convert(commands[i])
         << "\nout: " << all[i].out << "\nerror: " << all[i].error);
    CHECK(all[i].code == 2);
    CHECK(count(all[i].error, "\n") == 1);
    CHECK(all[i].error.starts_with("error: "));
    for (const std::string& words : {table[i].error, table[i].and_also})
      CHECK_THAT(all[i].error, ContainsSubstring(words));
    for (const char* training : {"Epoch", "epoch", "step 0", "Running", "D_loss"})
      CHECK(count(all[i].out, training) == 0);
    CHECK(all[i].left == 0);
  }
}

// The options in a help text: the words that begin with a dash, and the names of positional arguments.
std::set<std::string> options_in(const std::string& help) {
  std::set<std::string> found;
  for (std::size_t at = 0; (at = help.find('-', at)) != std::string::npos;) {
    const auto end = std::find_if_not(help.begin() + static_cast<std::ptrdiff_t>(at), help.end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
    });
    const bool begins = at == 0 || help[at - 1] == ' ' || help[at - 1] == ',';
    const std::string word(help.begin() + static_cast<std::ptrdiff_t>(at), end);
    if (begins && word.find_first_not_of('-') != std::string::npos) found.insert(word);
    at += word.size();
  }
  return found;
}

}  // namespace

TEST_CASE("every example's help names its options, once for all ranks", "[.release]") {
  const auto examples = all_examples();
  std::vector<Words> commands;
  for (const Example& each : examples) {
    commands.push_back({test_program(each.name), "--help"});
    if (each.launched) commands.back().insert(commands.back().begin() + 1, {"--nproc", "2"});
  }
  const std::vector<Ended> all = run_all(commands);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Example& example = examples[i];
    INFO(example.name << "\nout: " << all[i].out << "\nerror: " << all[i].error);
    CHECK(all[i].code == 0);
    CHECK(all[i].error.empty());
    CHECK(all[i].left == 0);
    CHECK(count(all[i].out, "Usage:") == 1);
    std::set<std::string> expected;
    for (const std::string& option : example.options) {
      if (option.starts_with('-'))
        expected.insert(option);
      else  // a positional argument has a line of its own
        CHECK(count(all[i].out, "\n  " + option + " ") == 1);
    }
    CHECK(options_in(all[i].out) == expected);
  }
}

TEST_CASE("every example refuses an unknown option and an empty value", "[.release]") {
  std::vector<Refusal> table;
  for (const Example& each : all_examples()) {
    // The whole line in one write: under torchrun the ranks share stderr.
    const Words unknown = joined(each.arguments, {"--no-such-option"});
    const FirstWrite first(joined({test_program(each.name)}, unknown));
    INFO(each.name << " wrote: " << first.text);
    CHECK(first.code == 2);
    CHECK(first.text.starts_with("error: "));
    CHECK(first.text.find('\n') == first.text.size() - 1);
    table.push_back({each.name, unknown, "--no-such-option"});
    table.push_back(
        {each.name, joined(each.arguments, {each.valued + "=", "X"}), each.valued + "=: the value is empty"});
    table.push_back(
        {each.name, joined(each.arguments, {each.valued, ""}), each.valued + ": the value is empty"});
  }
  table.push_back({"five_lines", {"--epochs", "three"}, "--epochs"});
  table.push_back({"five_lines", {"--nproc", "0"}, "--nproc 0 is not a number of processes"});
  table.push_back({"gan", {"--steps", "0"}, "--steps"});
  table.push_back({"libtorch_dcgan_ddp", {"--epochs", "-1"}, "--epochs"});
  check_refusals(table);
}

TEST_CASE("every example refuses a path that it cannot write before it trains", "[.release]") {
  const std::string remedy = "give a path in a folder that exists and can be written";
  std::vector<Refusal> table{
      {"origin_main", {"--save", "/tmp"}, "--save: cannot save to '/tmp': it is a folder", "give the name"},
      {"libtorch_dcgan", {"--save-dir", "/absent"}, "--save-dir", "/absent; see --help"}};
  // The last word of the arguments is the path.
  const auto unwritable = [&](const std::string& program, const std::string& option, const Words& arguments) {
    table.push_back({program, arguments, option + ": cannot save to '" + arguments.back(), remedy});
  };
  unwritable("mnist", "--save", {"--nproc", "1", "--save", "/absent/x"});
  unwritable("ddp_main", "--save", {"--save", "/absent/x"});
  unwritable("ddp_gpus", "--save", {"--nproc", "1", "--save", "/absent/x"});
  unwritable("origin_main", "--save", {"--save", "/absent/x"});
  unwritable("multigpu_torchrun", "--snapshot_path",
             {"1", "1", "--nproc", "1", "--snapshot_path", "/absent/x"});
  unwritable("average_gradients", "--plot", {"--nproc", "1", "--plot", "/absent/x.svg"});
  unwritable("ddp_toy", "--checkpoint", {"--cpu-devices", "2", "--checkpoint", "/absent/x"});
  unwritable("ddp_toy", "--checkpoint", {"checkpoint", "--nproc", "1", "--checkpoint", "/absent/x"});
  unwritable("libtorch_dcgan", "--save-dir", {"--data-dir", "/tmp", "--save-dir", "/proc"});
  unwritable("libtorch_dcgan_ddp", "--save-dir",
             {"--nproc", "1", "--data-dir", "/tmp", "--save-dir", "/proc"});
  unwritable("imagenet", "--save-dir", {"--nproc", "1", "--save-dir", "/absent"});
  for (const std::string key : {"snapshot_path", "loss_path", "report_dir"})
    table.push_back({"mingpt",
                     {"--nproc", "1", "trainer_config." + key + "=/proc/x"},
                     "trainer_config." + key + ": cannot save to '/proc/x",
                     remedy});
  keep_built(table);
  check_refusals(table);

  // These two save into the working folder.
  for (const std::string program : {"single_gpu", "multigpu"}) {
    const Ended ended = run({"env", "--chdir", "/proc", test_program(program), "1", "1"});
    CHECK(ended.code == 2);
    CHECK(ended.out.empty());
    CHECK(ended.error ==
          "error: cannot save to 'checkpoint.pt': No such file or directory; " + remedy + "\n");
  }
}

TEST_CASE("every example that reads a file ends with exit code 2 where the file is missing or damaged",
          "[.release]") {
  const TemporaryFolder folder;
  const std::string empty = folder.path().string(), absent = (folder / "absent").string(),
                    damaged = folder.write("damaged", "no archive").string();
  std::vector<Refusal> table{
      {"mnist", {"--nproc", "1", "--data-dir", absent}, absent},
      {"ddp_main", {"--data-dir", empty}, empty + ": there is no train-images-idx3-ubyte"},
      {"origin_main", {"--data-dir", absent}, absent},
      {"average_gradients", {"--nproc", "2", "--data-dir", absent}, absent},
      {"libtorch_mnist", {"--data-dir", absent}, "--data-dir", absent},
      {"libtorch_dcgan", {"--data-dir", empty, "--save-dir", empty, "--restore"}, "--restore: ", empty},
      {"libtorch_dcgan_ddp", {"--data-dir", empty, "--save-dir", empty, "--restore"}, "--restore: ", empty},
      {"multigpu_torchrun",
       {"1", "1", "--nproc", "2", "--snapshot_path", damaged},
       "--snapshot_path: could not resume from '" + damaged + "'",
       "remove it to train from scratch"},
      {"mingpt",
       {"trainer_config.snapshot_path=" + damaged},
       "trainer_config.snapshot_path: ",
       "'" + damaged + "'"},
      {"mingpt", {"--config", absent}, "--config: " + absent, "give a TOML file"},
      {"mingpt", {"--config", empty}, "--config: " + empty + " is a folder: give a TOML file"},
      {"mingpt", {"--data-path", absent}, "'" + absent + "' holds no text"},
      {"imagenet", {"--nproc", "1", "--resume", absent}, "'" + absent + "'"},
      {"imagenet", {"--nproc", "1", "--pretrained", damaged}, "'" + damaged + "'"},
      {"imagenet", {"--nproc", "1", absent}, absent},
  };
  // LibTorch's reader takes a truncated file for a whole one.
  const TemporaryFolder truncated, packed;
  const auto mnist_file = [&](const std::string& name, std::uintmax_t size) {
    std::filesystem::resize_file(truncated.write(name, ""), size);
    packed.write(name + ".gz", "packed");
  };
  mnist_file("train-images-idx3-ubyte", 16 + 60'000 * 784);
  mnist_file("train-labels-idx1-ubyte", 8 + 60'000);
  mnist_file("t10k-images-idx3-ubyte", 16 + 10'000 * 784 - 1);
  mnist_file("t10k-labels-idx1-ubyte", 8 + 10'000);
  const auto in = [](const TemporaryFolder& place) { return place.path().string(); };
  for (const std::string program :
       {"libtorch_mnist", "libtorch_mnist_ddp", "libtorch_dcgan", "libtorch_dcgan_ddp"}) {
    table.push_back({program,
                     {"--data-dir", empty},
                     "--data-dir: " + empty + "/train-images-idx3-ubyte: no such file; give the folder"});
    table.push_back(
        {program,
         {"--data-dir", in(truncated)},
         "--data-dir: " + in(truncated) + "/t10k-images-idx3-ubyte: found 7840015 bytes, expected 7840016"});
    table.push_back({program,
                     {"--data-dir", in(packed)},
                     in(packed) + "/train-images-idx3-ubyte.gz: unpack it with gunzip"});
  }
  keep_built(table);
  check_refusals(table);
  CHECK(folder.files() == 1);
}

TEST_CASE("options that mean nothing together are refused", "[.release]") {
  std::vector<Refusal> table{
      {"average_gradients", {"group", "--compare"}, "--compare: group does not use it"},
      {"average_gradients", {"processes", "--plot", "x.svg"}, "--plot: processes does not use it"},
      {"average_gradients", {"processes", "--epochs", "2"}, "--epochs: processes does not use it"},
      {"average_gradients", {"processes", "--test"}, "--test: processes does not use it"},
      {"average_gradients", {"group", "--test"}, "--test: group does not use it"},
      {"average_gradients", {"--compare", "--test"}, "--test: --compare does not use it"},
      {"average_gradients", {"--compare", "--plot", "x.svg"}, "--plot: --compare does not use it"},
      {"ddp_toy", {"basic", "--checkpoint", "x"}, "--checkpoint: basic does not use it"},
      {"mnist", {"--mirror", "file:///x"}, "--mirror", "--download"},
      {"imagenet", {"--dummy", "/tmp"}, "--dummy"},
      {"imagenet", {"--resume", "x", "--start-epoch", "2"}, "--resume"},
      {"mingpt", {"--data-path", "x", "data_config.path=y"}, "data_config.path=y: --data-path gives"},
      {"mingpt", {"trainer_config.amp_dtype=bfloat16"}, "amp_dtype=bfloat16: without use_amp it has no use"},
      {"mingpt", {"sample_config.number=0", "sample_config.length=9"}, "sample_config.length=9: with"},
  };
  keep_built(table);
  check_refusals(table);
}

TEST_CASE("wrong flags are refused on one line") {
  std::vector<Refusal> table{
      {"mnist", {"stray"}, "stray"},
      {"mnist", {"--batch-size", "0"}, "--batch-size"},
      {"mnist", {"--batch_size=0"}, "--batch-size"},
      {"mnist", {"--epochs", "-1"}, "--epochs"},
      {"mnist", {"-e", "three"}, "--epochs"},
      {"mnist", {"--epochs"}, "--epochs"},
      {"mnist", {"--workers", "-2"}, "--workers"},
      {"mnist", {"--lr", "nan"}, "--lr: nan is not a number"},
      {"mnist", {"--gpu", "all"}, "'all' is not a list of device numbers"},
      // Numbers that are too large are refused, not made smaller.
      {"mnist", {"--batch-size", "9223372036854775808"}, "--batch-size"},
      {"mnist", {"--epochs", "99999999999999999999999"}, "--epochs"},
      {"mnist", {"--seed", "18446744073709551616"}, "--seed"},
      {"mnist", {"--seed", "-18446744073709551616"}, "--seed"},
      {"origin_main", {"-e", "three"}, "--epochs"},
      {"ddp_main", {"--lr", "nan"}, "--lr: nan is not a number"},
      {"average_gradients", {"--plot", "curve.png"}, "--plot: curve.png ends neither in .svg nor in .csv"},
      {"average_gradients", {"training"}, "program"},
      {"average_gradients", {"--epochs", "-1"}, "--epochs"},
  };
  for (const std::string rate : {"fast", "-1", "inf", "1e-4x", "1e400"})
    table.push_back({"mnist", {"--lr", rate}, "--lr"});
  check_refusals(table);
}

TEST_CASE(
    "a data folder that is none, or a mirror that has nothing, is refused on one line before training") {
  const auto refused = [](const Words& more, const std::string& why, const Variables& variables = {},
                          const std::string& before = "") {
    check_refused(joined({test_program("mnist"), "--nproc", "2", "--data-dir"}, more), why, variables,
                  before);
  };
  const TemporaryFolder empty, target;
  refused({(empty / "absent").string()}, "absent");
  refused({empty.path().string()}, "there is no train-images-idx3-ubyte");
  const SmallMnist folder;
  folder.write("t10k-images-idx3-ubyte", "this is no picture of a digit");
  refused({folder.path().string()}, "t10k-images-idx3-ubyte: offset 0");
  const auto url = "file://" + empty.path().string();
  refused({target.path().string(), "--download"}, "train-images-idx3-ubyte.gz could not be downloaded",
          {{"LOCKSTEP_MNIST_MIRROR", url}}, "[rank 0] fetching " + url + "/train-images-idx3-ubyte.gz\n");
}

}  // namespace bad_input_test
