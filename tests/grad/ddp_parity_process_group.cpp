// The program of ddp_parity over a ProcessGroupGloo that it holds, instead of CpuComm.
#define LOCKSTEP_TEST_PROCESS_GROUP
#include "ddp_parity_program.cpp"
