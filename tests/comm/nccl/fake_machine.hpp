#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "fake_buffers.hpp"
#include "fake_clique.hpp"
#include "fake_graph.hpp"
#include "fake_memory.hpp"
#include "happens_before.hpp"

namespace lockstep_test {

/// A machine with a GPU for each rank, whose ranks are threads of this process. The memory of its GPUs is the
/// host's, and the numbers are real.
///
/// What is issued to a stream is done at some later time: when somebody asks or waits, and then on the
/// communicators' streams first, so that what nothing orders happens in the wrong order. Beside that, every
/// access is entered in the log, which knows without luck which accesses nothing orders.
///
/// Where `eager` is set, the stream of the operators does all at once, as LibTorch's operators on CPU tensors
/// really do: programs that know nothing of this machine run on it.
class FakeMachine {
 public:
  explicit FakeMachine(bool eager = false) : eager(eager) { TrackedMemory::instance(); }
  ~FakeMachine() {
    TrackedMemory::instance().forget(this);
    for (const auto& [memory, bytes] : freed_) TrackedMemory::instance().discard(memory);
    for (void* memory : pooled_) TrackedMemory::instance().discard(memory);
  }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  const bool eager;
  /// How often a communicator says that it is in progress before what was issued is in its stream.
  int launch_delay = 2;
  /// How long a thread may wait for a stream before that counts as for ever.
  std::chrono::milliseconds timeout = std::chrono::seconds(10);

  using Graph = FakeGraph;
  using Event = FakeEvent;
  using Stream = FakeStream;
  using Operation = FakeStream::Operation;

  /// Where a thread sits: its rank, its place in the log and its current stream.
  struct Seat {
    FakeMachine* machine = nullptr;
    int rank = 0;
    int actor = 0;
    Stream* current = nullptr;
  };
  static Seat& seat() {
    thread_local Seat own;
    return own;
  }

  /// Seats this thread at a rank; the first of a rank brings the stream of its operators.
  void sit(int rank, const std::string& name, bool with_stream) {
    std::unique_lock lock(mutex_);
    Seat& own = seat();
    own = {this, rank, log_.add_actor(fmt::format("{} of rank {}", name, rank)), nullptr};
    if (with_stream) own.current = add_stream(rank, "the operators' stream", eager);
    // As of any thread that has chosen none.
    for (auto& stream : streams_)
      if (stream->rank == rank && !own.current) own.current = stream.get();
  }
  /// The memory of the tensors that this thread makes from now on is its GPU's.
  void track_memory() {
    Stream* owner = seat().current;
    TrackedMemory::of_this_thread() = {
        0, this, [this, owner](void* memory, std::size_t bytes) { return release(memory, bytes, owner); },
        [this, owner](void* memory, std::size_t bytes) {
          std::unique_lock lock(mutex_);
          if (owner->graph) owner->graph->pool.emplace_back(memory, bytes);
        }};
  }
  void leave() {
    TrackedMemory::of_this_thread() = {};
    seat() = {};
  }

  Stream* make_stream(int rank, const std::string& name) {
    std::unique_lock lock(mutex_);
    return add_stream(rank, name, false);
  }

  /// Issues work to a stream: what it reads and writes goes into the log, and `run` is called some time
  /// later.
  void issue(Stream* stream, const std::string& what, const std::vector<at::Tensor>& reads,
             const std::vector<at::Tensor>& writes, std::function<void()> run) {
    std::unique_lock lock(mutex_);
    log_.issue(actor(), stream->actor);
    Graph::Node node{what, {}, {}, std::move(run), nullptr};
    for (const at::Tensor& tensor : reads) node.reads.emplace_back(tensor.const_data_ptr(), extent(tensor));
    for (const at::Tensor& tensor : writes) node.writes.emplace_back(tensor.const_data_ptr(), extent(tensor));
    if (stream->graph) return stream->graph->nodes.push_back(std::move(node));
    push(lock, stream, operation_of(stream, node));
    drain_immediate(lock, stream);
  }

