// The character-level GPT: its lines, its configuration, its snapshots.
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "examples/output.hpp"
#include "lockstep/files.hpp"
#include "support/temporary_folder.hpp"

namespace mingpt_test {

using namespace lockstep_test;

namespace {

using Words = std::vector<std::string>;

// A model so small that an epoch takes a moment, and a folder for its snapshot.
Words command(const TemporaryFolder& folder, const Words& more) {
  return joined({test_program("mingpt"), "--nproc", "2", "--config", (folder / "t.toml").string(),
                 "trainer_config.snapshot_path=" + (folder / "s.pt").string()},
                more);
}

void write_settings(const TemporaryFolder& folder) {
  folder.write("t.toml",
               "[gpt_config]\nn_layer = 1\nn_head = 2\nn_embd = 16\n[data_config]\nblock_size = 16\ntruncate "
               "= 0.3\n[trainer_config]\nbatch_size = 16\n[sample_config]\nnumber = 1\nlength = 20\n");
}

std::string train(const TemporaryFolder& folder, const Words& more) {
  return out_of(command(folder, more));
}

void refused(const Words& more, const std::string& why) {
  check_refused(joined({test_program("mingpt")}, more), why);
}

}  // namespace

TEST_CASE("mingpt prints the tutorial's lines, learns and generates text") {
  const TemporaryFolder folder;
  write_settings(folder);
  const std::string out = train(folder, {"trainer_config.max_epochs=3", "trainer_config.log_every=50"});
  INFO(out);
  CHECK(
      out.starts_with("Data has 3007 characters, 29 unique.\nnumber of parameters: 0.00M\nSnapshot not "
                      "found. Training model from scratch\n"));
  for (const std::string line :
       {"[RANK0] Epoch 1 | Iter 0 | Train Loss 3.", "[RANK0] Epoch 3 | Iter 50 | Train",
        "\n[RANK1] Epoch 3 | Iter 50 | Train", "\nSnapshot saved at epoch 3\n"})
    CHECK(count(out, line) == 1);
  CHECK(count(out, "[rank ") == 0);
  CHECK(count(out, "Snapshot saved") == 1);
  CHECK(count(out, "Snapshot not found") == 1);
  const std::string number = "([0-9]+\\.[0-9]{5})\n", mean = "([0-9]+\\.[0-9]{5}) \\| [0-9]+ tokens/s\n";
  CHECK(number_in(out, "RANK0\\] Epoch 1 \\| Iter 0 \\| Train Loss " + number) > 3.2);  // ln(29) is 3.37
  CHECK(number_in(out, "\nEpoch 3 \\| Train Loss " + mean) < 2);
  CHECK(number_in(out, "\nEpoch 3 \\| Eval Loss " + number) < 2);
  const auto sample = out.find("--- sample 1 ---\n");
  REQUIRE(sample != std::string::npos);
  CHECK(out.size() - sample == std::string("--- sample 1 ---\n").size() + 21 + 1);
}

TEST_CASE("mingpt resumes after a kill and after a stop, with the losses of an uninterrupted run") {
  const TemporaryFolder folder, whole;
  write_settings(folder);
  write_settings(whole);
  const Words every{"trainer_config.save_every=2", "trainer_config.max_epochs=1000"};
  const auto started = [&] { return start(command(folder, every), {{"OMP_NUM_THREADS", "1"}}); };
  int saved = 0;
  {
    Process killed = started();
    REQUIRE(killed.wait_for_output("Snapshot saved at epoch 2"));
    killed.signal(SIGKILL);
    REQUIRE(killed.wait());
    CHECK(processes_left(killed.marker()) == 0);
    // It may have come further before the signal did.
    saved = 2 * count(killed.out(), "Snapshot saved at epoch ");
  }

  // A batch system's signal: the ranks save after the same step, in the middle of an epoch.
  Process stopped = started();
  REQUIRE(stopped.wait_for_output("[RANK0] Epoch "));
  stopped.signal(SIGTERM);
  REQUIRE(stopped.wait());
  INFO(stopped.out() << stopped.error());
  CHECK(stopped.exit_code() == 75);
  CHECK(count(stopped.error(), "\n") == 1);
  const auto next =
      static_cast<int>(number_in(stopped.out(), "Resuming training from snapshot at Epoch ([0-9]+)\n"));
  CHECK((next == saved + 1 || next == saved + 3));
  CHECK(count(stopped.out(), "[RANK0] Epoch " + std::to_string(next) + " | Iter 0 |") == 1);

  const std::string last = std::to_string(saved + 5), reports = (folder / "new/reports").string();
  const Words epochs{"trainer_config.save_every=1000", "trainer_config.max_epochs=" + last};
  const std::string resumed = train(folder, {epochs[0], epochs[1], "trainer_config.report_dir=" + reports});
  INFO(resumed);
  CHECK(count(resumed, "Snapshot not found") == 0);
  CHECK(count(resumed, "Resuming training from snapshot at Epoch ") == 1);
  CHECK(count(resumed, "[RANK0] Epoch " + std::to_string(next) + " | Iter 0 |") == 0);

  const std::string uninterrupted = train(whole, epochs);
  const auto end = [&](const std::string& out) {
    const auto at = out.find("\nEpoch " + last + " | Eval Loss ");
    REQUIRE(at != std::string::npos);
    return out.substr(at);
  };
  CHECK(end(resumed) == end(uninterrupted));  // the last loss and the generated text

  // The page, the table and TensorBoard's events of the resumed part.
  std::string events;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(reports)) {
    ++files;
    if (entry.path().filename().string().starts_with("events.out.tfevents"))
      events = lockstep::read_file(entry.path());
  }
  CHECK(files == 3);
  CHECK(count(events, "eval/loss") >= 1);
  CHECK(count(events, "train/loss") >= 1);
  const std::string rows = lockstep::read_file(reports + "/metrics.csv");
  const int epochs_left = saved + 5 - next + 1;
  CHECK(count(rows, ",epoch,") == 1 + epochs_left);  // the header names the column
  CHECK(count(rows, ",eval/loss,") == epochs_left);
  CHECK(count(rows, ",scalar,," + std::to_string(85 * (saved + 5) - 1) + ",,,,,,eval/loss,") == 1);

