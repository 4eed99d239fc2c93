#include <cuda_runtime_api.h>
#include <nccl.h>
#include <torch/torch.h>

#include <fstream>
#include <set>
#include <string>

#include "support/ranks.hpp"

namespace {

// The files with this in their names that are mapped into this process.
std::set<std::string> loaded(const std::string& name) {
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("/" + name) != std::string::npos) files.insert(line.substr(line.find('/')));
  return files;
}

}  // namespace

TEST_CASE("the process has one CUDA runtime and at most one NCCL library", "[gpu]") {
  int version = 0;
  REQUIRE(ncclGetVersion(&version) == ncclSuccess);
  CHECK(version >= NCCL_VERSION_CODE);
  int runtime = 0;
  REQUIRE(cudaRuntimeGetVersion(&runtime) == cudaSuccess);
  CHECK(runtime / 1000 == CUDART_VERSION / 1000);
  CHECK(loaded("libcudart").size() == 1);
  CHECK(loaded("libnccl.so").size() <= 1);
}

TEST_CASE("LibTorch's kernels for CUDA are there", "[gpu]") {
  const torch::Tensor sum = torch::arange(8, torch::kCUDA).sum();
  CHECK(sum.is_cuda());
  CHECK(sum.item<int>() == 28);
}
