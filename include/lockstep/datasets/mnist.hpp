#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.hpp"
#include "lockstep/datasets/digits.hpp"
#include "lockstep/datasets/download.hpp"
#include "lockstep/datasets/idx.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/world.hpp"

namespace lockstep::inline v0_1 {

/// A dataset of grayscale digits. A sample is {data: float32 [1, H, W] in 0 to 1, as torchvision's ToTensor
/// makes it; target: int64 scalar}, with H = W = 28 for MNIST. Stores the pixels as bytes, a quarter of the
/// memory of floats, until it makes a batch.
class DigitDataset {
 public:
  /// Takes images: uint8 [N, H, W] and labels: uint8 [N]. Throws DataError for other shapes or dtypes.
  explicit DigitDataset(Digits digits) : digits_(std::move(digits)) {
    if (digits_.images.dim() != 3 || digits_.labels.dim() != 1 || digits_.images.scalar_type() != at::kByte ||
        digits_.labels.scalar_type() != at::kByte || !digits_.images.is_cpu() || !digits_.labels.is_cpu())
      throw DataError("a DigitDataset needs uint8 images [N, H, W] and uint8 labels [N] on the CPU");
    if (digits_.images.size(0) != digits_.labels.size(0))
      throw DataError(
          detail::formatted("a DigitDataset has {} images and {} labels: give one label for each image",
                            digits_.images.size(0), digits_.labels.size(0)));
    digits_ = {digits_.images.contiguous(), digits_.labels.contiguous()};
  }

  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(digits_.images.size(0)); }

  /// Returns the samples `indices`, stacked: data float32 [batch, 1, H, W], target int64 [batch]. Throws
  /// DataError if an index is out of range.
  [[nodiscard]] Example get_batch(c10::ArrayRef<std::size_t> indices) const {
    const auto count = static_cast<std::int64_t>(indices.size());
    const std::int64_t height = digits_.images.size(1), width = digits_.images.size(2),
                       pixels = height * width;
    Example batch{at::empty({count, 1, height, width}, at::kFloat), at::empty({count}, at::kLong)};
    const auto* images = detail::const_data<std::uint8_t>(digits_.images);
    const auto* labels = detail::const_data<std::uint8_t>(digits_.labels);
    auto* data = batch.data.mutable_data_ptr<float>();
    auto* target = batch.target.mutable_data_ptr<std::int64_t>();
    for (const std::size_t index : indices) {
      if (index >= size())
        throw DataError(
            detail::formatted("sample {} is out of range: the dataset has {} samples", index, size()));
      const std::uint8_t* image = images + static_cast<std::int64_t>(index) * pixels;
      // ToTensor divides; multiplying by 1/255 gives other bits.
      for (std::int64_t i = 0; i < pixels; ++i) data[i] = static_cast<float>(image[i]) / 255.F;
      data += pixels;
      *target++ = labels[index];
    }
    return batch;
  }

  /// Returns all images and labels.
  [[nodiscard]] const Digits& digits() const { return digits_; }

 private:
  Digits digits_;
};

/// The train and test datasets of MNIST, or of another dataset in its file format.
struct Mnist {
  DigitDataset train;
  DigitDataset test;
};

