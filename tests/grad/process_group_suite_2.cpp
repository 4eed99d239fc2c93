// See process_group_suite.cpp.
#define LOCKSTEP_TEST_PROCESS_GROUP
#include "low_precision_parameters_ranks_test.cpp"
#include "options_ranks_test.cpp"
#include "overlap_ranks_test.cpp"
#include "reduction_ranks_test.cpp"
