// Compiled with another nccl.h than LibTorch: NcclComm refuses it, before LibTorch writes past an object.
#include <cstdio>
#include <string>

#include "lockstep/comm/nccl_comm.hpp"

int main() {
  try {
    lockstep::NcclComm comm{lockstep::World()};
  } catch (const lockstep::UsageError& error) {
    std::puts(error.what());
    const std::string text = error.what();
    return text.find("this program was compiled with the nccl.h of NCCL") == std::string::npos ? 1 : 0;
  }
  return 2;
}
