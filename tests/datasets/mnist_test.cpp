#include "lockstep/datasets/mnist.hpp"

#include "data/counted_memory.hpp"
#include "support/refuses.hpp"
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
};

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

TEST_CASE("MNIST's files are found by the names that 7-Zip and Kaggle give them") {
  const MnistFolder folder;
  for (const std::string name : {"train-images", "train-labels", "t10k-images", "t10k-labels"}) {
    const std::string ends = name.ends_with("images") ? "idx3-ubyte" : "idx1-ubyte";
    std::filesystem::rename(folder / (name + '-' + ends), folder / (name + '.' + ends));
    std::filesystem::create_directory(folder / (name + '-' + ends));  // as in Kaggle's archive
  }
  CHECK(lockstep::load_mnist(folder.path()).train.size() == 30);
  std::filesystem::remove(folder / "train-images-idx3-ubyte");
  refuses<lockstep::UsageError>(
      [&] { lockstep::require_unpacked_mnist(folder.path(), "--data"); },
      "found only " + (folder / "train-images.idx3-ubyte").string() + ": rename it");
}

TEST_CASE("a folder that is not MNIST's is refused with file and reason") {
  MnistFolder folder;
  const auto digits = lockstep::draw_digits(30, 1);
  CHECK_THROWS_AS(lockstep::load_mnist(folder / "absent"), DataError);
  CHECK_THROWS_AS(lockstep::load_mnist(folder / "t10k-labels-idx1-ubyte"), DataError);
  const std::string images = "train-images-idx3-ubyte", labels = "train-labels-idx1-ubyte";
  at::Tensor no_digit = digits.labels.clone();
  no_digit[4] = 10;
  for (const auto& [name, content, words] : std::vector<std::tuple<std::string, at::Tensor, const char*>>{
           {labels, digits.images,
            "train-labels-idx1-ubyte: offset 3: found 3 dimensions, expected MNIST's labels, which have 1"},
           {labels, digits.labels.narrow(0, 0, 29), "offset 4: found 29 labels, expected 30"},
           {labels, no_digit, "offset 12: found label 10"},
           {images, torch::zeros({30, 14, 28}, at::kByte),
            "offset 8: found images of 14 x 28, expected 28 x 28"},
           {images, torch::zeros({0, 28, 28}, at::kByte), "offset 4: found 30 labels, expected 0"}}) {
    MnistFolder spoilt;
    write_idx(spoilt / name, content);
    refuses<DataError>([&] { lockstep::load_mnist(spoilt.path()); }, words);
  }
  std::filesystem::remove(folder / "t10k-labels-idx1-ubyte");
  refuses<DataError>([&] { lockstep::load_mnist(folder.path()); },
                     "there is no t10k-labels-idx1-ubyte in it");
  write_idx(folder / images, torch::zeros({0, 28, 28}, at::kByte));
  write_idx(folder / labels, torch::zeros({0}, at::kByte));
  refuses<DataError>([&] { lockstep::load_mnist(folder.path()); }, "found 0 images");
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

TEST_CASE("a source with a folder is that folder's digits, a wrong one is the user's mistake") {
  const MnistFolder folder;
  CHECK(lockstep::load_mnist(lockstep::World(), {.folder = folder.path()}).train.size() == 30);
  CHECK_THROWS_AS(lockstep::load_mnist(lockstep::World(), {.folder = folder / "absent"}),
                  lockstep::UsageError);
}

TEST_CASE("a source without a folder is in the cache: synthetic digits, or downloaded ones") {
  const TemporaryFolder cache;
  setenv("XDG_CACHE_HOME", cache.path().c_str(), 1);
  // Already drawn, so that 70,000 digits need not be.
  lockstep::draw_digits_into(cache / "lockstep/digits-v1-60000-10000", 30, 20);
  CHECK(lockstep::load_mnist(lockstep::World()).train.size() == 30);
  refuses<lockstep::UsageError>(
      [] { lockstep::load_mnist(lockstep::World(), {.download = true, .mirrors = {"file:///absent"}}); },
      (cache / "lockstep/mnist").string());
}

}  // namespace mnist_test
