#include "lockstep/comm/communicator.hpp"

#include <type_traits>

#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/comm/local_comm.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "support/catch.hpp"

namespace concepts_test {

using lockstep::GlooComm;
using lockstep::LocalComm;
using lockstep::ProcessGroupComm;

// Each communicator models what its header says, and a Work is a thing that moves.
static_assert(lockstep::Communicator<GlooComm> && lockstep::Communicator<LocalComm>);
static_assert(lockstep::Reducing<GlooComm> && lockstep::Reducing<LocalComm>);
static_assert(lockstep::Gathering<GlooComm> && lockstep::Gathering<LocalComm>);
static_assert(lockstep::Splittable<GlooComm> && lockstep::Splittable<LocalComm>);
static_assert(lockstep::PointToPoint<GlooComm> && !lockstep::PointToPoint<LocalComm>);
static_assert(lockstep::AsyncWork<lockstep::detail::ProcessGroupWork> &&
              lockstep::AsyncWork<lockstep::LocalWork>);
static_assert(lockstep::Reducing<ProcessGroupComm> && lockstep::Gathering<ProcessGroupComm> &&
              lockstep::PointToPoint<ProcessGroupComm> && lockstep::Splittable<ProcessGroupComm>);
static_assert(lockstep::DeviceCommunicator<ProcessGroupComm> && !lockstep::DeviceCommunicator<GlooComm>);
static_assert(!lockstep::Labelled<ProcessGroupComm>);
static_assert(!std::is_copy_constructible_v<GlooComm>);
static_assert(std::is_empty_v<lockstep::LocalWork>);
static_assert(!lockstep::Communicator<int> && !lockstep::AsyncWork<int>);

TEST_CASE("a default Work is complete") {
  lockstep::detail::ProcessGroupWork work;
  work.synchronize();
  work.wait();
  work.synchronize(std::chrono::milliseconds(0));
  CHECK(work.error() == nullptr);
}

}  // namespace concepts_test
