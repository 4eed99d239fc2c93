#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include "lockstep/data/dataset.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1::detail {

inline void require_image(const at::Tensor& image, const char* transform) {
  if (image.dim() != 3 || image.numel() == 0)
    throw DataError(
        detail::formatted("{}: found an image with {} dimensions and {} elements, expected [C, H, W]",
                          transform, image.dim(), image.numel()));
}

inline void require_size(std::int64_t size, const char* transform) {
  if (size < 1) throw UsageError(detail::formatted("{}: size is {}: give 1 or more", transform, size));
}

/// Python's round(): halves go to the even neighbour, as in the default rounding mode.
inline std::int64_t rounded(double value) {
  return static_cast<std::int64_t>(std::nearbyint(value));
}

/// Resizes an image [C, H, W] with antialiasing. A uint8 image is computed in uint8, as Pillow does.
inline at::Tensor resized(const at::Tensor& image, std::int64_t height, std::int64_t width) {
  if (image.size(1) == height && image.size(2) == width) return image;
  return at::_upsample_bilinear2d_aa(image.unsqueeze(0), {height, width}, /*align_corners=*/false).squeeze(0);
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

// Transforms of one image: a tensor [C, H, W], uint8 with values to 255 before ToTensor, float32 after it.
// They never change their input in place, are thread-safe, and throw DataError for any other number of
// dimensions. Options and results are those of the class of the same name in torchvision.transforms.

namespace detail {

/// A transform of one image, `transform(image)`, or with random draws, `transform(image, generator)`.
template <class T>
concept ImageTransform = requires(const T& transform, const at::Tensor& image) {
  { transform(image) } -> std::convertible_to<at::Tensor>;
}
|| requires(const T& transform, const at::Tensor& image, at::Generator& generator) {
  { transform(image, generator) } -> std::convertible_to<at::Tensor>;
};

}  // namespace detail

/// A part of an image, in pixels.
struct CropBox {
  /// The corner nearest to the image's origin, and the size.
  std::int64_t top, left, height, width;
  bool operator==(const CropBox&) const = default;
};

/// Resizes a random part of the image, of a random area and aspect ratio, to `size` x `size` pixels.
/// Counterpart: torchvision.transforms.RandomResizedCrop with antialias.
struct RandomResizedCrop {
  std::int64_t size = 224;
  /// Smallest and largest part of the image's area.
  std::array<double, 2> scale{0.08, 1};
  /// Smallest and largest ratio of width to height.
  std::array<double, 2> ratio{3.0 / 4, 4.0 / 3};

  /// Draws the part of an image of that size. Makes torchvision's draws, in its order and dtypes: equal
  /// states of the generator give equal boxes.
  [[nodiscard]] CropBox draw_box(std::int64_t height, std::int64_t width, at::Generator& generator) const {
    const auto area = static_cast<double>(height * width);
    const at::Tensor log_ratio =
        at::tensor({static_cast<float>(ratio[0]), static_cast<float>(ratio[1])}).log();
    const auto draw = [&](double low, double high) { return at::empty({1}).uniform_(low, high, generator); };
    for (int attempt = 0; attempt < 10; ++attempt) {
      const double target_area = area * draw(scale[0], scale[1]).item<double>();
      const double aspect =
          draw(log_ratio[0].item<double>(), log_ratio[1].item<double>()).exp().item<double>();
      const std::int64_t box_width = detail::rounded(std::sqrt(target_area * aspect));
      const std::int64_t box_height = detail::rounded(std::sqrt(target_area / aspect));
      if (box_width < 1 || box_width > width || box_height < 1 || box_height > height) continue;
      const auto top = at::randint(0, height - box_height + 1, {1}, generator, at::kLong);
      const auto left = at::randint(0, width - box_width + 1, {1}, generator, at::kLong);
      return {top.item<std::int64_t>(), left.item<std::int64_t>(), box_height, box_width};
    }
    CropBox box{0, 0, height, width};  // the largest central part of an allowed ratio
    const double in_ratio = static_cast<double>(width) / static_cast<double>(height);
    if (in_ratio < std::min(ratio[0], ratio[1]))
      box.height = detail::rounded(static_cast<double>(width) / std::min(ratio[0], ratio[1]));
    else if (in_ratio > std::max(ratio[0], ratio[1]))
      box.width = detail::rounded(static_cast<double>(height) * std::max(ratio[0], ratio[1]));
    box.top = (height - box.height) / 2;
    box.left = (width - box.width) / 2;
    return box;
  }

  at::Tensor operator()(const at::Tensor& image, at::Generator& generator) const {
    detail::require_image(image, "RandomResizedCrop");
    detail::require_size(size, "RandomResizedCrop");
    const CropBox box = draw_box(image.size(1), image.size(2), generator);
    return detail::resized(image.narrow(1, box.top, box.height).narrow(2, box.left, box.width), size, size);
  }
};

/// Mirrors the image with probability `p`. Counterpart: torchvision.transforms.RandomHorizontalFlip.
struct RandomHorizontalFlip {
  double p = 0.5;

  at::Tensor operator()(const at::Tensor& image, at::Generator& generator) const {
    detail::require_image(image, "RandomHorizontalFlip");
    return at::rand({1}, generator).item<float>() < p ? image.flip(2) : image;
  }
};

/// Resizes the image so that its shorter side has `size` pixels. Counterpart: torchvision.transforms.Resize
/// of a number, with antialias.
struct Resize {
  std::int64_t size = 256;

  at::Tensor operator()(const at::Tensor& image) const {
    detail::require_image(image, "Resize");
    detail::require_size(size, "Resize");
    const std::int64_t height = image.size(1), width = image.size(2);
    const std::int64_t shorter = std::min(height, width), longer = std::max(height, width);
    const std::int64_t length = size * longer / shorter;
    return width <= height ? detail::resized(image, length, size) : detail::resized(image, size, length);
  }
};

/// Returns the central `size` x `size` pixels; an image that is smaller gets a border of zeros. Counterpart:
/// torchvision.transforms.CenterCrop.
struct CenterCrop {
  std::int64_t size = 224;

  at::Tensor operator()(const at::Tensor& image) const {
    detail::require_image(image, "CenterCrop");
    detail::require_size(size, "CenterCrop");
    const auto missing = [&](std::int64_t dim) { return std::max<std::int64_t>(size - image.size(dim), 0); };
    const std::int64_t rows = missing(1), columns = missing(2);
    at::Tensor whole = image;
    if (rows > 0 || columns > 0)
      whole = at::constant_pad_nd(image, {columns / 2, (columns + 1) / 2, rows / 2, (rows + 1) / 2});
    const auto first = [&](std::int64_t dim) {
      return detail::rounded(static_cast<double>(whole.size(dim) - size) / 2);
    };
    return whole.narrow(1, first(1), size).narrow(2, first(2), size);
  }
};

/// Returns the uint8 image as contiguous float32, divided by 255; any other dtype unchanged. Counterpart:
/// torchvision.transforms.ToTensor.
struct ToTensor {
  at::Tensor operator()(const at::Tensor& image) const {
    detail::require_image(image, "ToTensor");
    return image.scalar_type() == at::kByte ? image.contiguous().to(at::kFloat).div_(255) : image;
  }
};

/// Subtracts `mean` and divides by `std`, each with a value for each channel. The defaults are ImageNet's.
/// Counterpart: torchvision.transforms.Normalize.
struct Normalize {
  std::vector<double> mean{0.485, 0.456, 0.406};
  std::vector<double> std{0.229, 0.224, 0.225};

  /// Throws DataError for another number of channels, or an image that is not floating-point.
  at::Tensor operator()(const at::Tensor& image) const {
    detail::require_image(image, "Normalize");
    const auto channels = static_cast<std::size_t>(image.size(0));
    if (channels != mean.size() || channels != std.size() || !image.is_floating_point())
      throw DataError(detail::formatted(
          "Normalize: found an image of {} channels and dtype {}, expected {} channels of a floating-point "
          "dtype: put ToTensor before it",
          channels, c10::toString(image.scalar_type()), mean.size()));
    const auto column = [&](const std::vector<double>& values) {
      return at::tensor(values, image.options()).view({-1, 1, 1});
    };
    return (image - column(mean)).div_(column(std));
  }
};

/// Applies transforms one after the other. Also a DataLoader's Transform, of an example's `data`:
///
///   DataLoader loader{ImageFolder(folder), sampler,
///                     {.transform = Compose{RandomResizedCrop{224}, RandomHorizontalFlip{}, ToTensor{}}}};
///
/// Counterpart: torchvision.transforms.Compose.
template <class... Steps>
class Compose {
 public:
  static_assert((detail::ImageTransform<Steps> && ...),
                "lockstep: a transform of Compose is called as transform(image) or transform(image, "
                "generator) and returns a tensor");

  /// The transforms, in the order in which they are applied.
  explicit Compose(Steps... steps) : steps_(std::move(steps)...) {}

  at::Tensor operator()(at::Tensor image, at::Generator& generator) const {
    std::apply([&](const Steps&... step) { ((image = apply(step, image, generator)), ...); }, steps_);
    return image;
  }
  Example operator()(Example example, at::Generator& generator) const {
    example.data = (*this)(std::move(example.data), generator);
    return example;
  }

 private:
  template <class Step>
  static at::Tensor apply(const Step& step, const at::Tensor& image, at::Generator& generator) {
    if constexpr (std::invocable<const Step&, const at::Tensor&>)
      return step(image);
    else
      return step(image, generator);
  }

  std::tuple<Steps...> steps_;
};

}  // namespace lockstep::inline v0_1
