// DistributedDataParallel's suite over a ProcessGroupGloo that the program holds, instead of CpuComm.
#define LOCKSTEP_TEST_PROCESS_GROUP
#include "failure_ranks_test.cpp"
#include "hooked_ranks_test.cpp"
#include "model_ranks_test.cpp"
#include "recovery_ranks_test.cpp"
