#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_clique.hpp"
#include "happens_before.hpp"

namespace lockstep_test {

/// What was given to streams of a FakeMachine while they were captured, in the order of the calls.
///
/// Not thread-safe: the machine that owns it has the lock.
struct FakeGraph {
  using Memory = std::pair<const void*, std::size_t>;

  struct Node {
    std::string what;
    std::vector<Memory> reads, writes;
    std::function<void()> run;             // a kernel
    std::shared_ptr<FakeGroupCall> group;  // or NCCL's
  };
  std::vector<Node> nodes;
  std::vector<Memory> pool;  // memory of its own, which stays there for it
  bool complete = false;     // the capture is over
  std::string freed;         // whose memory that it uses may be somebody else's by now

  [[nodiscard]] bool owns(const void* memory, std::size_t bytes) const {
    return std::any_of(pool.begin(), pool.end(), [&](const Memory& own) {
      return overlap(own, {memory, bytes});
    });
  }
  [[nodiscard]] bool uses(const void* memory, std::size_t bytes) const {
    const Memory asked{memory, bytes};
    for (const Node& node : nodes) {
      for (const auto* list : {&node.reads, &node.writes})
        for (const Memory& used : *list)
          if (overlap(used, asked)) return true;
      if (!node.group) continue;
      for (const FakePart& part : node.group->parts)
        if (overlap({part.from, part.bytes_read}, asked) || overlap({part.to, part.bytes_written}, asked))
          return true;
    }
    return false;
  }

 private:
  static bool overlap(const Memory& a, const Memory& b) {
    const auto *first = static_cast<const char*>(a.first), *second = static_cast<const char*>(b.first);
    return first < second + b.second && second < first + a.second;
  }
};

/// An event, as it was recorded last, if ever.
struct FakeEvent {
  struct Record {
    bool done = false;
    Clock clock;
    FakeGraph* graph = nullptr;  // in which it was captured
  };
  std::shared_ptr<Record> last;
};

/// What a stream is still to do.
struct FakeStream {
  struct Operation {
    std::string what;
    std::function<bool()> run;  // false: not yet
    std::vector<FakeGraph::Memory> memory;
  };
  int rank = 0;
  int actor = 0;
  bool immediate = false;
  std::deque<Operation> operations;
  FakeGraph* graph = nullptr;  // into which it is being captured
};

}  // namespace lockstep_test