  // An epoch has 2,690 windows of 16 characters, 1,345 a rank. Only those after the stop count: a rate times
  // its seconds is a number of tokens.
  const auto stopped_after =
      static_cast<int>(number_in(stopped.error(), "stopped after step ([0-9]+),")) % 85;
  const auto tokens = [&](int epoch) {
    const std::string which = std::to_string(epoch);
    const double rate =
        number_in(resumed, "\nEpoch " + which + " \\| Train Loss [0-9.]+ \\| ([0-9]+) tokens");
    return rate * number_in(rows, ",epoch," + std::to_string(epoch - 1) + ",[0-9]+,[^,]*,,,([0-9.e+-]+),");
  };
  CHECK(tokens(next) == Approx((1345 - 16 * stopped_after) * 16 * 2).epsilon(0.01));
  CHECK(tokens(next + 1) == Approx(1345 * 16 * 2).epsilon(0.01));
}

TEST_CASE("mingpt.toml holds the original's settings, over which those of the command line win") {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += "abcdefg"[i % 7];
  const auto first_lines = [&](const Words& more) {
    return out_of(
        joined({test_program("mingpt"), "--nproc", "1", "--config", test_program("mingpt.toml"),
                "--data-path", folder.write("text", text).string(), "trainer_config.max_epochs=0",
                "trainer_config.snapshot_path=" + (folder / "s.pt").string(), "sample_config.number=0"},
               more));
  };
  const std::string scratch = "Snapshot not found. Training model from scratch\n";
  CHECK(first_lines({}) == "Data has 1000 characters, 7 unique.\nnumber of parameters: 25.22M\n" + scratch);
  CHECK(first_lines({"data_config.truncate=0.5", "gpt_config.n_layer=1"}) ==
        "Data has 10000 characters, 7 unique.\nnumber of parameters: 3.15M\n" + scratch);
}

TEST_CASE("mingpt trains in mixed precision and reads its snapshot again", "[.release]") {
  const TemporaryFolder folder;
  write_settings(folder);
  const Words amp{"trainer_config.use_amp=true", "trainer_config.save_every=1"};
  const std::string out = train(folder, {amp[0], amp[1], "trainer_config.max_epochs=1"});
  CHECK(number_in(out, "\nEpoch 1 \\| Train Loss ([0-9.]+)") < 3.2);
  CHECK(count(train(folder, {amp[0], amp[1], "trainer_config.max_epochs=2"}),
              "Resuming training from snapshot at Epoch 2\n") == 1);
}

