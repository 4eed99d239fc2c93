#pragma once

// jpeglib.h uses FILE and size_t without including them.
#include <cstdio>

#include <jpeglib.h>

#include <jerror.h>
#include <png.h>

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"

// libjpeg and libpng report an error by a function that must not return, and C++ exceptions must not pass
// through C code. Both decoders therefore jump back to the member function that called the library; each such
// function has no local object with a destructor.

namespace lockstep::inline v0_1::detail {

/// Decodes one JPEG file from memory. `read_header` comes first, then `read_pixels`; each returns false for
/// an error, which `error()` describes.
class JpegDecoder {
 public:
  explicit JpegDecoder(std::string_view bytes) : bytes_(bytes) {}
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;
  ~JpegDecoder() { jpeg_destroy_decompress(&info_); }

  bool read_header() {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = [](j_common_ptr info) {
      auto* errors = reinterpret_cast<Errors*>(info->err);
      info->err->format_message(info, errors->text);
      std::longjmp(errors->back, 1);
    };
    // As Pillow: a file that ends early is an error, lesser damage is not.
    errors_.base.emit_message = [](j_common_ptr info, int level) {
      if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) info->err->error_exit(info);
    };
    if (setjmp(errors_.back) != 0) return false;
    jpeg_create_decompress(&info_);
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(bytes_.data()), bytes_.size());
    jpeg_read_header(&info_, TRUE);
    // libjpeg converts YCCK to CMYK, and neither of them to RGB.
    const bool four = info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
    info_.out_color_space = four ? JCS_CMYK : JCS_RGB;
    jpeg_calc_output_dimensions(&info_);
    return true;
  }

  [[nodiscard]] std::int64_t width() const { return info_.output_width; }
  [[nodiscard]] std::int64_t height() const { return info_.output_height; }
  [[nodiscard]] std::int64_t channels() const { return info_.out_color_space == JCS_CMYK ? 4 : 3; }
  [[nodiscard]] const char* error() const { return errors_.text; }

  /// Writes the pixels row by row, the channels of a pixel side by side.
  bool read_pixels(std::uint8_t* pixels) {
    if (setjmp(errors_.back) != 0) return false;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      JSAMPROW row = pixels + static_cast<std::size_t>(info_.output_scanline) * info_.output_width *
                                  static_cast<std::size_t>(info_.output_components);
      jpeg_read_scanlines(&info_, &row, 1);
    }
    return true;  // what comes after the pixels does not matter
  }

 private:
  struct Errors {
    jpeg_error_mgr base;  // first: libjpeg passes its address
    std::jmp_buf back;
    char text[JMSG_LENGTH_MAX];
  };

  std::string_view bytes_;
  jpeg_decompress_struct info_{};
  Errors errors_{};
};

/// Decodes one PNG file from memory; the same interface. The one channel of 16-bit grey has two bytes, all
/// others have one.
class PngDecoder {
 public:
  explicit PngDecoder(std::string_view bytes) : rest_(bytes) {}
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;
  ~PngDecoder() { png_destroy_read_struct(&png_, &info_, nullptr); }

  bool read_header() {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &PngDecoder::fail,
                                  [](png_structp, const char*) {});
    if (png_ == nullptr || (info_ = png_create_info_struct(png_)) == nullptr) {
      std::strncpy(text_, "libpng could not be initialized", sizeof text_ - 1);
      return false;
    }
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, &PngDecoder::read);
    png_read_info(png_, info_);
    wide_grey_ =
        png_get_color_type(png_, info_) == PNG_COLOR_TYPE_GRAY && png_get_bit_depth(png_, info_) == 16;
    png_set_expand(png_);  // palettes, and less than 8 bits
    png_set_strip_alpha(png_);
    if (!wide_grey_) {
      png_set_strip_16(png_);
      png_set_gray_to_rgb(png_);
    }
    passes_ = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    return true;
  }

  [[nodiscard]] std::int64_t width() const { return png_get_image_width(png_, info_); }
  [[nodiscard]] std::int64_t height() const { return png_get_image_height(png_, info_); }
  [[nodiscard]] bool wide_grey() const { return wide_grey_; }
  [[nodiscard]] const char* error() const { return text_; }

  bool read_pixels(std::uint8_t* pixels) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    const std::size_t stride = png_get_rowbytes(png_, info_);
    for (int pass = 0; pass < passes_; ++pass)
      for (png_uint_32 y = 0; y < png_get_image_height(png_, info_); ++y)
        png_read_row(png_, pixels + y * stride, nullptr);
    return true;
  }

 private:
  [[noreturn]] static void fail(png_structp png, const char* text) {
    auto* self = static_cast<PngDecoder*>(png_get_error_ptr(png));
    std::strncpy(self->text_, text, sizeof self->text_ - 1);
    png_longjmp(png, 1);
  }
  static void read(png_structp png, png_bytep to, std::size_t count) {
    auto* self = static_cast<PngDecoder*>(png_get_io_ptr(png));
    if (self->rest_.size() < count) png_error(png, "the file ends early");
    std::memcpy(to, self->rest_.data(), count);
    self->rest_.remove_prefix(count);
  }

  std::string_view rest_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  int passes_ = 1;
  bool wide_grey_ = false;
  char text_[256] = {};
};