  void record(Event* event, Stream* stream) {
    std::unique_lock lock(mutex_);
    log_.issue(actor(), stream->actor);
    auto record = std::make_shared<Event::Record>();
    record->clock = log_.clock(stream->actor);
    record->graph = stream->graph;
    event->last = record;
    if (!stream->graph) push(lock, stream, {"record", [record] { return record->done = true; }, {}});
  }
  void wait(Stream* stream, Event* event) {
    std::unique_lock lock(mutex_);
    log_.issue(actor(), stream->actor);
    if (!event->last) return;  // CUDA has nothing to wait for in an event that was never recorded
    log_.learn(stream->actor, event->last->clock);
    if (Graph* graph = event->last->graph) {
      if (graph->complete)
        return log_.complain("a stream waits for an event of a graph whose capture is over");
      stream->graph = graph;  // it belongs to the capture from here on
      return;
    }
    if (stream->graph) return log_.complain("a stream that is captured waits for an event of none");
    push(lock, stream, {"wait", [record = event->last] { return record->done; }, {}});
    drain_immediate(lock, stream);
  }
  bool capturing(const Stream* stream) {
    std::unique_lock lock(mutex_);
    return stream->graph != nullptr;
  }
  /// What CUDA does not allow of a stream that is being captured.
  void forbid_in_capture(const Stream* stream, const std::string& what) {
    if (!capturing(stream)) return;
    complain(what + " in a capture");
    throw std::runtime_error("operation not permitted when stream is capturing");
  }

  /// From now on the stream is captured, and what waits for it.
  Graph* begin_capture(Stream* stream) {
    std::unique_lock lock(mutex_);
    graphs_.push_back(std::make_unique<Graph>());
    return stream->graph = graphs_.back().get();
  }
  void end_capture(Graph* graph) {
    std::unique_lock lock(mutex_);
    graph->complete = true;
    for (auto& stream : streams_)
      if (stream->graph == graph) stream->graph = nullptr;
  }
  /// Gives the stream all that was captured, one after the other.
  void replay(const Graph* graph, Stream* stream) {
    std::unique_lock lock(mutex_);
    log_.issue(actor(), stream->actor);
    if (!graph->freed.empty())
      return log_.complain("a graph is replayed that uses memory which was freed for " + graph->freed);
    for (const Graph::Node& node : graph->nodes) {
      if (node.group) {
        FakeRank* rank = node.group->parts[0].rank;
        if (rank->gone) cliques_.misuse(rank, "used by a graph");
        rank->actor = stream->actor;
      }
      push(lock, stream, operation_of(stream, node));
    }
  }
  bool done(Event* event) {
    std::unique_lock lock(mutex_);
    if (event->last && event->last->graph) {
      log_.complain("a captured event is asked whether it is done");
      throw std::runtime_error("operation not permitted on an event last recorded in a capturing stream");
    }
    work();
    if (event->last && !event->last->done) return false;
    if (!event->last) return true;
    log_.learn(actor(), event->last->clock);
    seen_[seat().rank].learn(event->last->clock);
    return true;
  }
  /// Blocks until the stream is empty, as reading a result on the host does.
  void synchronize(Stream* stream) {
    forbid_in_capture(stream, "the host waits for a stream");
    std::unique_lock lock(mutex_);
    await(lock, fmt::format("the host waits for {}", log_.name(stream->actor)),
          [&] { return stream->operations.empty(); });
    log_.learn(actor(), log_.clock(stream->actor));
  }

  /// The streams of a rank do nothing more until `thaw`.
  void freeze(int rank) {
    std::unique_lock lock(mutex_);
    frozen_.insert(rank);
  }
  void thaw(int rank) {
    std::unique_lock lock(mutex_);
    frozen_.erase(rank);
    changed_.notify_all();
  }

  /// The tensor is not on its rank's GPU.
  void put_elsewhere(const at::Tensor& tensor) {
    std::unique_lock lock(mutex_);
    elsewhere_.insert(tensor.const_data_ptr());
  }
  bool holds(const at::Tensor& tensor) {
    std::unique_lock lock(mutex_);
    return tensor.device().is_cpu() && !elsewhere_.contains(tensor.const_data_ptr());
  }

  void complain(const std::string& text) {
    std::unique_lock lock(mutex_);
    log_.complain(text);
  }
  [[nodiscard]] std::vector<std::string> violations() {
    std::unique_lock lock(mutex_);
    return log_.violations();
  }

