#include "lockstep/train/checkpoint.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <torch/torch.h>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/train/detail/run_checkpoint.hpp"
#include "support/refuses.hpp"
#include "support/temporary_folder.hpp"
#include "train/nets.hpp"

namespace checkpoint_test {

namespace {

namespace fs = std::filesystem;
using lockstep::CheckpointError;

bool equal(TinyNet& a, TinyNet& b) {
  for (std::size_t i = 0; i < a->parameters().size(); ++i)
    if (!torch::equal(a->parameters()[i], b->parameters()[i])) return false;
  for (std::size_t i = 0; i < a->buffers().size(); ++i)
    if (!torch::equal(a->buffers()[i], b->buffers()[i])) return false;
  return true;
}

struct RunWithoutParts {
  lockstep::LocalComm comm{lockstep::World()};
  void each_more(const auto& /*visit*/) const {}
};

}  // namespace

TEST_CASE("a saved model is read by torch::load, and torch::save's by load_model") {
  const TemporaryFolder folder;
  TinyNet saved, read, loaded;
  saved->forward(torch::randn({5, 6}));  // gives the running statistics a value
  REQUIRE(!equal(saved, read));
  lockstep::save_model(*saved, folder / "a.pt");
  torch::load(read, folder / "a.pt");
  CHECK(equal(saved, read));

  torch::save(saved, folder / "b.pt");
  const auto* storage = loaded->hidden->weight.const_data_ptr();
  lockstep::load_model(*loaded, folder / "b.pt");
  CHECK(equal(saved, loaded));
  CHECK(loaded->hidden->weight.const_data_ptr() ==
        storage);  // what optimizers and buckets hold stays what it was
  CHECK(loaded->hidden->weight.requires_grad());
  CHECK(folder.files() == 2);
}

TEST_CASE("a model that does not fit is left as it was, and each tensor that does not fit is named") {
  const TemporaryFolder folder;
  TinyNet saved;
  lockstep::save_model(*saved, folder / "net.pt");

  const auto refused = [&](torch::nn::Module& model, const std::string& words) {
    refuses<CheckpointError>([&] { lockstep::load_model(model, folder / "net.pt"); }, words);
  };
  TinyNet other(6, 5), wide;
  const auto before = other->hidden->weight.clone();
  refused(*other,
          R"(the model: "last.weight" is [3, 8] float32 in the file and [5, 8] float32 in the model; )"
          R"("last.bias" is [3] float32 in the file and [5] float32 in the model)");
  CHECK(torch::equal(other->hidden->weight, before));
  wide->to(torch::kDouble);
  refused(*wide, R"("hidden.weight" is [8, 6] float32 in the file and [8, 6] float64 in the model)");
  torch::nn::Sequential unlike(torch::nn::Linear(6, 8));
  refused(*unlike, R"(missing "0.weight", "0.bias"; unexpected "hidden.weight")");
  torch::nn::Linear bare(6, 8);
  refused(*bare, R"(missing "weight", "bias")");
}

TEST_CASE("models with parts that have nothing to save are saved and loaded") {
  const TemporaryFolder folder;
  auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(2, 3), torch::nn::ReLU(),
                                 torch::nn::Functional(torch::tanh), torch::nn::Linear(3, 1));
  };
  auto saved = make(), loaded = make();
  lockstep::save_model(*saved, folder / "net.pt");
  lockstep::load_model(*loaded, folder / "net.pt");
  const auto x = torch::randn({4, 2});
  CHECK(torch::equal(saved->forward(x), loaded->forward(x)));
}

TEST_CASE("files that are no model are refused in words") {
  const TemporaryFolder folder;
  TinyNet net;
  const auto path = folder / "net.pt";
  const auto refused = [&](const char* words) {
    refuses<CheckpointError>([&] { lockstep::load_model(*net, path); }, words);
  };
  refused("net.pt': No such file");
  for (const std::string content : {"no model at all", "PK\3\4", "PK\5\6 and twenty more bytes"}) {
    std::ofstream(path) << content;
    refused("net.pt");
  }
  lockstep::save_model(*net, path);
  fs::resize_file(path, fs::file_size(path) / 2);
  refused("cut short");
}

