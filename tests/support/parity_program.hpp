#pragma once

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

/// What the programs share that Python scripts compare with.
namespace lockstep_test {

/// The path of the libtorch_cpu.so in use: bits are compared only where Python loads the same.
inline void print_library() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (const auto at = line.find('/');
        at != std::string::npos && line.find("/libtorch_cpu.so") != std::string::npos) {
      std::cout << line.substr(at) << std::endl;
      return;
    }
}

/// The program's own words, without launch's `--nproc N`.
inline std::vector<std::string> own_words(int argc, char** argv) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--nproc")
      ++i;
    else
      words.emplace_back(argv[i]);
  }
  return words;
}

}  // namespace lockstep_test
