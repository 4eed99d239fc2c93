// What a user can get wrong: one line of plain words, exit code 2, no training, nothing left behind.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <list>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/small_mnist.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"

namespace bad_input_test {

using namespace lockstep_test;

namespace {

// The one line that a wrong command of mnist ends with; `before` is what it may say first.
std::string refusal(std::vector<std::string> arguments, const Variables& variables = {},
                    const std::string& before = "") {
  arguments.insert(arguments.begin(), test_program("mnist"));
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
      {"ddp_toy",
       {"checkpoint"},
       words("demo --nproc-per-node --cpu-devices --checkpoint --port"),
       "--checkpoint"},
      {"average_gradients",
       {},
       words("program --nproc-per-node -e --epochs -b --batch-size --batch_size --compare --plot --data-dir "
             "--data_dir --port --samples --test"),
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
    if (each.launched) each.options.insert(each.options.end(), {"--nproc", "--prefix", "--timeout"});
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
// Throws when the program has not ended within `timeout`.
struct FirstWrite {
  explicit FirstWrite(const Words& command, Milliseconds timeout = Milliseconds(60000)) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
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
    pollfd polled{ends[0], POLLIN, 0};
    if (poll(&polled, 1, static_cast<int>(timeout.count())) > 0)
      if (const ssize_t length = read(ends[0], buffer.data(), buffer.size()); length > 0)
        text.assign(buffer.data(), static_cast<std::size_t>(length));
    close(ends[0]);
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
        throw std::runtime_error(
            fmt::format("{} is still running after {} ms; its first write to stderr: '{}'", command.front(),
                        timeout.count(), text));
      }
      usleep(1000);
    }
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
    commands.push_back({test_program(each.program)});
    commands.back().insert(commands.back().end(), each.arguments.begin(), each.arguments.end());
  }
  const std::vector<Ended> all = run_all(commands);
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO(Catch::StringMaker<Words>::convert(commands[i])
         << "\nout: " << all[i].out << "\nerror: " << all[i].error);
    CHECK(all[i].code == 2);
    CHECK(count(all[i].error, "\n") == 1);
    CHECK(all[i].error.starts_with("error: "));
    CHECK_THAT(all[i].error, ContainsSubstring(table[i].error));
    CHECK_THAT(all[i].error, ContainsSubstring(table[i].and_also));
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

// Counts how often a program is executed: a rank is another execution of the same file.
class ExecutionCount {
 public:
  explicit ExecutionCount(const std::filesystem::path& program)
      : fd_(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    // The kernel merges equal events in a row, hence also the reads in between.
    if (fd_ < 0 || inotify_add_watch(fd_, program.c_str(), IN_OPEN | IN_ACCESS) < 0)
      throw std::runtime_error("cannot watch " + program.string());
  }
  ~ExecutionCount() { close(fd_); }
  ExecutionCount(const ExecutionCount&) = delete;
  ExecutionCount& operator=(const ExecutionCount&) = delete;

  [[nodiscard]] int seen() const {
    int opened = 0;
    alignas(inotify_event) char buffer[1 << 14];
    ssize_t length = 0;
    while ((length = read(fd_, buffer, sizeof buffer)) > 0)
      for (const char* at = buffer; at < buffer + length;) {
        const auto* event = reinterpret_cast<const inotify_event*>(at);
        opened += (event->mask & IN_OPEN) != 0;
        at += sizeof *event + event->len;
      }
    return opened;
  }

 private:
  int fd_;
};

}  // namespace

TEST_CASE("every example's help names its options, in one process", "[.release]") {
  const TemporaryFolder copies;  // of the programs, which other tests run at the same time
  const auto copied = [&](const std::string& name) {
    std::filesystem::copy_file(test_program(name), copies / name);
    return (copies / name).string();
  };
  const auto examples = all_examples();
  std::vector<Words> commands;
  std::list<ExecutionCount> executions;
  for (const Example& each : examples) {
    commands.push_back({copied(each.name), "--help"});
    if (each.launched) commands.back().insert(commands.back().begin() + 1, {"--nproc", "2"});
    executions.emplace_back(commands.back().front());
  }
  const std::vector<Ended> all = run_all(commands);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Example& example = examples[i];
    INFO(example.name << "\nout: " << all[i].out << "\nerror: " << all[i].error);
    CHECK(all[i].code == 0);
    CHECK(all[i].error.empty());
    CHECK(all[i].left == 0);
    CHECK(executions.front().seen() == 1);
    executions.pop_front();
    CHECK(count(all[i].out, "Usage:") == 1);
    auto named = options_in(all[i].out);
    std::set<std::string> expected;
    for (const std::string& option : example.options) {
      if (option.starts_with('-'))
        expected.insert(option);
      else  // a positional argument has a line of its own
        CHECK_THAT(all[i].out, ContainsSubstring("\n  " + option + " "));
    }
    CHECK(named == expected);
  }

  // The count sees ranks.
  const std::string two_ranks = (copies / "five_lines").string();
  const ExecutionCount ranks(two_ranks);
  CHECK(run({two_ranks, "--nproc", "2", "--epochs", "1"}).code == 0);
  CHECK(ranks.seen() > 1);
}

