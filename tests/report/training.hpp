#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/comm/cpu_comm.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/ranks.hpp"
#include "train/nets.hpp"

/// A small training for the tests of reports.
using ReportTrainer =
    lockstep::Trainer<TinyNet, lockstep::DistributedSampler, lockstep::CpuComm, lockstep::Fp32>;

inline lockstep::TrainerOptions short_run(std::int64_t epochs = 2, std::int64_t accumulate = 1) {
  return {
      .epochs = epochs, .batch_size = 4, .accumulate = accumulate, .lr = 0.1, .seed = 5, .progress = false};
}

inline std::vector<std::string> lines_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}
