// The suite of the communicators over a ProcessGroupGloo that the program holds.
#define LOCKSTEP_TEST_PROCESS_GROUP
#include "agreement_ranks_test.cpp"
#include "gloo_bytes_test.cpp"
#include "gloo_errors_test.cpp"
#include "gloo_gather_test.cpp"
#include "gloo_group_test.cpp"
#include "gloo_lists_test.cpp"
#include "gloo_message_test.cpp"
#include "gloo_reduce_test.cpp"
