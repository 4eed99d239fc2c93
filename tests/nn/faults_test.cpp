// Ranks that do not come to a batch norm: all end, the cause is shown with the module, no process remains.
#include "support/catch.hpp"
#include "support/process.hpp"

namespace faults_test {

TEST_CASE("what one rank does not do at a batch norm ends all, and is told with the module") {
  const auto [mode, words] = GENERATE(
      table<std::string, std::string>({{"late", "SyncBatchNorm1d '1', forward"},
                                       {"late in backward", "SyncBatchNorm1d '4', backward"},
                                       {"shape", "SyncBatchNorm1d '1' takes an input [N, C] or [N, C, L]"}}));
  CAPTURE(mode);
  const auto ended =
      lockstep_test::run({lockstep_test::test_program("nn_fault_program"), "--nproc", "3", mode});
  CHECK(ended.code != 0);
  CHECK_THAT(ended.error, ContainsSubstring(words));
  CHECK(ended.left == 0);
}

}  // namespace faults_test
