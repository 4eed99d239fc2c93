// The main of test programs that run whole on several ranks at once.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#define CATCH_CONFIG_NO_POSIX_SIGNALS  // a rank that is told to end has nothing to report
#endif
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "lockstep/world/devices.hpp"
#include "lockstep/world/launch.hpp"
#include "support/ranks.hpp"

namespace {

// A test of GPUs is skipped where there are none, or fewer than ranks, before anything is started.
[[maybe_unused]] bool lacks_gpus(int argc, char** argv) {
  const int gpus = lockstep::detail::visible_gpus();
  int ranks = 1;
  for (int i = 1; i + 1 < argc; ++i)
    if (std::string_view(argv[i]) == "--nproc") ranks = std::atoi(argv[i + 1]);
  if (gpus == 0)
    std::puts("no CUDA device: skipped");
  else if (ranks > gpus && !std::getenv("NCCL_MULTI_RANK_GPU_ENABLE"))
    std::printf("%d CUDA devices for %d ranks: skipped\n", gpus, ranks);
  else
    return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
#ifdef LOCKSTEP_TEST_NEEDS_GPUS
  if (lacks_gpus(argc, argv)) return 77;
#endif
  const auto run = [&](const lockstep::World& world) {
    lockstep_test::world_of_tests() = world;
    std::vector<char*> arguments;  // without those of launch, which Catch2 does not know
    for (int i = 0; i < argc; ++i) {
      const std::string_view argument = argv[i];
      if (argument == "--nproc" || argument == "--prefix")
        ++i;
      else if (!argument.starts_with("--nproc=") && !argument.starts_with("--prefix="))
        arguments.push_back(argv[i]);
    }
    char abort_at_first[] = "--abort";  // the other ranks cannot go on without this one
    arguments.push_back(abort_at_first);
    char order[] = "--order",
         declared[] = "decl";  // the same on every rank; newer versions of Catch2 draw one
    arguments.push_back(order);
    arguments.push_back(declared);
    return Catch::Session().run(static_cast<int>(arguments.size()), arguments.data());
  };
  return lockstep::launch(argc, argv, run);
}