/// Converts CMYK to RGB as Pillow does: without a colour profile, and from inverted values, as Adobe's
/// programs write them, whether or not the file has Adobe's marker.
inline void cmyk_to_rgb(const std::uint8_t* from, std::uint8_t* to, std::int64_t pixels) {
  for (std::int64_t i = 0; i < pixels; ++i) {
    const int white = from[4 * i + 3];
    for (int channel = 0; channel < 3; ++channel) {
      const int product = (255 - from[4 * i + channel]) * white + 128;
      to[3 * i + channel] = static_cast<std::uint8_t>(white - (((product >> 8) + product) >> 8));
    }
  }
}

/// Converts 16-bit grey, big-endian, to RGB as Pillow does: a value above 255 becomes 255.
inline void wide_grey_to_rgb(const std::uint8_t* from, std::uint8_t* to, std::int64_t pixels) {
  for (std::int64_t i = 0; i < pixels; ++i)
    for (int channel = 0; channel < 3; ++channel)
      to[3 * i + channel] = from[2 * i] == 0 ? from[2 * i + 1] : std::uint8_t{255};
}

/// The number of pixels above which Pillow refuses an image: a small file can promise any number.
inline constexpr std::int64_t most_pixels = 178'956'970;

/// Decodes a JPEG or PNG file (detected by its first bytes) to uint8 RGB, [3, H, W]. `name` names it in
/// errors. Throws DataError.
inline at::Tensor decode_image(std::string_view bytes, std::string_view name) {
  const auto refuse = [&](std::string_view why) -> at::Tensor {
    throw DataError(detail::formatted("{}: {}", name, why));
  };
  const auto damaged = [&](const char* why) {
    return refuse(detail::formatted("cannot be decoded: {}", why));
  };
  const auto empty = [&](std::int64_t height, std::int64_t width, std::int64_t channels) {
    if (height * width > most_pixels)
      return refuse(
          detail::formatted("found an image of {} x {} pixels, expected at most {} pixels: scale it down",
                            width, height, most_pixels));
    try {
      return at::empty({height, width, channels}, at::kByte);
    } catch (const c10::Error&) {
      return refuse(detail::formatted("there is no memory for an image of {} x {} pixels", width, height));
    }
  };
  at::Tensor pixels;
  if (bytes.starts_with("\xff\xd8\xff")) {
    JpegDecoder jpeg(bytes);
    if (!jpeg.read_header()) return damaged(jpeg.error());
    pixels = empty(jpeg.height(), jpeg.width(), jpeg.channels());
    if (!jpeg.read_pixels(pixels.mutable_data_ptr<std::uint8_t>())) return damaged(jpeg.error());
    if (jpeg.channels() == 4) {
      const at::Tensor rgb = empty(jpeg.height(), jpeg.width(), 3);
      cmyk_to_rgb(const_data<std::uint8_t>(pixels), rgb.mutable_data_ptr<std::uint8_t>(),
                  jpeg.height() * jpeg.width());
      pixels = rgb;
    }
  } else if (bytes.starts_with("\x89PNG\r\n\x1a\n")) {
    PngDecoder png(bytes);
    if (!png.read_header()) return damaged(png.error());
    pixels = empty(png.height(), png.width(), png.wide_grey() ? 2 : 3);
    if (!png.read_pixels(pixels.mutable_data_ptr<std::uint8_t>())) return damaged(png.error());
    if (png.wide_grey()) {
      const at::Tensor rgb = empty(png.height(), png.width(), 3);
      wide_grey_to_rgb(const_data<std::uint8_t>(pixels), rgb.mutable_data_ptr<std::uint8_t>(),
                       png.height() * png.width());
      pixels = rgb;
    }
  } else {
    return refuse("offset 0: found neither the signature of a JPEG file nor that of a PNG file");
  }
  return pixels.permute({2, 0, 1});
}

}  // namespace lockstep::inline v0_1::detail
