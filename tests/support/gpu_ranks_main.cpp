// ranks_main.cpp for tests that need a GPU a rank.
#define LOCKSTEP_TEST_NEEDS_GPUS
#include "ranks_main.cpp"
