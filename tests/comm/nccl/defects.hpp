#pragma once

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_device.hpp"

namespace lockstep_test {

/// A FakeDevice with a defect: what a communicator does through it, it does wrongly, as if the communicator
/// had been written so. Each defect is one that a seam test must find.
template <class Defect>
struct Broken : FakeDevice {
  explicit Broken(FakeDevice device) : FakeDevice(std::move(device)) {}
  static Defect open(const lockstep::World& world, std::optional<int> index) {
    return Defect(FakeDevice::open(world, index));
  }
};

/// The communicator's stream does not wait for the operators before a collective.
struct NoEventBefore : Broken<NoEventBefore> {
  using Broken::Broken;
  void wait(Stream stream, Event event) const {
    if (stream == current_stream()) FakeDevice::wait(stream, event);
  }
};

/// The operators do not wait for the collective that was joined.
struct NoEventBehind : Broken<NoEventBehind> {
  using Broken::Broken;
  void wait(Stream stream, Event event) const {
    if (stream != current_stream()) FakeDevice::wait(stream, event);
  }
};

/// The event behind a collective is recorded while NCCL has not put it into the stream yet.
struct EventTooEarly : Broken<EventTooEarly> {
  using Broken::Broken;
  NcclResult group_end() const {
    FakeDevice::group_end();
    return NcclResult::success;
  }
};

/// Copies around a collective go to the operators' stream, which waits for nobody.
struct CopyOnWrongStream : Broken<CopyOnWrongStream> {
  using Broken::Broken;
  void copy(Stream, const at::Tensor& to, const at::Tensor& from) const {
    FakeDevice::copy(current_stream(), to, from);
  }
};

/// Tensors are let go of before the collective has been seen to be complete.
struct FreedEarly : Broken<FreedEarly> {
  using Broken::Broken;
  bool done(Event) const { return true; }
};

/// A buffer is no longer registered, but NCCL is not told so.
struct NotDeregistered : Broken<NotDeregistered> {
  using Broken::Broken;
  NcclResult deregister_buffer(Comm, void*) const { return NcclResult::success; }
};

/// A registration ends as soon as it has begun.
struct DeregisteredEarly : Broken<DeregisteredEarly> {
  using Broken::Broken;
  NcclResult register_buffer(Comm comm, void* memory, std::size_t bytes, void*& registration) const {
    const NcclResult result = FakeDevice::register_buffer(comm, memory, bytes, registration);
    FakeDevice::deregister_buffer(comm, registration);
    return result;
  }
  NcclResult deregister_buffer(Comm, void*) const { return NcclResult::success; }
};

/// Buffers are never given back.
struct BufferLeft : Broken<BufferLeft> {
  using Broken::Broken;
  void free_buffer(void*) const {}
};

/// One rank issues what belongs to a group in another order than the others.
struct WrongGroupOrder : Broken<WrongGroupOrder> {
  using Broken::Broken;
  NcclResult group_end() const {
    if (rank_ == 1 && open_group()) std::reverse(open_group()->parts.begin(), open_group()->parts.end());
    return FakeDevice::group_end();
  }
};

/// A communicator is aborted between two of the calls on it, and used by the second.
struct UsedAfterAbort : Broken<UsedAfterAbort> {
  using Broken::Broken;
  NcclResult group_end() const {
    if (open_group() && !open_group()->parts.empty()) FakeDevice::abort(open_group()->parts[0].rank);
    return FakeDevice::group_end();
  }
};

/// When a timeout has passed, nothing is done to what is in flight.
struct DeadlineIgnored : Broken<DeadlineIgnored> {
  using Broken::Broken;
  void abort(Comm) const {}
};

/// The abort waits until the program's thread has come out of a launch, as for a lock that is held meanwhile.
struct AbortBehindLaunch : Broken<AbortBehindLaunch> {
  using Broken::Broken;
  void abort(Comm comm) const {
    try {
      machine_->synchronize(current_stream());
    } catch (const std::exception&) {  // it is in the log
    }
    FakeDevice::abort(comm);
  }
};

/// No defect of a communicator, but a device that a communicator must stand: a launch returns when the
/// collective has ended.
struct BlockedLaunch : Broken<BlockedLaunch> {
  using Broken::Broken;
  NcclResult group_end() const {
    if (!open_group() || open_group()->parts.empty()) return FakeDevice::group_end();
    const Comm comm = open_group()->parts[0].rank;
    const Stream stream = open_group()->stream;
    FakeDevice::group_end();
    while (FakeDevice::state(comm) == NcclResult::in_progress) std::this_thread::yield();
    machine_->synchronize(stream);
    return NcclResult::success;
  }
};

/// The same: while one thread's call blocks, the driver answers no other thread.
struct LockedDriver : Broken<LockedDriver> {
  using Broken::Broken;
  static std::mutex& driver() {
    static std::mutex one;
    return one;
  }
  bool done(Event event) const {
    const std::lock_guard lock(driver());
    return FakeDevice::done(event);
  }
};

/// What NCCL says is not heard.
struct ErrorSwallowed : Broken<ErrorSwallowed> {
  using Broken::Broken;
  NcclResult state(Comm comm) const {
    const NcclResult result = FakeDevice::state(comm);
    return result == NcclResult::in_progress ? result : NcclResult::success;
  }
};

}  // namespace lockstep_test
