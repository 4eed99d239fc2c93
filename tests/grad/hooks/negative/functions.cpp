// Functions that are no communication hooks.
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/grad/hooks/hook.hpp"

void wrong(lockstep::LocalComm& comm, const lockstep::GradientBucket& bucket) {
  auto arguments = lockstep::hook_of([](const lockstep::GradientBucket& b) { return b.flat; });
  arguments.start(comm, bucket);
  auto result = lockstep::hook_of([](auto&, const lockstep::GradientBucket&) { return 1.0; });
  result.start(comm, bucket);
}
