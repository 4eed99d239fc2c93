#pragma once

#include <pthread.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fake_machine.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"

namespace lockstep_test {

/// The GPU of a rank of a FakeMachine, as a communicator sees one. It refuses, and enters as a violation,
/// whatever the contract of NcclDevice forbids.
class FakeDevice {
 public:
  using Comm = FakeRank*;
  using Stream = FakeMachine::Stream*;
  using Event = FakeMachine::Event*;

  /// What a test makes go wrong, by rank.
  struct Faults {
    std::map<int, std::string> no_device;                     // what open says
    std::map<int, std::string> identity;                      // another name
    std::map<int, int> version;                               // of NCCL
    std::map<int, bool> shares;                               // whether the user lets it share its GPU
    std::map<int, NcclResult> init;                           // what init answers
    std::map<int, std::pair<NcclResult, std::string>> group;  // what group_end answers
    std::map<int, std::string> memory;                        // what allocate says
    std::map<int, std::string> buffers;                       // what allocate_buffer says
    std::map<int, NcclResult> registration;                   // what register_buffer answers
  };
  static Faults& faults() {
    static Faults all;
    return all;
  }

  static FakeDevice open(const lockstep::World& world, std::optional<int> /*index*/) {
    const auto fault = faults().no_device.find(world.rank());
    if (fault != faults().no_device.end()) throw lockstep::UsageError(fault->second, world.rank());
    return FakeDevice(FakeMachine::seat().machine, world.rank());
  }
  void enter_thread() const { machine_->sit(rank_, "the watchdog", false); }
  std::string name() const { return fmt::format("fake:{}", rank_); }
  std::string identity() const {
    const auto fault = faults().identity.find(rank_);
    return fault == faults().identity.end() ? fmt::format("host/{}", rank_) : fault->second;
  }
  int version() const {
    const auto fault = faults().version.find(rank_);
    return fault == faults().version.end() ? 22706 : fault->second;
  }
  bool shares_devices() const {
    const auto fault = faults().shares.find(rank_);
    return fault != faults().shares.end() && fault->second;
  }

  Stream make_stream() const {
    ++machine_->streams_left;
    return machine_->make_stream(rank_, "the communicator's stream");
  }
  void destroy_stream(Stream) const { --machine_->streams_left; }
  Stream current_stream() const { return FakeMachine::seat().current; }
  bool capturing(Stream stream) const { return machine_->capturing(stream); }
  Event make_event() const {
    machine_->throw_if_broken(rank_, "make_event");
    return machine_->make_event();
  }
  void destroy_event(Event event) const { machine_->destroy_event(event); }
  void record(Event event, Stream stream) const {
    machine_->throw_if_broken(rank_, "record");
    machine_->record(event, stream);
  }
  void wait(Stream stream, Event event) const {
    machine_->throw_if_broken(rank_, "wait");
    machine_->wait(stream, event);
  }
  bool done(Event event) const {
    machine_->throw_if_broken(rank_, "done");
    return machine_->done(event);
  }

  bool holds(const at::Tensor& tensor) const { return machine_->holds(tensor); }
  at::Tensor allocate(Stream stream, at::IntArrayRef sizes, at::ScalarType type) const {
    const auto fault = faults().memory.find(rank_);
    if (fault != faults().memory.end()) throw std::runtime_error(fault->second);
    auto& seat = FakeMachine::seat();
    const Stream before = std::exchange(seat.current, stream);
    const auto tracked = TrackedMemory::of_this_thread();
    if (tracked.on_free) machine_->track_memory();
    auto tensor = at::empty(sizes, at::TensorOptions(type));
    seat.current = before;
    TrackedMemory::of_this_thread() = tracked;
    return tensor;
  }
  void copy(Stream stream, const at::Tensor& to, const at::Tensor& from) const {
    machine_->throw_if_broken(rank_, "copy");
    machine_->issue(stream, "a copy", {from}, {to}, [to = view(to), from = view(from)]() mutable {
      const at::NoGradGuard no_grad;
      to.copy_(from);
    });
  }
  at::Tensor upload(const at::Tensor& tensor) const {
    machine_->forbid_in_capture(current_stream(), "an upload");
    at::Tensor there = at::empty_like(tensor);
    const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
    machine_->issue(current_stream(), "an upload", {}, {there},
                    [to = there.mutable_data_ptr(), from = std::string(bytes, tensor.nbytes())] {
                      std::memcpy(to, from.data(), from.size());
                    });
    return there;
  }
  at::Tensor download(const at::Tensor& tensor) const {
    machine_->issue(current_stream(), "a download", {tensor}, {}, [] {});
    machine_->synchronize(current_stream());
    return tensor.clone();
  }

