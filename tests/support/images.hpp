#pragma once

// jpeglib.h uses FILE and size_t without including them.
#include <cstdio>

#include <jpeglib.h>

#include <png.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

/// JPEG and PNG files that tests make.
namespace lockstep_test {

/// A PNG file of pixels, row by row: 8-bit PNG_FORMAT_RGB, _RGBA or _GRAY, or 16-bit PNG_FORMAT_LINEAR_Y.
template <class Pixel>
std::string png_file(int width, int height, const std::vector<Pixel>& pixels,
                     png_uint_32 format = PNG_FORMAT_RGB) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width);
  image.height = static_cast<png_uint_32>(height);
  image.format = format;
  png_alloc_size_t size = 0;
  if (!png_image_write_to_memory(&image, nullptr, &size, 0, pixels.data(), 0, nullptr))
    throw std::runtime_error(image.message);
  std::string bytes(size, '\0');
  if (!png_image_write_to_memory(&image, bytes.data(), &size, 0, pixels.data(), 0, nullptr))
    throw std::runtime_error(image.message);
  bytes.resize(size);
  return bytes;
}

/// A JPEG file of best quality: JCS_RGB, JCS_GRAYSCALE or JCS_CMYK, the last with Adobe's marker or without.
inline std::string jpeg_file(int width, int height, std::vector<std::uint8_t> pixels,
                             J_COLOR_SPACE space = JCS_RGB, bool adobe_marker = true) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &memory, &size);
  info.image_width = static_cast<JDIMENSION>(width);
  info.image_height = static_cast<JDIMENSION>(height);
  info.input_components = space == JCS_CMYK ? 4 : space == JCS_RGB ? 3 : 1;
  info.in_color_space = space;
  jpeg_set_defaults(&info);
  if (!adobe_marker) info.write_Adobe_marker = FALSE;
  jpeg_set_quality(&info, 100, TRUE);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    JSAMPROW row = pixels.data() + static_cast<std::size_t>(info.next_scanline) *
                                       static_cast<std::size_t>(width * info.input_components);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  std::string bytes(reinterpret_cast<char*>(memory), size);
  jpeg_destroy_compress(&info);
  std::free(memory);
  return bytes;
}

}  // namespace lockstep_test
