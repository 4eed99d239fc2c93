// The main of the tests of world/ that know nothing of LibTorch, so that ThreadSanitizer can run them.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#define CATCH_CONFIG_NO_POSIX_SIGNALS
#endif
#include "support/session.hpp"
#include "world/child_mode.hpp"

int main(int argc, char** argv) {
  if (const char* mode = std::getenv("LOCKSTEP_TEST_CHILD"))
    return lockstep_test::child_mode(mode, argc, argv);
  Catch::Session session;
  const int refused = session.applyCommandLine(argc, argv);
  return refused != 0 ? refused : lockstep_test::run(session);
}