  bool has_buffers() const { return version() >= 21900; }
  void* allocate_buffer(std::size_t bytes) const {
    const auto fault = faults().buffers.find(rank_);
    if (fault != faults().buffers.end()) throw std::runtime_error(fault->second);
    return machine_->with_buffers([&](FakeBuffers& buffers, int) { return buffers.allocate(bytes); });
  }
  void free_buffer(void* memory) const {
    machine_->with_buffers([&](FakeBuffers& buffers, int host) { return buffers.free(memory, host); });
  }
  NcclResult register_buffer(Comm comm, void* memory, std::size_t bytes, void*& registration) const {
    const auto fault = faults().registration.find(rank_);
    if (fault != faults().registration.end()) return fault->second;
    if (comm->gone)
      return machine_->with_cliques([&](FakeCliques& cliques) { return cliques.misuse(comm, "used"); });
    registration =
        machine_->with_buffers([&](FakeBuffers& buffers, int) { return buffers.add(comm, memory, bytes); });
    return NcclResult::success;
  }
  NcclResult deregister_buffer(Comm comm, void* registration) const {
    if (comm->gone)
      return machine_->with_cliques([&](FakeCliques& cliques) { return cliques.misuse(comm, "used"); });
    machine_->with_buffers(
        [&](FakeBuffers& buffers, int host) { return buffers.remove(comm, registration, host); });
    return NcclResult::success;
  }

  std::string make_id() const { return fmt::format("clique of {}", static_cast<const void*>(new char)); }
  NcclResult init(Comm& made, int size, const std::string& id, int rank) const {
    forbid_frame(&made);
    if (const auto fault = faults().init.find(rank_); fault != faults().init.end()) return fault->second;
    return machine_->with_cliques([&](FakeCliques& cliques) {
      made = cliques.join(id, size, rank, rank_);
      return NcclResult::in_progress;
    });
  }
  NcclResult split(Comm& made, Comm comm, int colour, int /*key*/) const {
    forbid_frame(&made);
    return machine_->with_cliques([&](FakeCliques& cliques) {
      if (comm->gone) return cliques.misuse(comm, "split");
      cliques.split(comm, colour, rank_, &made);
      return NcclResult::in_progress;
    });
  }
  NcclResult state(Comm comm) const {
    return machine_->with_cliques([&](FakeCliques& cliques) { return cliques.state(comm); });
  }
  std::string last_error(Comm comm) const { return comm->words; }
  NcclResult finalize(Comm comm) const {
    return machine_->with_cliques([&](FakeCliques& cliques) {
      if (comm->gone) return cliques.misuse(comm, "finalized");
      if (comm->launch)
        machine_->complain_locked("a communicator was finalized while another call was in progress");
      comm->finalized = true;
      comm->delay = 1;
      comm->launch = [] {};
      return NcclResult::in_progress;
    });
  }
  void destroy(Comm comm) const {
    machine_->with_cliques([&](FakeCliques& cliques) {
      if (comm->gone) return cliques.misuse(comm, "destroyed");
      if (!comm->finalized) machine_->complain_locked("a communicator was destroyed before finalize");
      if (machine_->buffers().any(comm))
        machine_->complain_locked("a communicator was destroyed while memory is registered with it");
      comm->gone_by = "destroy";
      comm->gone = true;
      return NcclResult::success;
    });
  }
  void abort(Comm comm) const {
    machine_->with_cliques([&](FakeCliques& cliques) {
      if (comm->gone) return cliques.misuse(comm, "aborted");
      if (comm->job) std::exchange(comm->job, nullptr)();  // NCCL waits for it
      comm->gone_by = "abort";
      comm->gone = true;
      machine_->buffers().forget(comm);
      return NcclResult::success;
    });
  }

