#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lockstep_test {

/// How much of every actor's doings is known somewhere: a vector clock.
class Clock {
 public:
  void learn(const Clock& other) {
    if (seen_.size() < other.seen_.size()) seen_.resize(other.seen_.size());
    for (std::size_t i = 0; i < other.seen_.size(); ++i) seen_[i] = std::max(seen_[i], other.seen_[i]);
  }
  std::uint64_t tick(int actor) {
    if (seen_.size() <= static_cast<std::size_t>(actor)) seen_.resize(static_cast<std::size_t>(actor) + 1);
    return ++seen_[static_cast<std::size_t>(actor)];
  }
  [[nodiscard]] bool knows(int actor, std::uint64_t number) const {
    return static_cast<std::size_t>(actor) < seen_.size() && seen_[static_cast<std::size_t>(actor)] >= number;
  }

 private:
  std::vector<std::uint64_t> seen_;  // by actor: the number of its last step
};

/// A log of who did what when, in which two accesses of one piece of memory, one of them a write, must be
/// ordered by more than luck. An actor is a thread of the host or a stream.
///
/// Not thread-safe: the machine that owns it has the lock.
class HappensBefore {
 public:
  int add_actor(std::string name) {
    names_.push_back(std::move(name));
    clocks_.emplace_back();
    return static_cast<int>(names_.size()) - 1;
  }
  [[nodiscard]] const Clock& clock(int actor) const { return clocks_[static_cast<std::size_t>(actor)]; }
  [[nodiscard]] const std::string& name(int actor) const { return names_[static_cast<std::size_t>(actor)]; }

  /// From here on the actor comes after all that `clock` knows.
  void learn(int actor, const Clock& clock) { clocks_[static_cast<std::size_t>(actor)].learn(clock); }

  /// `host` gives `stream` something to do.
  void issue(int host, int stream) {
    clocks_[static_cast<std::size_t>(host)].tick(host);
    learn(stream, clock(host));
  }

  /// The actor reads or writes memory, now.
  void access(int actor, const void* memory, std::size_t bytes, bool writes, const std::string& what) {
    if (bytes == 0) return;
    const auto number = clocks_[static_cast<std::size_t>(actor)].tick(actor);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    for (const Access& other : accesses_)
      if (other.begin < end && begin < other.end && (writes || other.writes) &&
          !clock(actor).knows(other.actor, other.number))
        complain(what + " on " + name(actor) + (writes ? " writes" : " reads") + " what " + other.what +
                 " on " + name(other.actor) + (other.writes ? " writes" : " reads") +
                 ", and nothing orders them");
    // Whoever comes after a write comes after all that came before it.
    if (writes)
      std::erase_if(accesses_, [&](const Access& other) { return begin <= other.begin && other.end <= end; });
    accesses_.push_back({begin, end, actor, number, writes, what});
  }

  /// The memory is given back by `host`, to be used again by what comes later on `owner`.
  void release(const void* memory, std::size_t bytes, int host, int owner) {
    Clock known = clock(host);
    known.learn(clock(owner));
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    std::erase_if(accesses_, [&](const Access& other) {
      if (other.end <= begin || end <= other.begin) return false;
      if (!known.knows(other.actor, other.number))
        complain("memory of " + name(owner) + " is freed by " + name(host) + " while " + other.what + " on " +
                 name(other.actor) + " may still use it");
      return true;
    });
  }

  /// What `actor` does with the memory must have ended as far as `host` knows.
  void expect_ended(const void* memory, std::size_t bytes, int host, int actor, const std::string& how) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    for (const Access& other : accesses_)
      if (other.actor == actor && other.begin < end && begin < other.end &&
          !clock(host).knows(other.actor, other.number))
        complain("memory is " + how + " by " + name(host) + " while " + other.what + " on " + name(actor) +
                 " may still use it");
  }

  void complain(std::string text) { violations_.push_back(std::move(text)); }
  [[nodiscard]] const std::vector<std::string>& violations() const { return violations_; }

 private:
  struct Access {
    std::uintptr_t begin, end;
    int actor;
    std::uint64_t number;
    bool writes;
    std::string what;
  };

  std::vector<std::string> names_;
  std::vector<Clock> clocks_;
  std::vector<Access> accesses_;
  std::vector<std::string> violations_;
};

}  // namespace lockstep_test