namespace detail {

/// Returns `name` as 7-Zip and Kaggle write it: "train-images.idx3-ubyte" for "train-images-idx3-ubyte".
inline std::string dotted_mnist_name(std::string_view name) {
  std::string dotted(name);
  dotted[dotted.rfind("-idx")] = '.';
  return dotted;
}

/// Returns the path of `name`, with a dash or a dot before "idx", plain or .gz, in `folder` or in its
/// subfolder MNIST/raw, which torchvision uses. Throws DataError if no such file exists.
inline std::filesystem::path mnist_file(const std::filesystem::path& folder, const std::string& name) {
  for (const auto& place : {folder, folder / "MNIST" / "raw"})
    for (const std::string& spelling : {name, dotted_mnist_name(name)})
      for (const std::string_view suffix : {"", ".gz"}) {
        const auto path = place / detail::formatted("{}{}", spelling, suffix);
        // Kaggle's archive has a folder of each file's name beside the files.
        std::error_code ignored;
        if (std::filesystem::exists(path, ignored) && !std::filesystem::is_directory(path, ignored))
          return path;
      }
  throw DataError(
      detail::formatted("{}: there is no {} in it, nor {}.gz; give the folder that holds MNIST's four files",
                        folder.string(), name, name));
}

/// Reads a part, "train" or "t10k".
inline DigitDataset read_mnist_part(const std::filesystem::path& folder, std::string_view part) {
  const auto images_path = mnist_file(folder, detail::formatted("{}-images-idx3-ubyte", part));
  const auto labels_path = mnist_file(folder, detail::formatted("{}-labels-idx1-ubyte", part));
  Digits digits{
      read_idx(images_path, {.dtype = at::kByte, .dimensions = 3, .content = "MNIST's images"}),
      read_idx(labels_path, {.dtype = at::kByte, .dimensions = 1, .content = "MNIST's labels"}),
  };
  if (digits.images.size(1) != 28 || digits.images.size(2) != 28)
    throw DataError(detail::formatted("{}: offset 8: found images of {} x {}, expected 28 x 28",
                                      images_path.string(), digits.images.size(1), digits.images.size(2)));
  if (digits.images.size(0) != digits.labels.size(0))
    throw DataError(detail::formatted("{}: offset 4: found {} labels, expected {}, one for each image in {}",
                                      labels_path.string(), digits.labels.size(0), digits.images.size(0),
                                      images_path.string()));
  if (digits.images.size(0) == 0)
    throw DataError(
        detail::formatted("{}: offset 4: found 0 images, expected at least one", images_path.string()));
  const auto* labels = detail::const_data<std::uint8_t>(digits.labels);
  for (std::int64_t i = 0; i < digits.labels.size(0); ++i)
    if (labels[i] > 9)
      throw DataError(detail::formatted("{}: offset {}: found label {}, expected a digit from 0 to 9",
                                        labels_path.string(), 8 + i, labels[i]));
  return DigitDataset(std::move(digits));
}

}  // namespace detail

/// Reads MNIST's four files (train-images-idx3-ubyte or train-images.idx3-ubyte and so on), plain or gzipped, with any
/// number of digits. Throws DataError with the file, the offset and the expectation if a file is missing or invalid.
inline Mnist load_mnist(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    throw DataError(detail::formatted("{}: {}", folder.string(), error ? error.message() : "not a folder"));
  return {detail::read_mnist_part(folder, "train"), detail::read_mnist_part(folder, "t10k")};
}

/// Throws UsageError unless `folder` holds MNIST's four files as torch::data::datasets::MNIST requires them:
/// unpacked, with 60,000 and 10,000 digits. That reader does not detect a truncated file. `option`: the
/// command-line option that gave the folder, named first in the error.
inline void require_unpacked_mnist(const std::filesystem::path& folder, std::string_view option) {
  constexpr std::uintmax_t pixels = 28 * 28, train = 60'000, test = 10'000;
  const auto require = [&](std::string_view name, std::uintmax_t size) {
    const auto path = folder / name;
    std::error_code error;
    const std::uintmax_t found = std::filesystem::file_size(path, error);
    if (!error && found == size) return;
    if (!error)
      throw UsageError(detail::formatted("{}: {}: found {} bytes, expected {}: copy or unpack it again",
                                         option, path.string(), found, size));
    if (const auto dotted = folder / detail::dotted_mnist_name(name); std::filesystem::exists(dotted, error))
      throw UsageError(
          detail::formatted("{}: {}: found only {}: rename it", option, path.string(), dotted.string()));
    if (std::filesystem::exists(path.string() + ".gz", error))
      throw UsageError(
          detail::formatted("{0}: {1}: found only {1}.gz: unpack it with gunzip", option, path.string()));
    throw UsageError(
        detail::formatted("{}: {}: no such file; give the folder that holds MNIST's four files, unpacked",
                          option, path.string()));
  };
  require("train-images-idx3-ubyte", 16 + train * pixels);
  require("train-labels-idx1-ubyte", 8 + train);
  require("t10k-images-idx3-ubyte", 16 + test * pixels);
  require("t10k-labels-idx1-ubyte", 8 + test);
}