  NcclResult group_start() const {
    open_group().emplace();
    return NcclResult::success;
  }
  NcclResult group_end() const {
    auto group = std::move(open_group());
    open_group().reset();
    if (!group) {
      machine_->complain("group_end without group_start");
      return NcclResult::invalid_usage;
    }
    if (const auto fault = faults().group.find(rank_);
        fault != faults().group.end() && !group->parts.empty()) {
      group->parts[0].rank->words = fault->second.second;
      return fault->second.first;
    }
    if (group->parts.empty()) return NcclResult::success;
    return machine_->with_cliques([&](FakeCliques& cliques) {
      FakeRank* rank = group->parts[0].rank;
      if (rank->gone) return cliques.misuse(rank, "used");
      if (rank->launch)
        machine_->complain_locked("a communicator was used while another call was in progress");
      auto call = std::make_shared<FakeGroupCall>(std::move(group->call));
      call->parts = std::move(group->parts);
      rank->delay = machine_->launch_delay;
      rank->launch = [machine = machine_, stream = group->stream, call] {
        machine->issue_group(stream, call);
      };
      if (rank->delay > 0) return NcclResult::in_progress;
      std::exchange(rank->launch, nullptr)();
      return NcclResult::success;
    });
  }

  NcclResult all_reduce(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                        at::ScalarType type, ReduceOp op) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream, {FakePart::Kind::all_reduce, comm, from, to, bytes, bytes, count, type, op});
  }
  NcclResult reduce(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                    at::ScalarType type, ReduceOp op, int root) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream, {FakePart::Kind::reduce, comm, from, to, bytes, bytes, count, type, op, root});
  }
  NcclResult reduce_scatter(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                            at::ScalarType type, ReduceOp op) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream,
               {FakePart::Kind::reduce_scatter, comm, from, to, bytes * size(comm), bytes, count, type, op});
  }
  NcclResult broadcast(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                       at::ScalarType type, int root) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream,
               {FakePart::Kind::broadcast, comm, from, to, bytes, bytes, count, type, ReduceOp::sum, root});
  }
  NcclResult all_gather(Comm comm, Stream stream, const void* from, void* to, std::size_t count,
                        at::ScalarType type) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream, {FakePart::Kind::all_gather, comm, from, to, bytes, bytes * size(comm), count, type});
  }
  NcclResult send(Comm comm, Stream stream, const void* from, std::size_t count, at::ScalarType type,
                  int peer) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream,
               {FakePart::Kind::send, comm, from, nullptr, bytes, 0, count, type, ReduceOp::sum, peer});
  }
  NcclResult recv(Comm comm, Stream stream, void* to, std::size_t count, at::ScalarType type,
                  int peer) const {
    const auto bytes = count * c10::elementSize(type);
    return add(stream, {FakePart::Kind::recv, comm, nullptr, to, 0, bytes, count, type, ReduceOp::sum, peer});
  }

  /// NCCL finds, by itself, that something is wrong with every communicator of this rank.
  static void inject(FakeMachine& machine, int rank, NcclResult error, const std::string& words) {
    machine.with_cliques([&](FakeCliques& cliques) {
      cliques.for_each_of(rank, [&](FakeRank& one) {
        one.error = error;
        one.words = words;
      });
      return 0;
    });
  }

 protected:
  struct OpenGroup {
    FakeGroupCall call;
    std::vector<FakePart> parts;
    Stream stream = nullptr;
  };
  static std::optional<OpenGroup>& open_group() {
    thread_local std::optional<OpenGroup> group;
    return group;
  }
  FakeDevice(FakeMachine* machine, int rank) : machine_(machine), rank_(rank) {}

  // A job of NCCL's writes to it when the function that asked for it may have thrown.
  void forbid_frame(const Comm* made) const {
    pthread_attr_t attributes;
    void* stack = nullptr;
    std::size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &bytes);
    pthread_attr_destroy(&attributes);
    const auto* begin = static_cast<const char*>(stack);
    const auto* there = reinterpret_cast<const char*>(made);
    if (begin <= there && there < begin + bytes)
      machine_->complain("a communicator is to be made in the frame of a function");
  }

  static std::size_t size(Comm comm) { return static_cast<std::size_t>(comm->clique->size); }
  NcclResult add(Stream stream, FakePart part) const {
    if (part.rank->gone)
      return machine_->with_cliques([&](FakeCliques& cliques) { return cliques.misuse(part.rank, "used"); });
    if (!open_group()) {
      machine_->complain(part.text() + " outside of a group");
      return NcclResult::invalid_usage;
    }
    open_group()->parts.push_back(part);
    open_group()->stream = stream;
    return NcclResult::success;
  }
  // Work that is done later owns nothing: whoever issued it must see to that.
  static at::Tensor view(const at::Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                         at::TensorOptions(tensor.scalar_type()));
  }

  FakeMachine* machine_;
  int rank_;
};

static_assert(lockstep::detail::NcclDevice<FakeDevice>);

}  // namespace lockstep_test
