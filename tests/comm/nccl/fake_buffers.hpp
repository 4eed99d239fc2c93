#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "fake_clique.hpp"
#include "happens_before.hpp"

namespace lockstep_test {

/// The memory that a fake NCCL gives away, and what is registered with its communicators. What is given back
/// is kept, so that a use of it afterwards is seen.
///
/// Not thread-safe: the machine that owns it has the lock.
class FakeBuffers {
 public:
  explicit FakeBuffers(HappensBefore& log) : log_(log) {}

  void* allocate(std::size_t bytes) {
    buffers_.push_back({std::make_unique<char[]>(bytes), bytes, false});
    return buffers_.back().memory.get();
  }
  void free(const void* memory, int host) {
    for (Buffer& buffer : buffers_) {
      if (buffer.memory.get() != memory) continue;
      if (std::exchange(buffer.freed, true)) log_.complain("a buffer is freed twice");
      log_.release(memory, buffer.bytes, host, host);
      given_back(memory, buffer.bytes);
      return;
    }
    log_.complain("what is freed is no buffer");
  }
  /// How many nobody has given back.
  [[nodiscard]] int left() const {
    int count = 0;
    for (const Buffer& buffer : buffers_) count += buffer.freed ? 0 : 1;
    return count;
  }

  void* add(FakeRank* rank, const void* memory, std::size_t bytes) {
    registrations_.push_back(
        std::make_unique<Registration>(Registration{rank, static_cast<const char*>(memory), bytes}));
    return registrations_.back().get();
  }
  /// Only the communicator's own stream matters: what else uses the memory need not know of NCCL.
  void remove(FakeRank* rank, const void* handle, int host) {
    for (auto& one : registrations_) {
      if (one.get() != handle || one->rank != rank || one->ended) continue;
      one->ended = true;
      log_.expect_ended(one->begin, one->bytes, host, rank->actor, "deregistered");
      return;
    }
    log_.complain("what is deregistered was not registered");
  }
  void forget(FakeRank* rank) {
    std::erase_if(registrations_, [&](const auto& one) { return one->rank == rank; });
  }
  [[nodiscard]] bool any(const FakeRank* rank) const {
    for (const auto& one : registrations_)
      if (one->rank == rank && !one->ended) return true;
    return false;
  }
  /// Whether NCCL moves this without a copy.
  [[nodiscard]] bool registered(const FakeRank* rank, const void* memory) const {
    for (const auto& one : registrations_)
      if (one->rank == rank && !one->ended && one->overlaps(memory, 1)) return true;
    return false;
  }

  /// A stream uses memory; `rank`, if it is a collective.
  void use(const FakeRank* rank, const void* memory, std::size_t bytes, const std::string& what) {
    if (bytes == 0) return;
    for (const Buffer& buffer : buffers_)
      if (buffer.freed && overlap(buffer.memory.get(), buffer.bytes, memory, bytes))
        log_.complain(what + " uses a buffer that was freed");
    if (!rank || registered(rank, memory)) return;
    for (const auto& one : registrations_)
      if (one->rank == rank && one->overlaps(memory, bytes))
        log_.complain(what + " uses memory that was deregistered");
  }
  /// Memory, whosever, can be used for something else from now on.
  void given_back(const void* memory, std::size_t bytes) {
    std::erase_if(registrations_, [&](const auto& one) {
      if (!one->overlaps(memory, bytes)) return false;
      if (!one->ended) log_.complain("memory is freed that is still registered");
      return true;
    });
  }

 private:
  static bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
    const auto *first = static_cast<const char*>(a), *second = static_cast<const char*>(b);
    return first < second + b_bytes && second < first + a_bytes;
  }
  struct Buffer {
    std::unique_ptr<char[]> memory;
    std::size_t bytes;
    bool freed;
  };
  struct Registration {
    FakeRank* rank;
    const char* begin;
    std::size_t bytes;
    bool ended = false;

    [[nodiscard]] bool overlaps(const void* memory, std::size_t length) const {
      return overlap(begin, bytes, memory, length);
    }
  };

  HappensBefore& log_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<Registration>> registrations_;
};

}  // namespace lockstep_test
