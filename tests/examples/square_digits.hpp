#pragma once

#include <string>

#include "support/temporary_folder.hpp"

/// A folder with MNIST's four files. A "digit" is a bright square, whose place says which one it is.
struct SquareDigits : TemporaryFolder {
  explicit SquareDigits(unsigned train, unsigned test) {
    write_part("train", train);
    write_part("t10k", test);
  }

 private:
  static std::string number(unsigned value) {  // big-endian, as IDX has it
    std::string bytes;
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift & 0xFF);
    return bytes;
  }
  void write_part(const std::string& part, unsigned count) const {
    std::string images = number(0x803) + number(count) + number(28) + number(28),
                labels = number(0x801) + number(count);
    for (unsigned i = 0; i < count; ++i) {
      const unsigned label = i * 7 % 10, top = label / 5 * 14 + 2, left = label % 5 * 5;
      std::string image(28 * 28, '\0');
      for (unsigned y = top; y < top + 10; ++y)
        for (unsigned x = left; x < left + 7; ++x)
          image[y * 28 + x] = static_cast<char>(100 + (i + x * y) % 100);
      images += image;
      labels += static_cast<char>(label);
    }
    write(part + "-images-idx3-ubyte", images);
    write(part + "-labels-idx1-ubyte", labels);
  }
};