TEST_CASE("a path that is no file with a content is refused at once") {
  const TemporaryFolder folder;
  TinyNet net;
  const auto refused = [&](const fs::path& path, const std::string& kind) {
    refuses<CheckpointError>([&] { lockstep::load_model(*net, path); },
                             "could not read '" + path.string() + "': it is " + kind);
  };
  refused(folder.write("nothing", ""), "empty");
  refused(folder.path(), "a folder");
  refused("/dev/zero", "a device");
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  refused(folder / "pipe", "a pipe");
  fs::create_symlink("pipe", folder / "link");
  refused(folder / "link", "a pipe");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string socket_path = folder / "socket";
  REQUIRE(socket_path.size() < sizeof address.sun_path);
  std::copy(socket_path.begin(), socket_path.end(), address.sun_path);
  const lockstep::detail::Descriptor listener(::socket(AF_UNIX, SOCK_STREAM, 0));
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  refused(socket_path, "a socket");
}

TEST_CASE("a flipped bit anywhere in a file is refused, or changes nothing that is loaded") {
  // Compressed records too: LibTorch compresses the description of larger modules.
  torch::nn::Sequential saved(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 3));
  saved->forward(torch::randn({4, 6}));  // so that no buffer is zero
  const std::string whole = lockstep::serialize_model(*saved);
  auto read = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(saved->clone());
  std::size_t refused = 0;
  const auto loads_changed = [&](const std::string& bytes) {
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : read->parameters()) parameter.zero_();
      for (auto& buffer : read->buffers()) buffer.zero_();
    }
    try {
      lockstep::deserialize_model(*read, bytes, "flipped.pt");
    } catch (const CheckpointError&) {
      ++refused;
      return false;
    }
    for (std::size_t i = 0; i < read->parameters().size(); ++i)
      if (!torch::equal(read->parameters()[i], saved->parameters()[i])) return true;
    for (std::size_t i = 0; i < read->buffers().size(); ++i)
      if (!torch::equal(read->buffers()[i], saved->buffers()[i])) return true;
    return false;
  };
  REQUIRE(!loads_changed(whole));
  REQUIRE(refused == 0);
  std::vector<std::size_t> bad;
  for (std::size_t offset = 0; offset < whole.size(); offset += 3) {
    std::string flipped = whole;
    flipped[offset] = static_cast<char>(flipped[offset] ^ 1 << offset % 8);
    if (loads_changed(flipped)) bad.push_back(offset);
  }
  CHECK(bad.empty());
  CHECK(refused > whole.size() / 6);  // the rest are paddings, dates and the like
}

TEST_CASE("a file that is cut short anywhere, or goes on after its end, is refused") {
  TinyNet net;
  const std::string whole = lockstep::serialize_model(*net);
  std::vector<std::size_t> bad;
  for (std::size_t length = 0; length < whole.size(); length += 1 + (length % 64 == 0 ? 0 : 3))
    if (text_of<CheckpointError>([&] {
          lockstep::deserialize_model(*net, std::string_view(whole).substr(0, length), "cut.pt");
        }).empty())
      bad.push_back(length);
  CHECK(bad.empty());
  refuses<CheckpointError>([&] { lockstep::deserialize_model(*net, whole + "x", "long.pt"); }, "end record");
}

TEST_CASE("a damaged record is named, with where it is") {
  TinyNet net;
  std::string bytes = lockstep::serialize_model(*net);
  const auto weight = net->hidden->weight;
  const std::string_view content(static_cast<const char*>(weight.const_data_ptr()), weight.nbytes());
  const std::size_t at = bytes.find(content);
  REQUIRE(at != std::string::npos);
  bytes[at + 3] = static_cast<char>(bytes[at + 3] ^ 0x40);  // an exponent
  refuses<CheckpointError>(
      [&] { lockstep::deserialize_model(*net, bytes, "net.pt"); },
      fmt::format("'net.pt' ({} bytes): it is damaged or cut short at offset {}", bytes.size(), at));
}

TEST_CASE("CRC-32 and CRC-32C have the check values of their definitions") {
  CHECK(lockstep::detail::crc32("123456789") == 0xCBF43926);
  CHECK(lockstep::detail::crc32c("123456789") == 0xE3069283);
}

TEST_CASE("a record that is a folder with content, or does not have the size of its content, is refused") {
  TinyNet net;
  const std::string whole = lockstep::serialize_model(*net);
  const auto refused = [&](std::size_t offset, char bits, const char* words) {
    std::string bytes = whole;
    // Of the directory's entry of data/1.
    const std::size_t entry = bytes.rfind("PK\1\2", bytes.rfind("/data/1"));
    bytes[entry + offset] = static_cast<char>(bytes[entry + offset] ^ bits);
    refuses<CheckpointError>([&] { lockstep::deserialize_model(*net, bytes, "net.pt"); }, words);
  };
  refused(38, 0x10, "of record 'data/1' do not fit into it");
  refused(24, 1, "damaged");
}