/// Draws `train` and `test` digits into `folder` as MNIST's four files, each written atomically. Creates the
/// folder if missing; leaves a part unchanged if both its files exist. Throws DataError if writing fails.
inline void draw_digits_into(const std::filesystem::path& folder, std::int64_t train, std::int64_t test) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw DataError(detail::formatted("{}: cannot be made: {}", folder.string(), error.message()));
  const auto draw = [&](std::string_view name, std::int64_t count, std::uint64_t seed) {
    const auto images = folder / detail::formatted("{}-images-idx3-ubyte", name);
    const auto labels = folder / detail::formatted("{}-labels-idx1-ubyte", name);
    if (std::filesystem::exists(images, error) && std::filesystem::exists(labels, error)) return;
    const Digits digits = draw_digits(count, seed);
    write_idx(images, digits.images);
    write_idx(labels, digits.labels);
  };
  draw("train", train, 1);
  draw("t10k", test, 2);
}

/// Returns a folder with drawn digits as MNIST's four files, `train` and `test` of them. The first call on a host draws
/// them, which takes seconds. With several ranks per host, call it inside `world.local_zero_first`.
inline std::filesystem::path drawn_digits_folder(std::int64_t train = 60'000, std::int64_t test = 10'000) {
  // Increment the version whenever the drawing changes.
  const auto folder = cache_folder() / detail::formatted("digits-v1-{}-{}", train, test);
  draw_digits_into(folder, train, test);
  return folder;
}

/// MNIST's four files.
inline const std::array<RemoteFile, 4> mnist_files{{
    {"train-images-idx3-ubyte.gz", 9912422},
    {"train-labels-idx1-ubyte.gz", 28881},
    {"t10k-images-idx3-ubyte.gz", 1648877},
    {"t10k-labels-idx1-ubyte.gz", 4542},
}};

/// Returns the base URLs of MNIST, in the order to try. The environment variable LOCKSTEP_MNIST_MIRROR, one
/// URL, replaces them.
inline std::vector<std::string> mnist_mirrors() {
  if (const char* mirror = std::getenv("LOCKSTEP_MNIST_MIRROR"); mirror && *mirror) return {mirror};
  return {"https://ossci-datasets.s3.amazonaws.com/mnist",
          "https://storage.googleapis.com/cvdf-datasets/mnist"};
}

/// Where `load_mnist` gets the digits.
struct MnistSource {
  /// The folder with MNIST's four files. Unset: a folder in the cache, of downloaded digits if `download` is
  /// set, else of synthetic ones.
  std::optional<std::filesystem::path> folder = std::nullopt;
  /// Whether to download the files that are missing in the folder.
  bool download = false;
  /// The base URLs to download from, in the order to try.
  std::vector<std::string> mirrors = mnist_mirrors();
};

/// Returns the digits of `source`. The first rank of each host downloads or draws them, the other ranks there
/// wait for it and read its files. Logs each download, and the folder of synthetic digits. Collective. Throws
/// UsageError if the digits cannot be downloaded, written or read.
inline Mnist load_mnist(const World& world, const MnistSource& source = {}) try {
  std::filesystem::path folder = source.folder.value_or("");
  const bool synthetic = !source.folder && !source.download;
  world.local_zero_first([&] {
    if (synthetic)
      folder = drawn_digits_folder();
    else if (!source.folder)
      folder = cache_folder() / "mnist";
    if (source.download && world.local_rank() == 0)
      download_files(folder, mnist_files, source.mirrors,
                     [&](const std::string& text) { world.log.all().info("{}", text); });
  });
  Mnist mnist = load_mnist(folder);
  if (synthetic)
    world.log.info("training on {} digits drawn by this program, kept in {}", mnist.train.size(),
                   folder.string());
  return mnist;
} catch (const DataError& error) {
  throw UsageError(error.what());  // found before training: the user's input, not a failure
}

}  // namespace lockstep::inline v0_1
