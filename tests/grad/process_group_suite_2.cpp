// See process_group_suite.cpp.
#define LOCKSTEP_TEST_PROCESS_GROUP
#include "options_ranks_test.cpp"
#include "overlap_ranks_test.cpp"
#include "reduction_ranks_test.cpp"
