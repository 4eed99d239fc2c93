// "ProcessGroupGloo.hpp was included earlier without USE_C10D_GLOO"
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/comm/gloo_comm.hpp"
