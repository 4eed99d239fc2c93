#include "lockstep/datasets/mnist.hpp"

#include "lockstep/datasets/download.hpp"
#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"

namespace mnist_test {

using lockstep::DataError;
using lockstep::write_idx;

namespace {

// Four good files of few digits, for a test to spoil one of.
struct MnistFolder : TemporaryFolder {
  MnistFolder() {
    const auto train = lockstep::draw_digits(30, 1), test = lockstep::draw_digits(20, 2);
    write_idx(*this / "train-images-idx3-ubyte", train.images);
    write_idx(*this / "train-labels-idx1-ubyte", train.labels);
    write_idx(*this / "t10k-images-idx3-ubyte", test.images);
    write_idx(*this / "t10k-labels-idx1-ubyte", test.labels);
  }
  std::string fault() const {
    try {
      lockstep::load_mnist(path());
    } catch (const DataError& error) {
      return error.what();
    }
    return "none";
  }
};

std::string md5_of(std::string_view text) {
  lockstep::detail::Md5 sum;
  sum.update(text);
  return sum.hex();
}

}  // namespace

TEST_CASE("MNIST's four files become two datasets of ToTensor's values") {
  const MnistFolder folder;
  const auto mnist = lockstep::load_mnist(folder.path());
  CHECK(mnist.train.size() == 30);
  CHECK(mnist.test.size() == 20);
  const std::vector<std::size_t> indices{29, 0, 7, 7};
  const auto batch = mnist.train.get_batch(indices);
  const auto rows = torch::tensor({29, 0, 7, 7});
  const auto& digits = mnist.train.digits();
  CHECK(at::equal(batch.data, digits.images.index_select(0, rows).unsqueeze(1).to(at::kFloat).div(255)));
  CHECK(at::equal(batch.target, digits.labels.index_select(0, rows).to(at::kLong)));
  CHECK_THROWS_AS(mnist.test.get_batch(indices), DataError);
}

TEST_CASE("a folder that is not MNIST's is refused with file and reason") {
  MnistFolder folder;
  const auto digits = lockstep::draw_digits(30, 1);
  SECTION("no folder") {
    CHECK_THROWS_AS(lockstep::load_mnist(folder / "absent"), DataError);
    CHECK_THROWS_AS(lockstep::load_mnist(folder / "t10k-labels-idx1-ubyte"), DataError);
  }
  SECTION("a file missing") {
    std::filesystem::remove(folder / "t10k-labels-idx1-ubyte");
    CHECK_THAT(folder.fault(), ContainsSubstring("there is no t10k-labels-idx1-ubyte in it"));
  }
  SECTION("images where labels belong") {
    write_idx(folder / "train-labels-idx1-ubyte", digits.images);
    CHECK_THAT(folder.fault(),
               ContainsSubstring("train-labels-idx1-ubyte: offset 3: found 3 dimensions, expected "
                                 "MNIST's labels, which have 1"));
  }
  SECTION("fewer labels than images") {
    write_idx(folder / "train-labels-idx1-ubyte", digits.labels.narrow(0, 0, 29));
    CHECK_THAT(folder.fault(), ContainsSubstring("offset 4: found 29 labels, expected 30"));
  }
  SECTION("images of another size") {
    write_idx(folder / "train-images-idx3-ubyte", torch::zeros({30, 14, 28}, at::kByte));
    CHECK_THAT(folder.fault(), ContainsSubstring("offset 8: found images of 14 x 28, expected 28 x 28"));
  }
  SECTION("a label that is no digit") {
    at::Tensor labels = digits.labels.clone();
    labels[4] = 10;
    write_idx(folder / "train-labels-idx1-ubyte", labels);
    CHECK_THAT(folder.fault(), ContainsSubstring("offset 12: found label 10"));
  }
  SECTION("no digits at all") {
    write_idx(folder / "train-images-idx3-ubyte", torch::zeros({0, 28, 28}, at::kByte));
    write_idx(folder / "train-labels-idx1-ubyte", torch::zeros({0}, at::kByte));
    CHECK_THAT(folder.fault(), ContainsSubstring("found 0 images"));
  }
}

TEST_CASE("MD5 sums are those of RFC 1321") {
  CHECK(md5_of("") == "d41d8cd98f00b204e9800998ecf8427e");
  CHECK(md5_of("abc") == "900150983cd24fb0d6963f7d28e17f72");
  CHECK(md5_of("12345678901234567890123456789012345678901234567890123456789012345678901234567890") ==
        "57edf4a22be3c955ac49da2e2107b67a");
  CHECK(md5_of(std::string(1000000, 'a')) == "7707d6ae4e027c70eea2a935c2296f21");
}

TEST_CASE("a download is checked and has its name only when whole") {
  const TemporaryFolder mirror, empty, target;
  mirror.write("file", "twelve bytes");
  std::vector<lockstep::RemoteFile> files{{"file", 12, md5_of("twelve bytes")}};
  std::vector<std::string> said;
  const auto say = [&](const std::string& text) { said.push_back(text); };
  const auto url = [](const TemporaryFolder& folder) { return "file://" + folder.path().string(); };
  const auto fault = [&](const std::vector<std::string>& mirrors) {
    try {
      lockstep::download_files(target.path(), files, mirrors, say);
    } catch (const DataError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  if (std::system("curl --version > /dev/null 2>&1") != 0) {
    WARN("SKIPPED: no curl to fetch file:// with");
    return;
  }

  SECTION("the second mirror serves where the first does not, and what is there is not fetched again") {
    CHECK(fault({url(empty), url(mirror)}) == "none");
    CHECK(said.size() == 2);
    CHECK(std::filesystem::file_size(target / "file") == 12);
    CHECK(fault({url(empty)}) == "none");
    CHECK(said.size() == 2);
  }
  SECTION("a file with another sum is refused and not kept") {
    mirror.write("file", "twelve bytez");
    CHECK_THAT(fault({url(mirror)}), ContainsSubstring("MD5"));
    CHECK(std::filesystem::is_empty(target.path()));
  }
  SECTION("a file cut short is refused") {
    mirror.write("file", "twelve");
    CHECK_THAT(fault({url(mirror)}), ContainsSubstring("6 bytes instead of 12"));
    CHECK(std::filesystem::is_empty(target.path()));
  }
  SECTION("the error names the file, every mirror and the way out") {
    const auto text = fault({url(empty), "http://127.0.0.1:9/mnist"});
    CHECK_THAT(text, ContainsSubstring("file could not be downloaded") && ContainsSubstring(url(empty)) &&
                         ContainsSubstring("127.0.0.1:9") && ContainsSubstring("by other means"));
    CHECK(text.find('\n') == std::string::npos);
  }
}

TEST_CASE("a program that fetches dies with the process that started it") {
  CHECK(lockstep::detail::run_program({"no-such-program-at-all"}).code == 127);
  const auto end = lockstep::detail::run_program({"sh", "-c", "echo said >&2; exit 3"});
  CHECK(end.code == 3);
  CHECK(end.error == "said\n");
  const auto marker = lockstep_test::new_marker();
  const pid_t parent = fork();
  if (parent == 0) {
    setenv(lockstep_test::marker_variable, marker.c_str(), 1);
    lockstep::detail::run_program({"sleep", "60"});
    _exit(0);
  }
  // The first of them was forked, so that its environment in /proc is this program's: only `sleep` shows.
  for (int tries = 0; tries < 200 && lockstep_test::processes_with(marker).empty(); ++tries) usleep(10000);
  REQUIRE(lockstep_test::processes_with(marker).size() == 1);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  CHECK(lockstep_test::processes_left(marker) == 0);
}

TEST_CASE("of partial files only those that killed processes have left of this very file are removed") {
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  waitpid(gone, nullptr, 0);
  const auto long_ago = fs::file_time_type::clock::now() - std::chrono::hours(2);
  const auto make = [&](const std::string& name, bool old = true) {
    const fs::path path = folder.write(name, "content");
    if (old) fs::last_write_time(path, long_ago);
    return path;
  };
  const fs::path stale = make(fmt::format("a.gz.{}.part", gone));
  std::vector<fs::path> kept{make(fmt::format("a.gz.{}.part", getpid())),
                             make(fmt::format("video.{}.part", gone)),
                             make(fmt::format("b.gz.{}.part", gone)),
                             make(fmt::format("my.a.gz.{}.part", gone)),
                             make(fmt::format("a.gz.0{}.part", gone)),
                             make(fmt::format("a.gz.{}.part.errors", gone)),
                             make(fmt::format("a.gz.{}", gone)),
                             make("a.gz.x.part"),
                             make("a.gz.part"),
                             make("a.gz")};
  lockstep::detail::remove_stale_parts(folder / "a.gz");
  CHECK(!fs::exists(stale));
  for (const auto& path : kept) CHECK(fs::exists(path));

  make(stale.filename(), false);  // somebody may write to it
  lockstep::detail::remove_stale_parts(folder / "a.gz");
  CHECK(fs::exists(stale));
  fs::remove(stale);
  fs::create_directory(stale);
  std::ofstream(stale / "photo") << "the user's";
  fs::last_write_time(stale, long_ago);
  lockstep::detail::remove_stale_parts(folder / "a.gz");
  CHECK(fs::exists(stale / "photo"));
  fs::remove_all(stale);
  fs::create_symlink(kept.front(), stale);
  lockstep::detail::remove_stale_parts(folder / "a.gz");
  CHECK(fs::is_symlink(stale));
  lockstep::detail::remove_stale_parts(folder / "absent" / "a.gz");
}

TEST_CASE("a download leaves what is the user's alone") {
  namespace fs = std::filesystem;
  const TemporaryFolder target;
  const auto long_ago = fs::file_time_type::clock::now() - std::chrono::hours(2);
  const auto video = target.write("video.99999.part", "the user's");
  fs::create_directory(target / "photos.99998.part");
  std::ofstream(target / "photos.99998.part" / "photo") << "the user's";
  for (const fs::path& path : {video, target / "photos.99998.part"}) fs::last_write_time(path, long_ago);
  const std::vector<lockstep::RemoteFile> files{{"file", 12, md5_of("twelve bytes")}};
  CHECK_THROWS_AS(lockstep::download_files(target.path(), files, {"file:///absent"}, [](const auto&) {}),
                  DataError);
  CHECK(fs::exists(video));
  CHECK(fs::exists(target / "photos.99998.part" / "photo"));
  CHECK(target.files() == 2);
}

}  // namespace mnist_test
