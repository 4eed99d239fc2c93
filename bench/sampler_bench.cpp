// What a DistributedSampler of many samples costs beside torch::randperm of as many: to make, to set an
// epoch, to keep. The two are timed in turn in one process.
//
// usage: sampler_bench [samples = 100000000] [ranks = 2] [rounds = 3]

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/data/sampler.hpp"

namespace {

template <class Work>
double seconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Memory of this process in bytes: `VmRSS` now, `VmHWM` at its peak.
double memory(const std::string& field) {
  malloc_trim(0);
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    double kilobytes = 0;
    if (word == field + ":" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

void print_ratio(const char* name, const char* sides, std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  fmt::print("RATIO {} {} {:.2f} ({:.2f}-{:.2f})\n", name, sides, ratios[ratios.size() / 2], ratios.front(),
             ratios.back());
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t samples = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100'000'000;
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 2, rounds = argc > 3 ? std::atoi(argv[3]) : 3;
  if (samples == 0 || ranks < 1 || rounds < 1) {
    fmt::print(stderr, "usage: sampler_bench [samples] [ranks] [rounds]\n");
    return 2;
  }

  std::vector<double> make, set_epoch;
  double kept = 0;
  for (int round = 0; round < rounds; ++round) {
    const double before = memory("VmRSS");
    std::optional<lockstep::DistributedSampler> sampler;
    make.push_back(
        seconds([&] { sampler.emplace(samples, 0, ranks, lockstep::SamplerOptions{.seed = 3407}); }));
    const auto epoch = static_cast<std::size_t>(round);
    const double lockstep_seconds = seconds([&] {
      sampler->set_epoch(epoch);
      sampler->prepare();
    });
    kept = memory("VmRSS") - before;
    sampler.reset();
    const double torch_seconds = seconds([&] {
      const auto generator = at::detail::createCPUGenerator(3407 + epoch);
      at::randperm(static_cast<std::int64_t>(samples), generator, at::kLong);
    });
    set_epoch.push_back(lockstep_seconds / torch_seconds);
    fmt::print("round {}: set_epoch {:.3f} s, torch::randperm {:.3f} s\n", round, lockstep_seconds,
               torch_seconds);
  }

  std::sort(make.begin(), make.end());
  const double share = 8.0 * static_cast<double>(samples) / ranks;
  fmt::print("{} samples, {} ranks: made in {:.4f} ms, peak memory {:.0f} MiB\n", samples, ranks,
             1e3 * make[make.size() / 2], memory("VmHWM") / (1 << 20));
  print_ratio("sampler-set-epoch", "lockstep/torch::randperm", set_epoch);
  print_ratio("sampler-memory", "kept/(8N/R)", {kept / share});
  return 0;
}