TEST_CASE(
    "records that overlap or have one name, or are larger than the file, are refused before they are read") {
  const auto number = [](std::uint64_t value, int bytes) {
    std::string text;
    for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> 8 * i & 0xFF);
    return text;
  };
  const std::string data(1 << 20, '\1');
  struct Record {
    std::string sizes, local;
  };
  const auto record = [&](const std::string& name, const std::string& content, std::uint64_t size,
                          int method) {
    const std::string sizes = number(method, 2) + number(0, 4) + number(lockstep::detail::crc32(content), 4) +
                              number(content.size(), 4) + number(size, 4) + number(name.size(), 2);
    return Record{sizes, "PK\3\4" + number(20, 2) + number(0, 2) + sizes + number(0, 2) + name + content};
  };
  // A ZIP of a version, one record and room for another, with a directory that has these names for the record.
  const auto archive = [&](const std::vector<std::string>& names, std::uint64_t size, int method = 0) {
    const Record version = record("a/version", "3\n", 2, 0), other = record(names[0], data, size, method);
    const auto entry = [&](const Record& of, const std::string& name, std::size_t offset) {
      return "PK\1\2" + number(20, 2) + number(20, 2) + number(0, 2) + of.sizes + std::string(12, '\0') +
             number(offset, 4) + name;
    };
    std::string directory = entry(version, "a/version", 0);
    for (const std::string& name : names) directory += entry(other, name, version.local.size());
    const std::string local = version.local + other.local + std::string(data.size(), ' ');
    return local + directory + "PK\5\6" + number(0, 4) + number(names.size() + 1, 2) +
           number(names.size() + 1, 2) + number(directory.size(), 4) + number(local.size(), 4) + number(0, 2);
  };
  const auto refused = [](const std::string& bytes, const char* words) {
    refuses<CheckpointError>([&] { lockstep::detail::check_archive(bytes); }, words);
  };
  CHECK_NOTHROW(lockstep::detail::check_archive(archive({"a/b0"}, data.size())));
  refused(archive({"a/b0", "a/b0"}, data.size()), "the record 'b0' twice");
  refused(archive({"a/b0", "a/b1"}, data.size()), "the record 'b1' overlaps another");
  std::vector<std::string> many;
  for (int i = 10'000; i < 40'000; ++i) many.push_back("a/b" + std::to_string(i));
  refused(archive(many, data.size()), "");
  refused(archive({"a/b0"}, std::uint64_t{1} << 30, /*deflated=*/8), "do not fit into it");
}

TEST_CASE("values of torch.load that a state dict does not need are None, and others are refused") {
  const auto read = [](const std::string& value) {
    const std::string pickle =
        "\x80\x02}(X\1" + std::string(3, '\0') + "a}X\1" + std::string(3, '\0') + "b" + value + "su.";
    std::string bytes;
    caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, std::size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    archive.writeRecord("data.pkl", pickle.data(), pickle.size());
    archive.writeEndOfFile();
    return lockstep::unpickle_state(bytes, "a.pt").toGenericDict().at("a").toGenericDict().at("b").isNone();
  };
  for (const char* value :
       {"ctorch\nfloat8_e4m3fn\n", "ctorch._utils\n_rebuild_tensor_v3\n)R", "\x8a\t123456789",
        "ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNNtR", "ctorch._utils\n_rebuild_qtensor\n)R"}) {
    CAPTURE(value);
    CHECK(read(value));
  }
  CHECK_THROWS_AS(read("cos\nsystem\n"), CheckpointError);
}

TEST_CASE("a file that cannot be written whole leaves what was there, and nothing beside it") {
  const TemporaryFolder folder;
  const auto path = folder / "net.pt";
  lockstep::write_file_atomically(path, "what was there");

  SECTION("no room") {
    // As on a full disk, write() fails after some bytes.
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit few{1000, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &few);
    refuses<CheckpointError>([&] { lockstep::write_file_atomically(path, std::string(5000, 'x')); },
                             "File too large");
    ::setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
  }
  SECTION("no folder") {
    CHECK_THROWS_AS(lockstep::write_file_atomically(folder / "no" / "net.pt", "x"), CheckpointError);
  }
  SECTION("a folder in its place") {
    fs::create_directory(folder / "taken");
    CHECK_THROWS_AS(lockstep::write_file_atomically(folder / "taken", "x"), CheckpointError);
    fs::remove(folder / "taken");
  }
  CHECK(lockstep::read_file(path) == "what was there");
  CHECK(folder.files() == 1);
  lockstep::write_file_atomically(path, "new");
  CHECK(lockstep::read_file(path) == "new");
}