TEST_CASE("mingpt trains in bfloat16", "[.release]") {
  const TemporaryFolder folder;
  write_settings(folder);
  const auto losses = [&](const Words& amp) {
    return train(folder, joined({"data_config.truncate=0.1", "trainer_config.max_epochs=1",
                                 "trainer_config.save_every=2", "trainer_config.log_every=1",
                                 "sample_config.number=0"},
                                amp));
  };
  const std::string first = "RANK0\\] Epoch 1 \\| Iter 0 \\| Train Loss ([0-9.]+)",
                    mean = "\nEpoch 1 \\| Train Loss ([0-9.]+)";
  const auto bf16 = losses({"trainer_config.use_amp=true", "trainer_config.amp_dtype=bfloat16"});
  const auto fp32 = losses({});
  CHECK(number_in(bf16, mean) < number_in(bf16, first));
  CHECK(number_in(bf16, mean) != number_in(fp32, mean));  // other roundings, about the same losses
  CHECK(std::abs(number_in(bf16, mean) - number_in(fp32, mean)) < 0.05);
}

TEST_CASE("a configuration that is wrong is refused on one line") {
  const TemporaryFolder folder;
  const auto file = [&](const std::string& text, const std::string& why) {
    refused({"--config", folder.write("wrong.toml", text).string()}, why);
  };
  file("[trainer_config]\nmax_epochs = \n", "wrong.toml, line 2");
  file("[trainer_config]\nepochs = 3\n", "wrong.toml, line 2: there is no key trainer_config.epochs;");
  file("[hydra]\nrun.dir = 'x'\n", "there is no key hydra.run.dir;");
  file("[trainer_config]\nbatch_size = 'many'\n", "trainer_config.batch_size takes a whole number from 1");
}

TEST_CASE("an override that is wrong is refused on one line") {
  for (const auto& [word, why] : std::vector<std::pair<std::string, std::string>>{
           {"trainer_config.epochs=3", "trainer_config.epochs=3: there is no key trainer_config.epochs;"},
           {"trainer_config.max_epochs=-1", "trainer_config.max_epochs takes a whole number from 0"},
           {"trainer_config.max_epochs=1.5", "trainer_config.max_epochs takes a whole number from 0"},
           {"gpt_config.attn_pdrop=nan", "gpt_config.attn_pdrop takes a number from 0 to 1;"},
           {"trainer_config.use_amp=1", "trainer_config.use_amp takes true or false;"},
           {"stray", "stray: write an override as section.key=value;"},
           {"gpt_config.n_embd=65", "n_embd 65 is no multiple of n_head 4"},
           {"trainer_config.amp_dtype=int8", "give float16 or bfloat16"},
           {"data_config.path=", "data_config.path=: the value is empty"}})
    refused({word}, why);
  for (const std::string path : {"/absent", "/tmp"})
    refused({"--data-path", path}, "error: --data-path, data_config.path: '" + path + "' holds no text");
}

TEST_CASE("mingpt says what a snapshot of another model or of other settings means", "[.release]") {
  const TemporaryFolder folder;
  write_settings(folder);
  train(folder, {"data_config.truncate=0.1", "trainer_config.max_epochs=1", "trainer_config.save_every=1"});
  const std::string snapshot = "trainer_config.snapshot_path=" + (folder / "s.pt").string();
  const auto refuses = [](const Words& more, const std::string& why) {
    const Ended ended = run_example(joined({test_program("mingpt")}, more));
    CHECK(ended.code == 2);
    CHECK(count(ended.error, "\n") == 1);
    CHECK_THAT(ended.error, ContainsSubstring(" bytes): " + why));
    CHECK(ended.error.ends_with("; remove it, or set trainer_config.snapshot_path to another file\n"));
  };
  refuses({"--nproc", "1", snapshot}, "it does not fit the model: missing \"blocks.1.ln1.weight\", ");
  // The same characters, in another text of the same length, and in a longer one.
  const TemporaryFolder texts;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "abcdefgh"[(i * i + i / 3) % 8];
  const std::string reversed(text.rbegin(), text.rend());
  const auto with = [&](const std::string& content) {
    return Words{"--data-path",
                 texts.write("text", content).string(),
                 "--config",
                 (folder / "t.toml").string(),
                 "data_config.truncate=1",
                 "trainer_config.max_epochs=1",
                 "trainer_config.save_every=1",
                 "trainer_config.snapshot_path=" + (texts / "s.pt").string()};
  };
  REQUIRE(run_example(joined({test_program("mingpt")}, with(text))).code == 0);
  for (const std::string& other : {reversed, text + text})
    refuses(with(other), "it is of a run on another text, or on another part of it");

  const Ended resumed =
      run_example(command(folder, {"data_config.truncate=0.1", "trainer_config.max_epochs=1",
                                   "optimizer_config.learning_rate=0.5", "optimizer_config.weight_decay=0"}));
  INFO(resumed.out);
  CHECK(resumed.code == 0);
  CHECK(resumed.error ==
        "warning: optimizer_config.learning_rate=0.5 and weight_decay=0 have no effect: the snapshot has "
        "0.003 and 0.1\n");
}

}  // namespace mingpt_test
