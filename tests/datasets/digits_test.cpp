#include "lockstep/datasets/digits.hpp"

#include <fstream>

#include "data/counted_memory.hpp"
#include "lockstep/datasets/cache.hpp"
#include "lockstep/datasets/detail/md5.hpp"
#include "lockstep/datasets/mnist.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace digits_test {

using lockstep::DataError;

namespace {
std::string sum_of(const at::Tensor& bytes) {
  lockstep::detail::Md5 md5;
  md5.update({static_cast<const char*>(bytes.data_ptr()), bytes.nbytes()});
  return md5.hex();
}
}  // namespace

TEST_CASE("drawn digits are the same each time and other ones for another seed") {
  const auto first = lockstep::draw_digits(1234, 7), again = lockstep::draw_digits(1234, 7);
  CHECK(at::equal(first.images, again.images));
  CHECK(at::equal(first.labels, again.labels));
  CHECK_FALSE(at::equal(first.images, lockstep::draw_digits(1234, 8).images));
  // Fewer of them are the first of more, whatever the threads did.
  CHECK(at::equal(lockstep::draw_digits(55, 7).images, first.images.narrow(0, 0, 55)));
  CHECK(first.images.sizes() == at::IntArrayRef({1234, 28, 28}));
}

TEST_CASE("drawn digits are balanced, inked and unlike each other") {
  const auto digits = lockstep::draw_digits(2000, 3);
  CHECK(at::equal(digits.labels.to(at::kLong).bincount(), torch::full({10}, 200, at::kLong)));
  // A stride without shuffling still meets every class.
  CHECK(digits.labels.slice(0, 0, 2000, 2).to(at::kLong).bincount().min().item<int>() > 50);
  const at::Tensor ink = digits.images.to(at::kFloat).mean({1, 2});
  CHECK(ink.min().item<float>() > 5);
  CHECK(ink.max().item<float>() < 130);
  CHECK(
      std::get<0>(at::_unique(digits.images.to(at::kLong).mul(torch::arange(784).view({28, 28})).sum({1, 2})))
          .numel() > 1900);
}

TEST_CASE("the drawing that v1 names has not changed") {
  const auto digits = lockstep::draw_digits(100, 1);
  CHECK(sum_of(digits.labels) == "6bbbdf83c9aa0e9a90e1ef4818a00d4f");
  CHECK(sum_of(digits.images) == "efe788e4bb49a312df1ee7705138c021");
}

TEST_CASE("digits are drawn into the cache once, whole") {
  TemporaryFolder cache;
  setenv("XDG_CACHE_HOME", cache.path().c_str(), 1);
  const lockstep_test::CountedTensors memory;
  const auto folder = lockstep::drawn_digits_folder(300, 50);
  CHECK(folder.string().find(cache.path().string()) == 0);
  const auto drawing = memory.asked();
  CHECK(drawing >= 350 * 28 * 28);
  CHECK(lockstep::drawn_digits_folder(300, 50) == folder);
  CHECK(memory.asked() == drawing);  // no page was drawn on

  const auto mnist = lockstep::load_mnist(folder);
  CHECK(mnist.train.size() == 300);
  CHECK(mnist.test.size() == 50);
  // No partial file stays behind.
  CHECK(std::distance(std::filesystem::directory_iterator(folder), {}) == 4);
}

TEST_CASE("drawn files that are missing are drawn again, the others stay") {
  const TemporaryFolder folder;
  lockstep::draw_digits_into(folder.path(), 30, 20);
  folder.write("t10k-labels-idx1-ubyte", "the user's");
  std::filesystem::remove(folder / "train-labels-idx1-ubyte");
  lockstep::draw_digits_into(folder.path(), 30, 20);
  CHECK(folder.files() == 4);
  CHECK(std::filesystem::file_size(folder / "train-labels-idx1-ubyte") == 8 + 30);
  CHECK(std::filesystem::file_size(folder / "t10k-labels-idx1-ubyte") == 10);
}

