// The main of test programs that run in one process.
#if !__has_include(<catch2/catch_all.hpp>)
#define CATCH_CONFIG_RUNNER
#endif
#include "support/session.hpp"

int main(int argc, char** argv) {
  Catch::Session session;
  const int refused = session.applyCommandLine(argc, argv);
  return refused != 0 ? refused : lockstep_test::run(session);
}