TEST_CASE("whether a path can be written is known beforehand, and asking changes nothing") {
  const TemporaryFolder folder;
  const auto path = folder / "net.pt";
  CHECK_NOTHROW(lockstep::require_writable(path));
  CHECK(folder.files() == 0);
  lockstep::write_file_atomically(path, "kept");
  CHECK_NOTHROW(lockstep::require_writable(path));
  CHECK(lockstep::read_file(path) == "kept");

  auto refused = [](const fs::path& where, const char* why) {
    refuses<lockstep::UsageError>([&] { lockstep::require_writable(where); }, why);
  };
  refused("", "no file name");
  refused(folder.path(), "it is a folder");
  refused(folder / "no" / "net.pt", "No such file or directory");
  refused(path / "net.pt", "Not a directory");
  refused("/proc/net.pt", "/proc/net.pt");
}

TEST_CASE("what is no file is refused and stays what it is") {
  const TemporaryFolder folder;
  const auto pipe = folder / "pipe", link = folder / "link";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  fs::create_symlink("pipe", link);
  for (const auto& path : {pipe, link}) {
    refuses<lockstep::UsageError>([&] { lockstep::require_writable(path); }, "it is a pipe");
    refuses<CheckpointError>([&] { lockstep::write_file_atomically(path, "x"); }, "it is a pipe");
  }
  CHECK(fs::is_fifo(pipe));
  CHECK(fs::is_symlink(link));
  CHECK(folder.files() == 2);
}

TEST_CASE("a link stays one, and the file that it leads to is replaced") {
  const TemporaryFolder folder;
  fs::create_directory(folder / "real");
  const auto file = folder / "real" / "net.pt", link = folder / "link";
  fs::create_symlink("real/middle", link);
  fs::create_symlink(file, folder / "real" / "middle");
  for (const std::string bytes : {"the file is not there yet", "and then it is"}) {
    CHECK_NOTHROW(lockstep::require_writable(link));
    lockstep::write_file_atomically(link, bytes);
    CHECK(fs::is_symlink(link));
    CHECK(fs::is_symlink(folder / "real" / "middle"));
    CHECK(fs::is_regular_file(fs::symlink_status(file)));
    CHECK(lockstep::read_file(file) == bytes);
  }
  CHECK(folder.files() == 2);

  const auto loop = folder / "loop";
  fs::create_symlink("loop", loop);
  CHECK_THROWS_AS(lockstep::require_writable(loop), lockstep::UsageError);
  CHECK_THROWS_AS(lockstep::write_file_atomically(loop, "x"), CheckpointError);
  CHECK(fs::is_symlink(loop));
}

TEST_CASE("a temporary file is a new one, whatever has its name") {
  const TemporaryFolder folder;
  const auto target = folder.write("target", "the user's"), path = folder / "net.pt";
  // Under the name of the temporary file.
  const auto plant = [&] { fs::create_symlink(target, path.string() + ".lockstep.tmp"); };
  plant();
  CHECK_NOTHROW(lockstep::require_writable(path));
  plant();
  lockstep::write_file_atomically(path, "bytes");
  CHECK(lockstep::read_file(target) == "the user's");
  CHECK(lockstep::read_file(path) == "bytes");
  CHECK(fs::is_regular_file(fs::symlink_status(path)));
  CHECK(folder.files() == 2);
}

TEST_CASE("replacing a file keeps its permissions") {
  const TemporaryFolder folder;
  const auto path = folder / "net.pt";
  lockstep::write_file_atomically(path, "one");
  for (const unsigned mode : {0600U, 0664U, 0444U}) {
    fs::permissions(path, static_cast<fs::perms>(mode));
    lockstep::write_file_atomically(path, "two");
    CHECK(static_cast<unsigned>(fs::status(path).permissions()) == mode);
  }
}