  /// Runs `use(buffers, host)` under the machine's lock, where `host` is this thread in the log.
  template <class Use>
  auto with_buffers(Use&& use) {
    std::unique_lock lock(mutex_);
    // Whoever gives back comes after what any thread of its rank has seen to be done.
    log_.learn(actor(), seen_[seat().rank]);
    return use(buffers_, actor());
  }
  /// From now on what this rank asks of CUDA by this name ("record", "wait", "done", "copy") throws.
  void break_device(int rank, const std::string& what, const std::string& text) {
    std::unique_lock lock(mutex_);
    broken_[{rank, what}] = text;
  }
  void throw_if_broken(int rank, const std::string& what) {
    std::unique_lock lock(mutex_);
    const auto found = broken_.find({rank, what});
    if (found != broken_.end()) throw std::runtime_error(found->second);
  }

  Event* make_event() {
    std::unique_lock lock(mutex_);
    ++events_made;
    ++events_left;
    return new Event();
  }
  void destroy_event(Event* event) {
    std::unique_lock lock(mutex_);
    --events_left;
    delete event;
  }
  /// Of all ranks so far, and those that nobody has destroyed.
  int events_made = 0, events_left = 0;
  /// How many streams of communicators nobody has destroyed.
  std::atomic<int> streams_left{0};

  /// How many communicators nobody has destroyed or aborted.
  [[nodiscard]] int communicators_left() {
    std::unique_lock lock(mutex_);
    return cliques_.left();
  }
  /// How many of NCCL's buffers nobody has given back.
  [[nodiscard]] int buffers_left() {
    std::unique_lock lock(mutex_);
    return buffers_.left();
  }

  /// Runs `use(cliques)` under the machine's lock; what it issues goes through `issue_group`.
  template <class Use>
  auto with_cliques(Use&& use) {
    std::unique_lock lock(mutex_);
    work();
    auto result = use(cliques_);
    if (work()) changed_.notify_all();
    return result;
  }
  /// A group of a rank's calls goes into its stream. Under the lock (see with_cliques).
  void issue_group(Stream* stream, const std::shared_ptr<FakeGroupCall>& group) {
    log_.issue(actor(), stream->actor);
    Graph::Node node{group->text(), {}, {}, {}, group};
    if (stream->graph) return stream->graph->nodes.push_back(std::move(node));
    for (const FakePart& part : group->parts) part.rank->actor = stream->actor;
    stream->operations.push_back(operation_of(stream, node));
  }
  [[nodiscard]] FakeCliques& cliques() { return cliques_; }
  [[nodiscard]] FakeBuffers& buffers() { return buffers_; }  // under the lock

  /// The sentence about what the machine could not forgive, for a program that should have given none.
  void complain_locked(const std::string& text) { log_.complain(text); }

 private:
  int actor() {
    Seat& own = seat();
    if (own.machine != this) own = {this, -1, log_.add_actor("a thread of the host"), nullptr};
    return own.actor;
  }
  Stream* add_stream(int rank, const std::string& name, bool immediate) {
    auto stream = std::make_unique<Stream>();
    stream->rank = rank;
    stream->actor = log_.add_actor(fmt::format("{} of rank {}", name, rank));
    stream->immediate = immediate;
    streams_.push_back(std::move(stream));
    return streams_.back().get();
  }
  // What a stream is given, with its accesses in the log.
  Operation operation_of(Stream* stream, const Graph::Node& node) {
    Operation operation{node.what, {}, {}};
    if (!node.group) {
      operation.run = [run = node.run] { return run(), true; };
      for (const auto& [memory, bytes] : node.reads) note(stream, operation, memory, bytes, false, node.what);
      for (const auto& [memory, bytes] : node.writes) note(stream, operation, memory, bytes, true, node.what);
      return operation;
    }
    const auto group = node.group->again();
    operation.run = [this, group] { return cliques_.advance(*group); };
    for (FakeRank* rank : FakeCliques::ranks_of(*group)) ++rank->outstanding;
    for (const FakePart& part : group->parts) {
      buffers_.use(part.rank, part.from, part.bytes_read, part.text());
      buffers_.use(part.rank, part.to, part.bytes_written, part.text());
      note(stream, operation, part.from, part.bytes_read, false, part.text());
      note(stream, operation, part.to, part.bytes_written, true, part.text());
    }
    return operation;
  }
  void note(Stream* stream, Operation& operation, const void* memory, std::size_t bytes, bool writes,
            const std::string& what) {
    log_.access(stream->actor, memory, bytes, writes, what);
    buffers_.use(nullptr, memory, bytes, what);
    if (bytes > 0) operation.memory.emplace_back(memory, bytes);
  }
  // From the first element to the last, whatever lies between them.
  static std::size_t extent(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return 0;
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return static_cast<std::size_t>(last + 1) * tensor.element_size();
  }

