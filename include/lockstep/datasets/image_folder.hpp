#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include "lockstep/data/dataset.hpp"
#include "lockstep/datasets/detail/data_file.hpp"
#include "lockstep/datasets/detail/decode_image.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/log/log.hpp"

// Needs libjpeg and libpng: link lockstep::images, or -ljpeg -lpng.

namespace lockstep::inline v0_1 {

/// Reads a JPEG or PNG file (detected by its content) as uint8 RGB, [3, H, W], channels-last in memory. Repeats the
/// value of a grey image in each channel, converts CMYK, keeps the upper 8 of 16 bits of colours, clips 16-bit grey at
/// 255, and ignores transparency, colour profiles and the orientation that a camera has noted. Throws DataError that
/// names the file if it cannot be read or decoded, or has more than 178,956,970 pixels. Thread-safe.
/// Counterpart: PIL.Image.open(path).convert("RGB").
inline at::Tensor read_image(const std::filesystem::path& path) {
  return detail::decode_image(detail::as_data_file([&] { return read_file(path); }), path.string());
}

/// A dataset of images, with one subfolder for each class:
///
///   root/cat/001.jpg  root/cat/more/002.png  root/dog/001.jpg
///
/// The names of the subfolders, sorted, are the classes 0, 1, ..., except for names that begin with a dot. A
/// class's images are the files below its subfolder that end in .jpg, .jpeg or .png, in torchvision's order.
/// The constructor lists the files; `get` decodes one. Copies share the list. Thread-safe.
///
/// Images have different sizes: give the DataLoader a `transform` that makes them equal, such as Compose of
/// RandomResizedCrop (see image_transforms.hpp).
///
/// Counterpart: torchvision.datasets.ImageFolder.
class ImageFolder {
 public:
  /// Throws DataError if `root` cannot be read, has no subfolder, or one of these has no image. Rank 0 warns
  /// of files that torchvision's ImageFolder lists and this one does not, such as .webp, with their number.
  explicit ImageFolder(const std::filesystem::path& root) {
    auto files = std::make_shared<Files>();
    files->root = root;
    files->classes = subfolders(root);
    if (files->classes.empty())
      throw DataError(
          detail::formatted("{}: found no subfolder, expected one for each class", root.string()));
    PassedOver all_passed_over;
    for (const std::string& name : files->classes) {
      const std::size_t before = files->ends.size();
      const PassedOver passed_over = list_images(root / name, *files);
      for (const auto& [extension, count] : passed_over) all_passed_over[extension] += count;
      if (files->ends.size() == before)
        throw DataError(
            detail::formatted("{}: found no image, expected files that end in .jpg, .jpeg or .png{}",
                              (root / name).string(), text_of(passed_over, "; passed over ")));
      files->class_ends.push_back(files->ends.size());
    }
    if (const std::string text = text_of(all_passed_over); !text.empty())
      Log(std::max(0, detail::process_rank.load()))
          .warning("{}: passed over {}, which torchvision's ImageFolder reads; convert them to JPEG or PNG",
                   root.string(), text);
    files_ = std::move(files);
  }

  [[nodiscard]] std::size_t size() const { return files_->ends.size(); }

  /// Returns image `index`, uint8 [3, H, W], and its class, int64 []. Throws DataError that names the file.
  [[nodiscard]] Example get(std::size_t index) const {
    return {read_image(path(index)), at::scalar_tensor(target(index), at::kLong)};
  }

  /// Returns the names of the classes.
  [[nodiscard]] const std::vector<std::string>& classes() const { return files_->classes; }

  /// Returns the class of image `index`.
  [[nodiscard]] std::int64_t target(std::size_t index) const {
    const auto& ends = files_->class_ends;
    return std::upper_bound(ends.begin(), ends.end(), index) - ends.begin();
  }

  /// Returns the path of image `index`.
  [[nodiscard]] std::filesystem::path path(std::size_t index) const {
    const std::size_t begin = index == 0 ? 0 : files_->ends[index - 1];
    const auto name = std::string_view(files_->names).substr(begin, files_->ends[index] - begin);
    return files_->root / files_->classes[static_cast<std::size_t>(target(index))] / name;
  }

 private:
  // One string holds all names, below the class's subfolder: a million strings would take several times the
  // memory on each rank.
  struct Files {
    std::filesystem::path root;
    std::vector<std::string> classes;
    std::string names;
    std::vector<std::size_t> ends;        // of each image's name in `names`
    std::vector<std::size_t> class_ends;  // the number of images up to the end of each class
  };

  // The number of files by an extension that torchvision's ImageFolder reads and this one does not.
  using PassedOver = std::map<std::string, std::size_t>;

  static std::string text_of(const PassedOver& passed_over, std::string_view before = "") {
    std::string text;
    for (const auto& [extension, count] : passed_over)
      text += detail::formatted("{}{} {}", text.empty() ? before : ", ", count, extension);
    return text.empty() ? text : text + " files";
  }

  [[noreturn]] static void refuse(const std::filesystem::path& folder, const std::error_code& error) {
    throw DataError(detail::formatted("{}: cannot be read: {}", folder.string(), error.message()));
  }

  static std::vector<std::string> subfolders(const std::filesystem::path& folder) {
    std::vector<std::string> names;
    std::error_code error;
    auto entry = std::filesystem::directory_iterator(folder, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
      if (std::error_code ignored; entry->is_directory(ignored))
        // Folders such as .ipynb_checkpoints belong to tools.
        if (std::string name = entry->path().filename().string(); !name.starts_with('.'))
          names.push_back(std::move(name));
    if (error) refuse(folder, error);
    std::sort(names.begin(), names.end());
    return names;
  }

  // torchvision sorts the folders below a class by their whole path, then the files of each.
  static PassedOver list_images(const std::filesystem::path& folder, Files& files) {
    using Options = std::filesystem::directory_options;
    std::vector<std::pair<std::string, std::string>> found;  // folder below the class, file
    PassedOver passed_over;
    std::error_code error;
    auto entry =
        std::filesystem::recursive_directory_iterator(folder, Options::follow_directory_symlink, error);
    for (; !error && entry != std::filesystem::recursive_directory_iterator(); entry.increment(error)) {
      std::error_code ignored;
      std::string extension = entry->path().extension().string();
      for (char& letter : extension)
        if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
      const auto is_one_of = [&](std::initializer_list<std::string_view> extensions) {
        return std::find(extensions.begin(), extensions.end(), extension) != extensions.end();
      };
      const bool read = is_one_of({".jpg", ".jpeg", ".png"});
      if (!read && !is_one_of({".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})) continue;
      if (entry->is_directory(ignored)) continue;
      if (!read) {
        ++passed_over[extension];
        continue;
      }
      const auto inner = entry.depth() == 0 ? std::string()
                                            : entry->path().parent_path().lexically_relative(folder).string();
      found.emplace_back(inner, entry->path().filename().string());
    }
    if (error) refuse(folder, error);
    std::sort(found.begin(), found.end());
    for (const auto& [inner, name] : found) {
      if (!inner.empty()) files.names += inner + '/';
      files.names += name;
      files.ends.push_back(files.names.size());
    }
    return passed_over;
  }

  std::shared_ptr<const Files> files_;
};

static_assert(IndexedDataset<ImageFolder>);

}  // namespace lockstep::inline v0_1