TEST_CASE("the temporary file of a killed process is removed, and that of a live one is waited for") {
  const TemporaryFolder folder;
  const auto path = folder / "net.pt", temporary = folder / "net.pt.lockstep.tmp";
  folder.write("net.pt.lockstep.tmp", "a part");
  lockstep::write_file_atomically(path, "whole");
  CHECK(lockstep::read_file(path) == "whole");
  CHECK(folder.files() == 1);

  folder.write("net.pt.lockstep.tmp", "a part");
  const int live = ::open(temporary.c_str(), O_WRONLY | O_CLOEXEC);  // as a writer holds it
  REQUIRE(::flock(live, LOCK_EX | LOCK_NB) == 0);
  std::thread writer([&] { lockstep::write_file_atomically(path, "later"); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(fs::exists(temporary));
  CHECK(lockstep::read_file(path) == "whole");
  ::close(live);
  writer.join();
  CHECK(lockstep::read_file(path) == "later");
  CHECK(folder.files() == 1);

  // Many writers at once: each file is whole.
  std::vector<std::thread> writers;
  for (char letter = 'a'; letter < 'e'; ++letter)
    writers.emplace_back([&, letter] {
      for (int i = 0; i < 5; ++i) lockstep::write_file_atomically(path, std::string(100000, letter));
    });
  for (auto& thread : writers) thread.join();
  const std::string bytes = lockstep::read_file(path);
  CHECK(bytes == std::string(100000, bytes[0]));
  CHECK(folder.files() == 1);
}

namespace parts = lockstep::detail;

TEST_CASE("a rank's state holds the generator of its device beside that of the CPU") {
  parts::RankState state;
  state.generator = parts::default_generator_state();
  const auto first = torch::rand({4});
  state.device_generator = parts::default_generator_state();  // stands for that of a GPU
  const auto second = torch::rand({4});
  const auto read = parts::RankState::read(state.bytes());
  parts::set_default_generator_state(read.generator);
  CHECK(at::equal(torch::rand({4}), first));
  parts::set_default_generator_state(read.device_generator);
  CHECK(at::equal(torch::rand({4}), second));

  // Of two ranks that go on as three, the third keeps the generators that it has.
  const std::vector<parts::RankState> both{state, state};
  CHECK(parts::state_of_rank(both, 1, 3).device_generator.defined());
  CHECK(!parts::state_of_rank(both, 2, 3).device_generator.defined());
}

TEST_CASE("a rank's state with impossible lengths is refused") {
  parts::RankState state;
  state.generator = parts::default_generator_state();
  for (const std::int64_t length : {std::int64_t{-1}, std::int64_t{1}, std::int64_t{1} << 60}) {
    torch::serialize::OutputArchive archive;
    archive.write("loss_sum", c10::IValue(1.0));
    archive.write("loss_count", c10::IValue(1.0));
    archive.write("generator", state.generator, /*is_buffer=*/true);
    archive.write("buffers", c10::IValue(length));
    CHECK_THROWS_AS(parts::RankState::read(parts::bytes_of(archive)), CheckpointError);
  }
}

TEST_CASE("a rank's state without a device reads as it was written") {
  parts::RankState state;
  state.generator = parts::default_generator_state();
  state.loss = {3, 2};
  const auto read = parts::RankState::read(state.bytes());
  CHECK(!read.device_generator.defined());
  CHECK(read.loss.sum == 3);
}

TEST_CASE("a checkpoint whose ranks have unequal numbers of own parts is refused") {
  RunWithoutParts run;
  std::vector<lockstep::detail::RankState> ranks(2);
  ranks[1].own_parts = {"of rank 1"};
  CHECK_THROWS_AS(lockstep::detail::require_own_parts(run, ranks), CheckpointError);
}

TEST_CASE("a saved list of frozen parameters that is none is refused") {
  const auto loads = [](auto frozen) {
    const lockstep::detail::RunPosition position;
    torch::serialize::OutputArchive out;
    position.save(out);
    out.write("frozen", c10::IValue(frozen));
    lockstep::detail::RunPosition read;
    torch::serialize::InputArchive in = lockstep::detail::archive_of(lockstep::detail::bytes_of(out));
    read.load(in);
    return read.frozen;
  };
  using List = std::vector<std::int64_t>;
  CHECK(loads(List{0, 2}) == List{0, 2});
  CHECK(loads(List{}) == List{});
  CHECK_THROWS_AS(loads(List{2, 0}), CheckpointError);
  CHECK_THROWS_AS(loads(List{1, 1}), CheckpointError);
  CHECK_THROWS_AS(loads(std::int64_t{3}), CheckpointError);
}

}  // namespace checkpoint_test