  static void push(std::unique_lock<std::mutex>& /*held*/, Stream* stream, Operation operation) {
    stream->operations.push_back(std::move(operation));
  }
  // An eager stream has nothing left when the next operator comes.
  void drain_immediate(std::unique_lock<std::mutex>& lock, Stream* stream) {
    if (!stream->immediate) return;
    await(lock, fmt::format("an operator of rank {} waits", stream->rank),
          [&] { return stream->operations.empty(); });
    log_.learn(actor(), log_.clock(stream->actor));
  }

  template <class Done>
  void await(std::unique_lock<std::mutex>& lock, const std::string& what, Done&& done) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (work(); !done(); work()) {
      if (std::chrono::steady_clock::now() >= end) {
        log_.complain(what + ", and nothing ends that");
        for (auto& stream : streams_) stream->operations.clear();
        cliques_.end_all();
        throw std::runtime_error(what + ", and nothing ends that");
      }
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  // Does all that can be done now, the newest streams first. True if anything was.
  bool work() {
    const auto tracked = std::exchange(TrackedMemory::of_this_thread(), {});  // temporaries are the fake's
    bool any = false;
    for (bool more = true; more;) {
      more = false;
      for (auto stream = streams_.rbegin(); stream != streams_.rend(); ++stream) {
        auto& operations = (*stream)->operations;
        while (!operations.empty() && !frozen_.contains((*stream)->rank) && operations.front().run()) {
          operations.pop_front();
          more = any = true;
        }
      }
    }
    if (any) discard_free();
    TrackedMemory::of_this_thread() = tracked;
    return any;
  }

  // Memory that an operation still to come uses is kept: what is wrong with that is in the log.
  bool release(void* memory, std::size_t bytes, Stream* owner) {
    std::unique_lock lock(mutex_);
    for (const auto& graph : graphs_)
      if (graph->owns(memory, bytes)) {  // and goes on doing so
        pooled_.push_back(memory);
        return true;
      }
    // Whoever drops the last reference comes after those who dropped theirs, and what they had seen.
    log_.learn(actor(), seen_[owner->rank]);
    log_.release(memory, bytes, actor(), owner->actor);
    buffers_.given_back(memory, bytes);
    for (const auto& graph : graphs_)
      if (graph->uses(memory, bytes)) graph->freed = log_.name(owner->actor);
    if (!in_use(memory, bytes)) return false;
    freed_.emplace_back(memory, bytes);
    return true;
  }
  [[nodiscard]] bool in_use(const void* memory, std::size_t bytes) const {
    const auto* begin = static_cast<const char*>(memory);
    for (const auto& stream : streams_)
      for (const Operation& operation : stream->operations)
        for (const auto& [used, length] : operation.memory)
          if (static_cast<const char*>(used) < begin + bytes &&
              begin < static_cast<const char*>(used) + length)
            return true;
    return false;
  }
  void discard_free() {
    std::erase_if(freed_, [this](const auto& block) {
      if (in_use(block.first, block.second)) return false;
      TrackedMemory::instance().discard(block.first);
      return true;
    });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  HappensBefore log_;
  FakeBuffers buffers_{log_};
  std::vector<std::unique_ptr<Stream>> streams_;
  FakeCliques cliques_{[this](const std::string& text) { log_.complain(text); }};
  std::vector<std::unique_ptr<Graph>> graphs_;
  std::map<std::pair<int, std::string>, std::string> broken_;  // by rank and call: what it throws
  std::set<int> frozen_;
  std::map<int, Clock> seen_;  // by rank: what any of its threads has seen to be done
  std::set<const void*> elsewhere_;
  std::vector<std::pair<void*, std::size_t>> freed_;
  std::vector<void*> pooled_;  // the graphs', which nobody else refers to any more
};

}  // namespace lockstep_test
