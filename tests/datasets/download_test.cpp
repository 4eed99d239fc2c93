#include "lockstep/datasets/download.hpp"

#include <fstream>

#include "support/catch.hpp"
#include "support/process.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_of.hpp"

namespace download_test {

using lockstep::DataError;

TEST_CASE("a download is checked and has its name only when whole") {
  const TemporaryFolder mirror, empty, target;
  mirror.write("file", "twelve bytes");
  std::vector<lockstep::RemoteFile> files{{"file", 12}};
  std::vector<std::string> said;
  const auto say = [&](const std::string& text) { said.push_back(text); };
  const auto url = [](const TemporaryFolder& folder) { return "file://" + folder.path().string(); };
  const auto fault = [&](const std::vector<std::string>& mirrors) {
    return text_of<DataError>([&] { lockstep::download_files(target.path(), files, mirrors, say); });
  };
  if (std::system("curl --version > /dev/null 2>&1") != 0) {
    WARN("SKIPPED: no curl to fetch file:// with");
    return;
  }

  SECTION("the second mirror serves where the first does not, and what is there is not fetched again") {
    CHECK(fault({url(empty), url(mirror)}).empty());
    CHECK(said.size() == 2);
    CHECK(std::filesystem::file_size(target / "file") == 12);
    CHECK(fault({url(empty)}).empty());
    CHECK(said.size() == 2);
  }
  SECTION("a file cut short is refused") {
    mirror.write("file", "twelve");
    target.write("file", "kept");
    target.write("file.lockstep.tmp", "left by a killed process");
    CHECK_FALSE(fault({url(mirror)}).empty());
    CHECK(std::filesystem::file_size(target / "file") == 4);
    CHECK(target.files() == 1);
  }
  SECTION("the error names the file, every mirror and the way out") {
    const auto text = fault({url(empty), "http://127.0.0.1:9/mnist"});
    for (const std::string& words : {std::string("file could not be downloaded"), url(empty),
                                     std::string("127.0.0.1:9"), std::string("by other means")})
      CHECK_THAT(text, ContainsSubstring(words));
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

namespace {

// Without a home, so that the cache lies in the folder for temporary files.
struct NoHome {
  NoHome() {
    for (const char* name : {"XDG_CACHE_HOME", "HOME"}) unsetenv(name);
    setenv("TMPDIR", temporary.path().c_str(), 1);
  }
  ~NoHome() {
    unsetenv("TMPDIR");
    if (!home.empty()) setenv("HOME", home.c_str(), 1);
  }
  std::string home = std::getenv("HOME") ? std::getenv("HOME") : "";
  TemporaryFolder temporary;
  std::filesystem::path cache = temporary / fmt::format("lockstep-{}", ::geteuid());
};

}  // namespace

TEST_CASE("a cache among temporary files is this user's alone, or refused") {
  namespace fs = std::filesystem;
  const NoHome none;
  const auto refused = [&] {
    CHECK_THAT(text_of<DataError>([] { lockstep::cache_folder(); }),
               ContainsSubstring("set XDG_CACHE_HOME to a folder of your own"));
  };
  SECTION("a new one is for this user alone, and found again") {
    CHECK(lockstep::cache_folder() == none.cache);
    CHECK(fs::status(none.cache).permissions() == fs::perms::owner_all);
    CHECK(lockstep::cache_folder() == none.cache);
  }
  SECTION("a link") {
    fs::create_directory(none.temporary / "elsewhere");
    fs::create_directory_symlink(none.temporary / "elsewhere", none.cache);
    refused();
  }
  SECTION("a link to nothing") {
    fs::create_directory_symlink(none.temporary / "absent", none.cache);
    refused();
    CHECK_FALSE(fs::exists(none.temporary / "absent"));
  }
  SECTION("a file") {
    std::ofstream(none.cache) << "file";
    refused();
  }
  SECTION("open to others") {
    fs::create_directory(none.cache);
    fs::permissions(none.cache, fs::perms(0755));
    refused();
  }
  SECTION("of another user") {
    fs::create_directory(none.cache);
    if (chown(none.cache.c_str(), ::geteuid() + 1, static_cast<gid_t>(-1)) != 0) {
      WARN("SKIPPED: only root can give a folder to another user");
      return;
    }
    refused();
  }
  SECTION("no folder for temporary files") {
    setenv("TMPDIR", (none.temporary / "absent").c_str(), 1);
    refused();
  }
}

TEST_CASE("a home's cache of another user is not taken for this one's") {
  const NoHome none;
  const TemporaryFolder home;
  setenv("HOME", home.path().c_str(), 1);
  CHECK(lockstep::cache_folder() == home / ".cache/lockstep");
  if (chown((home / ".cache/lockstep").c_str(), ::geteuid() + 1, static_cast<gid_t>(-1)) != 0) {
    WARN("SKIPPED: only root can give a folder to another user");
    return;
  }
  CHECK(lockstep::cache_folder() == none.cache);
}

}  // namespace download_test
