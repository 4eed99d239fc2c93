#pragma once

#include "lockstep/datasets/digits.hpp"
#include "lockstep/datasets/idx.hpp"
#include "support/temporary_folder.hpp"

/// A folder with MNIST's four files, of few drawn digits.
struct SmallMnist : TemporaryFolder {
  explicit SmallMnist(std::int64_t train = 960, std::int64_t test = 200) {
    const auto write = [&](const std::string& part, const lockstep::Digits& digits) {
      lockstep::write_idx(*this / (part + "-images-idx3-ubyte"), digits.images);
      lockstep::write_idx(*this / (part + "-labels-idx1-ubyte"), digits.labels);
    };
    write("train", lockstep::draw_digits(train, 1));
    write("t10k", lockstep::draw_digits(test, 2));
  }
};
