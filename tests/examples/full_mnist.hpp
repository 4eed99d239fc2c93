#pragma once

#include <string>
#include <utility>

#include "lockstep/datasets/digits.hpp"
#include "lockstep/datasets/idx.hpp"
#include "support/temporary_folder.hpp"

/// The folder of MNIST's four files with as many digits as LibTorch's reader requires. Only the first 3,000 differ.
inline const std::string& full_mnist() {
  static const TemporaryFolder folder;
  static const std::string path = [] {
    const auto drawn = lockstep::draw_digits(3000, 1);
    for (const auto& [part, size] : {std::pair("train", 60'000), std::pair("t10k", 10'000)}) {
      const std::int64_t copies = (size + 2999) / 3000;
      const std::string name = (folder / part).string();
      lockstep::write_idx(name + "-images-idx3-ubyte",
                          drawn.images.repeat({copies, 1, 1}).slice(0, 0, size).contiguous());
      lockstep::write_idx(name + "-labels-idx1-ubyte",
                          drawn.labels.repeat({copies}).slice(0, 0, size).contiguous());
    }
    return folder.path().string();
  }();
  return path;
}
