// The main of test programs that run whole on several ranks at once, on GPUs where they need those.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#define CATCH_CONFIG_NO_POSIX_SIGNALS  // a rank that is told to end has nothing to report
#endif
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/world/launch.hpp"
#include "support/ranks.hpp"
#include "support/ranks_filter.hpp"
#include "support/session.hpp"

#ifdef LOCKSTEP_TEST_NEEDS_GPUS
#include <ATen/cuda/CUDAContextLight.h>
#include <nccl.h>

// Says what is missing where these tests cannot run. Counting devices makes no context on any of them.
static bool lacks_gpus(int argc, char** argv) {
  const int gpus = at::cuda::device_count();
  int ranks = 1, nccl = 0;
  for (int i = 1; i + 1 < argc; ++i)
    if (argv[i] == std::string_view("--nproc")) ranks = std::atoi(argv[i + 1]);
  const char* shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  ncclGetVersion(&nccl);
  if (gpus == 0)
    std::puts("SKIPPED: no CUDA device: skipped");
  else if (ranks > gpus && (shares == nullptr || std::atoi(shares) == 0))
    std::printf("SKIPPED: %d CUDA devices for %d ranks: skipped\n", gpus, ranks);
  else if (ranks > gpus && nccl < 23000)  // the first in which ranks may share a GPU
    std::printf("SKIPPED: %d CUDA devices for %d ranks, and NCCL %d cannot share one: skipped\n", gpus, ranks,
                nccl);
  else
    return false;
  return true;
}
#endif

int main(int argc, char** argv) {
#ifdef LOCKSTEP_TEST_NEEDS_GPUS
  if (lacks_gpus(argc, argv)) return 77;  // ctest counts it as skipped
#endif
  const auto run = [&](const lockstep::World& world) {
    lockstep_test::world_of_tests() = world;
    std::vector<char*> arguments;  // without those of launch, which Catch2 does not know
    for (int i = 0; i < argc; ++i) {
      const std::string_view argument = argv[i];
      if (argument == "--nproc" || argument == "--prefix" || argument == "--timeout")
        ++i;
      else if (!argument.starts_with("--nproc=") && !argument.starts_with("--prefix=") &&
               !argument.starts_with("--timeout="))
        arguments.push_back(argv[i]);
    }
    char abort_at_first[] = "--abort";  // the other ranks cannot go on without this one
    arguments.push_back(abort_at_first);
    char order[] = "--order",
         declared[] = "decl";  // the same on every rank; newer versions of Catch2 draw one
    arguments.push_back(order);
    arguments.push_back(declared);
    Catch::Session session;
    const int refused = session.applyCommandLine(static_cast<int>(arguments.size()), arguments.data());
    if (refused != 0) return refused;
    const std::string left_out = lockstep_test::leave_out(session, world.size());
    if (world.rank() == 0 && !left_out.empty()) std::puts(left_out.c_str());
    return lockstep_test::run(session);
  };
  return lockstep::launch(argc, argv, run);
}