TEST_CASE("a program that does not end fails the check of its first write", "[.release]") {
  for (const std::string written : {"", "begun"})
    CHECK_THROWS_WITH(
        FirstWrite({"/bin/sh", "-c", "printf '" + written + "' >&2; exec sleep 60"}, Milliseconds(2000)),
        "/bin/sh is still running after 2000 ms; its first write to stderr: '" + written + "'");
}

TEST_CASE("every example refuses an unknown option and an empty value", "[.release]") {
  std::vector<Refusal> table;
  for (const Example& each : all_examples()) {
    const auto with = [&](const Words& more) {
      Words all = each.arguments;
      all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    // The whole line in one write: under torchrun the ranks share stderr.
    Words unknown = with({"--no-such-option"});
    unknown.insert(unknown.begin(), test_program(each.name));
    const FirstWrite first(unknown);
    INFO(each.name << " wrote: " << first.text);
    CHECK(first.code == 2);
    CHECK(first.text.starts_with("error: "));
    CHECK_THAT(first.text, ContainsSubstring("--no-such-option"));
    CHECK(first.text.find('\n') == first.text.size() - 1);
    table.push_back({each.name, with({each.valued + "=", "X"}), each.valued + "=: the value is empty"});
    table.push_back({each.name, with({each.valued, ""}), each.valued + ": the value is empty"});
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
      {"mnist", {"--nproc", "1", "--save", "/absent/x"}, "--save: cannot save to '/absent/x'", remedy},
      {"ddp_main", {"--save", "/absent/x"}, "--save: cannot save to '/absent/x'", remedy},
      {"ddp_gpus", {"--nproc", "1", "--save", "/absent/x"}, "--save: cannot save to '/absent/x'", remedy},
      {"origin_main", {"--save", "/absent/x"}, "--save: cannot save to '/absent/x'", remedy},
      {"origin_main", {"--save", "/tmp"}, "--save: cannot save to '/tmp': it is a folder", "give the name"},
      {"multigpu_torchrun",
       {"1", "1", "--nproc", "1", "--snapshot_path", "/absent/x"},
       "--snapshot_path: cannot save to '/absent/x'",
       remedy},
      {"average_gradients",
       {"--nproc", "1", "--plot", "/absent/x.svg"},
       "--plot: cannot save to '/absent/x.svg'",
       remedy},
      {"ddp_toy",
       {"--cpu-devices", "2", "--checkpoint", "/absent/x"},
       "--checkpoint: cannot save to '/absent/x'",
       remedy},
      {"ddp_toy",
       {"checkpoint", "--nproc", "1", "--checkpoint", "/absent/x"},
       "--checkpoint: cannot save to '/absent/x'",
       remedy},
      {"libtorch_dcgan", {"--save-dir", "/absent"}, "--save-dir", "/absent; see --help"},
      {"libtorch_dcgan",
       {"--data-dir", "/tmp", "--save-dir", "/proc"},
       "--save-dir: cannot save to '/proc/",
       remedy},
      {"libtorch_dcgan_ddp",
       {"--nproc", "1", "--data-dir", "/tmp", "--save-dir", "/proc"},
       "--save-dir: cannot save to",
       remedy},
      {"imagenet", {"--nproc", "1", "--save-dir", "/absent"}, "--save-dir: cannot save to '/absent/", remedy},
  };
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
      {"average_gradients", {"processes", "--port", "2"}, "--port: processes does not use it"},
      {"average_gradients", {"--port", "2"}, "--port: train does not use it"},
      {"average_gradients", {"--compare", "--plot", "x.svg"}, "--plot: --compare does not use it"},
      {"average_gradients", {"group", "--prefix", "always"}, "--prefix, --timeout: group does not use them"},
      {"ddp_toy", {"basic", "--checkpoint", "x"}, "--checkpoint: basic does not use it"},
      {"ddp_toy", {"checkpoint", "--port", "2"}, "--port: checkpoint does not use it"},
      {"ddp_toy", {"--timeout", "9"}, "--prefix, --timeout: without a demo they have no use"},
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
  CHECK_THAT(refusal({"--learning-speed", "3"}), ContainsSubstring("--learning-speed"));
  CHECK_THAT(refusal({"stray"}), ContainsSubstring("stray"));
  CHECK_THAT(refusal({"--batch-size", "0"}), ContainsSubstring("--batch-size"));
  CHECK_THAT(refusal({"--batch_size=0"}), ContainsSubstring("--batch-size"));
  CHECK_THAT(refusal({"--epochs", "-1"}), ContainsSubstring("--epochs"));
  CHECK_THAT(refusal({"-e", "three"}), ContainsSubstring("--epochs"));
  CHECK_THAT(refusal({"--epochs"}), ContainsSubstring("--epochs"));
  CHECK_THAT(refusal({"--workers", "-2"}), ContainsSubstring("--workers"));
  for (const std::string rate : {"fast", "-1", "inf", "1e-4x", "1e400"})
    CHECK_THAT(refusal({"--lr", rate}), ContainsSubstring("--lr"));
  CHECK_THAT(refusal({"--lr", "nan"}), ContainsSubstring("--lr: nan is not a number"));
  CHECK_THAT(refusal({"--gpu", "all"}), ContainsSubstring("'all' is not a list of device numbers"));
}

TEST_CASE("numbers that are too large are refused, not made smaller", "[.release]") {
  const auto refused = [](const std::string& flag, const std::string& number) {
    CHECK_THAT(refusal({flag, number}), ContainsSubstring(flag));
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
