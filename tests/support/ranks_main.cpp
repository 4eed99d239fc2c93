// The main of test programs that run whole on several ranks at once.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#define CATCH_CONFIG_NO_POSIX_SIGNALS  // a rank that is told to end has nothing to report
#endif
#include <string_view>
#include <vector>

#include "lockstep/world/launch.hpp"
#include "support/ranks.hpp"

int main(int argc, char** argv) {
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