TEST_CASE("a file that could not be filled is not there") {
  const TemporaryFolder folder;
  folder.write("kept", "as it was");
  for (const char* name : {"kept", "new"})
    CHECK_THROWS_WITH(lockstep::detail::make_file_whole(folder / name,
                                                        [](const std::filesystem::path& part) {
                                                          std::ofstream(part) << "half";
                                                          throw DataError("the disk is full");
                                                        }),
                      "the disk is full");
  CHECK(folder.files() == 1);
  CHECK(std::filesystem::file_size(folder / "kept") == 9);
}

TEST_CASE("a partial file is a new one, whatever has its name") {
  const TemporaryFolder folder;
  const auto target = folder.write("target", "the user's");
  const auto path = folder / "file", part = lockstep::detail::part_of(path);
  const auto fill = [](const std::filesystem::path& name) { std::ofstream(name) << "filled"; };
  SECTION("a link") {
    std::filesystem::create_symlink(target, part);
  }
  SECTION("a link to nothing") {
    std::filesystem::create_symlink(folder / "absent", part);
  }
  SECTION("a file of an earlier process of this id") {
    folder.write(part.filename(), "left by another one");
  }
  lockstep::detail::make_file_whole(path, fill);
  CHECK(std::filesystem::is_regular_file(std::filesystem::symlink_status(path)));
  CHECK(std::filesystem::file_size(path) == 6);
  CHECK(std::filesystem::file_size(target) == 10);
  CHECK_FALSE(std::filesystem::exists(folder / "absent"));
}

TEST_CASE("a folder with the name of a partial file is kept") {
  const TemporaryFolder folder;
  const auto path = folder / "file", part = lockstep::detail::part_of(path);
  std::filesystem::create_directory(part);
  std::ofstream(part / "photo") << "the user's";
  CHECK_THROWS_WITH(lockstep::detail::make_file_whole(path, [](const auto&) {}),
                    ContainsSubstring("cannot be written"));
  CHECK(std::filesystem::exists(part / "photo"));
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
  const auto refused = [&](const char* text) {
    CHECK_THROWS_WITH(lockstep::cache_folder(),
                      ContainsSubstring(none.cache.string()) && ContainsSubstring(text));
    CHECK_THROWS_AS(lockstep::cache_folder(), DataError);
  };
  SECTION("a new one is for this user alone, and found again") {
    CHECK(lockstep::cache_folder() == none.cache);
    CHECK(fs::status(none.cache).permissions() == fs::perms::owner_all);
    CHECK(lockstep::cache_folder() == none.cache);
  }
  SECTION("a link") {
    fs::create_directory(none.temporary / "elsewhere");
    fs::create_directory_symlink(none.temporary / "elsewhere", none.cache);
    refused("it is a symbolic link");
  }
  SECTION("a link to nothing") {
    fs::create_directory_symlink(none.temporary / "absent", none.cache);
    refused("it is a symbolic link");
    CHECK_FALSE(fs::exists(none.temporary / "absent"));
  }
  SECTION("a file") {
    std::ofstream(none.cache) << "file";
    refused("it is no folder");
  }
  SECTION("open to others") {
    fs::create_directory(none.cache);
    fs::permissions(none.cache, fs::perms(0755));
    refused("its mode is 0755, expected 0700");
  }
  SECTION("of another user") {
    fs::create_directory(none.cache);
    if (chown(none.cache.c_str(), ::geteuid() + 1, static_cast<gid_t>(-1)) != 0) {
      WARN("SKIPPED: only root can give a folder to another user");
      return;
    }
    refused("it belongs to user");
  }
  SECTION("no folder for temporary files") {
    setenv("TMPDIR", (none.temporary / "absent").c_str(), 1);
    CHECK_THROWS_WITH(
        lockstep::cache_folder(),
        ContainsSubstring("absent: the folder for temporary files cannot be used: No such file") &&
            ContainsSubstring("set TMPDIR"));
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

}  // namespace digits_test
