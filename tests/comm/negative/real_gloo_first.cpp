// What Gloo's own gloo/common/error.h leaves behind in a file that includes it.
#define GLOO_ERROR_MSG(...) ::gloo::MakeString(__VA_ARGS__)

#include "lockstep/comm/gloo_comm.hpp"
