#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/gloo_order.hpp"
#include "lockstep/comm/detail/host_operation.hpp"
#include "lockstep/comm/detail/shm_memory.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// An operation of a rank in shared memory, and how far it is. The input has `rows` rows of `row` bytes, one or one for
/// each rank.
struct ShmOperation : HostOperation {
  int root = 0;  ///< of a message the other rank
  std::int32_t tag = 0;
  const char* input = nullptr;
  char* output = nullptr;
  std::size_t row = 0, rows = 1;
  Fold fold = nullptr;
  std::size_t chunk = 0;        ///< of Gloo's ring, 0 if the order of the ranks does not matter
  std::uint64_t signature = 0;  ///< equal on all ranks of a right program, and not 0

  // Of the engine.
  std::uint64_t first = 0, pieces = 0, launched = 0, taken = 0;
  std::size_t moved = 0, slot = ShmMemory::messages, block = ShmMemory::blocks;  // of a message
  bool early = false;  // its first part was copied before its receiver has asked
};

/// The collectives and messages of one rank of a group in shared memory. There is no thread: launching copies the input
/// into blocks of this rank and returns, and a thread that waits for any operation moves all engines of the process on.
/// So an operation completes once all ranks have launched it, whatever they do afterwards.
///
/// An operation is cut into pieces of one block; a large all-reduce of more than two ranks is summed in parts, each by
/// the first rank that comes, otherwise each rank computes its own result. At most `ShmMemory::slots` pieces and
/// `ShmMemory::blocks` blocks of a rank are in flight, or as many as the system has memory for: what is beyond them is
/// copied, in order, when this rank next launches or waits. The last block is kept for messages, which collectives that
/// another rank has not launched yet must not hold up. At most `ShmMemory::messages` messages between two ranks can be on
/// their way before their receiver asks for one of them.
///
/// Who sleeps says so, looks once more and then waits; who changes what others wait for looks afterwards who sleeps. In
/// the one order of all sequentially consistent operations one of the two sees the other, so no waking is lost.
///
/// Thread-safe, but one thread at a time may launch.
class ShmEngine {
 public:
  using Clock = std::chrono::steady_clock;
  using Operation = std::shared_ptr<ShmOperation>;

  /// `spins`: a waiting thread spins for a while before it sleeps, as fits ranks that have a core each.
  ShmEngine(std::shared_ptr<ShmMemory> memory, int rank, bool spins)
      : memory_(std::move(memory)),
        rank_(rank),
        ranks_(memory_->ranks()),
        spins_(spins ? most_spins : 0),
        busy_(static_cast<std::size_t>(ranks_)) {
    for (std::size_t block = 0; block < allocated_; ++block) free_.push_back(block);
    auto& all = engines();
    const std::lock_guard lock(all.mutex);
    all.list.push_back(this);
  }
  ~ShmEngine() {
    auto& all = engines();
    const std::lock_guard lock(all.mutex);
    std::erase(all.list, this);
  }

  /// Launches an operation. Never blocks, but for the memory's copy.
  void launch(Operation operation) {
    const std::lock_guard lock(mutex_);
    if (failed_) return end(*operation, failed_);
    if (operation->is_message()) {
      messages_.push_back(std::move(operation));
    } else {
      const std::size_t width = width_of(*operation);
      operation->first = next_;
      operation->pieces = std::max<std::size_t>(1, (operation->row + width - 1) / width);
      next_ += operation->pieces;
      queue_.push_back(std::move(operation));
    }
    step();
    // A thread that sleeps does not wait for room yet.
    if (launched_ < queue_.size() && sleeping_.load() > 0) change(memory_->rank(rank_).bell);
  }

  /// Blocks until `done()`, at most until `until`, and moves all engines of the process on. Returns whether it is done.
  template <class Done>
  bool wait(Clock::time_point until, const Done& done) {
    for (int spin = 0;; spin = std::min(spin + 1, spins_)) {
      move_on();
      if (done()) return true;
      const bool others = (spin >= spins_ || spin % 64 == 63) && move_others(this);
      if (spin < spins_) {
        relax();
        continue;
      }
      const auto now = Clock::now();
      if (now.time_since_epoch().count() >= next_look_.load(std::memory_order_relaxed)) {
        next_look_.store((now + shm_sleep).time_since_epoch().count(), std::memory_order_relaxed);
        look_for_ends();
        if (done()) return true;
      }
      if (now >= until) return false;
      sleep(std::min(until, now + (others ? backlog_sleep : shm_sleep)), done);
    }
  }
  /// Waits for all collectives that were launched, and until what was sent has been received.
  bool drain(Clock::time_point until) {
    return wait(until, [&] {
      const std::lock_guard lock(mutex_);
      return queue_.empty() && std::none_of(messages_.begin(), messages_.end(),
                                            [](const auto& message) { return message->kind == Kind::send; });
    });
  }
  /// Returns a thread that moves the engines of this process on until its destruction: a thread that waits for something
  /// else than an engine needs one. Returns no thread where no other rank can wait.
  [[nodiscard]] static std::jthread mover() {
    if (!move_others(nullptr)) return {};
    return std::jthread([](const std::stop_token& stop) {
      for (; !stop.stop_requested(); std::this_thread::sleep_for(backlog_sleep)) move_others(nullptr);
    });
  }

  /// Does what can be done without waiting.
  void move_on() {
    const std::lock_guard lock(mutex_);
    step();
  }

  /// See HostOperation::at_end.
  void at_end(ShmOperation& operation, HostOperation::Function function) {
    const std::lock_guard lock(mutex_);
    operation.at_end(std::move(function));
  }

  /// Ends all operations of this rank, now and later. The other ranks are not told.
  void abort() {
    {
      const std::lock_guard lock(mutex_);
      fail(aborted_error());
    }
    change(memory_->rank(rank_).bell);
  }
  void abort(const ShmOperation&) { abort(); }

 private:
  using Kind = HostOperation::Kind;
  static constexpr const char* other_message =
      "the message has another size or dtype than the tensor that is to receive it";
  static constexpr int most_spins = 4000;
  static constexpr std::size_t own_result = 16384;  // up to these bytes each rank computes the whole result
  static constexpr std::size_t blocks_for_messages = 1, blocks_at_once = 16,
                               most_early = ShmMemory::blocks / 4;

  struct Engines {
    std::mutex mutex;
    std::vector<ShmEngine*> list;
  };
  // Never destroyed, since a communicator may be static. A forked child has none of its parent's: the memory is not there.
  LOCKSTEP_PROCESS_WIDE static Engines& engines() {
    static std::atomic<Engines*> all{new Engines()};
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { all = new Engines(); });
    return *all;
  }
  // Moves the engines of this process on, but for `except`, if another rank may wait for one of them. Returns whether one
  // may.
  static bool move_others(const ShmEngine* except) {
    auto& all = engines();
    const std::lock_guard lock(all.mutex);
    const bool any = std::any_of(all.list.begin(), all.list.end(), [&](const ShmEngine* engine) {
      return engine != except && engine->backlog_.load(std::memory_order_relaxed);
    });
    for (ShmEngine* engine : all.list)
      if (any && engine != except && engine->mutex_.try_lock()) {
        const std::lock_guard other(engine->mutex_, std::adopt_lock);
        engine->step();
      }
    return any;
  }

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // ---- Waiting ------------------------------------------------------------------------------------------------------

  // Sleeps unless there is something to do after this rank has said that it will sleep.
  template <class Done>
  void sleep(Clock::time_point until, const Done& done) {
    auto& bell = memory_->rank(rank_).bell;
    const auto rings = bell.load(std::memory_order_acquire);
    const auto bit = std::uint64_t{1} << (rank_ % 64);
    ++sleeping_;
    const std::shared_ptr<void> awake(nullptr, [this](void*) { --sleeping_; });
    memory_->head().sleepers[rank_ / 64].fetch_or(bit);
    {
      const std::lock_guard lock(mutex_);
      if (launched_ < queue_.size()) memory_->head().starved[rank_ / 64].fetch_or(bit);
      step();
    }
    if (!done()) await_change(bell, rings, until);
  }
  // Fails where a rank has ended on which an operation still depends: it has not launched it, computes a part of it, or
  // keeps this rank from launching.
  void look_for_ends() {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (rank == rank_ || !memory_->has_ended(rank)) continue;
      const std::lock_guard lock(mutex_);
      step();  // what it has done before
      const ShmRank& ended = memory_->rank(rank);
      const auto launched = ended.launched.load(), taken = ended.taken.load(), summing = ended.summing.load();
      const auto needs = [&](const Operation& operation) {
        if (operation->is_message()) return operation->root == rank;
        const auto end = operation->first + operation->pieces;
        return end > launched || (summing > operation->first + operation->taken && summing <= end);
      };
      const bool stuck = launched_ < queue_.size() &&
                         ((!in_use_.empty() && taken <= in_use_.front().first) ||
                          taken + ShmMemory::slots <= queue_[launched_]->first + queue_[launched_]->launched);
      if (stuck || std::any_of(queue_.begin(), queue_.end(), needs) ||
          std::any_of(messages_.begin(), messages_.end(), needs))
        return fail(error_of("a process of the group has ended"));
    }
  }

  // Wakes the ranks that sleep, or of them those that wait for a slot. Called after what they wait for is visible.
  void wake_all(bool starved = false) {
    for (int word = 0; word <= (ranks_ - 1) / 64; ++word) {
      auto& sleepers = (starved ? memory_->head().starved : memory_->head().sleepers)[word];
      if (sleepers.load() == 0) continue;
      for (std::uint64_t left = sleepers.exchange(0); left != 0; left &= left - 1)
        change(memory_->rank(word * 64 + __builtin_ctzll(left)).bell);
    }
  }
  void wake(int rank) {
    const auto bit = std::uint64_t{1} << (rank % 64);
    auto& sleepers = memory_->head().sleepers[rank / 64];
    if ((sleepers.load() & bit) == 0) return;
    sleepers.fetch_and(~bit);
    change(memory_->rank(rank).bell);
  }

  // ---- Moving on: with the mutex locked -----------------------------------------------------------------------------

  void step() {
    if (failed_) return;
    for (bool moves = true; moves;) {
      const bool mismatch = memory_->head().mismatch.load() != 0, launches = !mismatch && launch_piece();
      moves = take_pieces() || launches;  // after a mismatch those that all have launched before
      if (mismatch) return fail(error_of<OtherOperation>("the ranks have launched different operations"));
    }
    for (const Operation& message : messages_)
      message->kind == Kind::send ? step_send(*message) : step_receive(*message);
    std::erase_if(messages_, [](const Operation& message) { return message->ended(); });
    backlog_.store(!queue_.empty() || !messages_.empty(), std::memory_order_relaxed);
  }

  void end(ShmOperation& operation, const std::exception_ptr& error = nullptr) {
    operation.end(error);
    if (sleeping_.load() > 0) change(memory_->rank(rank_).bell);  // a thread of this process may wait for it
  }
  void fail(const std::exception_ptr& error) {
    if (failed_) return;
    failed_ = error;
    for (const auto& operation : std::exchange(queue_, {})) end(*operation, error);
    for (const auto& message : std::exchange(messages_, {})) end(*message, error);
    launched_ = 0;
    backlog_.store(false, std::memory_order_relaxed);
  }

  [[nodiscard]] static std::size_t width_of(const ShmOperation& operation) {
    return ShmMemory::block_bytes / operation.rows / 64 * 64;
  }
  [[nodiscard]] bool has_input(const ShmOperation& operation) const {
    if (operation.kind == Kind::barrier) return false;
    return operation.kind != Kind::broadcast || operation.root == rank_;
  }

  // Returns a block of this rank, `blocks` if not more than `kept` are free.
  std::size_t take_block(std::size_t kept) {
    while (!in_use_.empty() && memory_->slot(in_use_.front().first).open.load() > in_use_.front().first) {
      free_.push_back(in_use_.front().second);
      in_use_.pop_front();
    }
    if (free_.size() <= kept && allocated_ < ShmMemory::blocks && Clock::now() >= next_allocation_) {
      const std::size_t count = std::min({allocated_, blocks_at_once, ShmMemory::blocks - allocated_});
      if (memory_->allocate_blocks(rank_, allocated_, count))
        for (const auto end = allocated_ + count; allocated_ < end;) free_.push_back(allocated_++);
      else
        next_allocation_ = Clock::now() + allocation_pause;
    }
    if (free_.size() <= kept) return ShmMemory::blocks;
    const std::size_t block = free_.back();
    free_.pop_back();
    return block;
  }

  // Launches the next piece that is not launched yet. Returns false if there is none, or no room for it.
  bool launch_piece() {
    if (launched_ == queue_.size()) return false;
    ShmOperation& operation = *queue_[launched_];
    const std::uint64_t number = operation.first + operation.launched;
    ShmSlot& slot = memory_->slot(number);
    if (slot.open.load() != number) return false;
    if (has_input(operation)) {
      const std::size_t block = take_block(blocks_for_messages);
      if (block == ShmMemory::blocks) return false;
      const auto [begin, size] = span_of(operation, operation.launched);
      for (std::size_t r = 0; r < operation.rows; ++r)
        std::memcpy(memory_->block(rank_, block) + r * size, operation.input + r * operation.row + begin,
                    size);
      slot.block(rank_) = static_cast<std::uint16_t>(block);
      in_use_.emplace_back(number, block);
    }
    std::uint64_t there = 0;
    if (!slot.signature.compare_exchange_strong(there, operation.signature) && there != operation.signature) {
      memory_->head().mismatch.store(1);
      wake_all();
      return true;  // so that step() looks again
    }
    if (++operation.launched == operation.pieces) ++launched_;
    const bool last = slot.arrived.fetch_add(1) + 1 == unsigned(ranks_);
    memory_->rank(rank_).launched.store(number + 1);  // not before: see look_for_ends
    if (last) wake_all();
    return true;
  }
  // Returns the part of each row that is in a piece: (begin, size).
  [[nodiscard]] static std::pair<std::size_t, std::size_t> span_of(const ShmOperation& operation,
                                                                   std::uint64_t piece) {
    const std::size_t begin = piece * width_of(operation);
    return {begin, std::min(width_of(operation), operation.row - begin)};
  }

  // Takes the results that exist. Returns whether there was one.
  bool take_pieces() {
    bool took = false;
    while (!queue_.empty()) {
      ShmOperation& operation = *queue_.front();
      while (operation.taken < operation.launched && take(operation)) took = true;
      if (operation.taken < operation.pieces) break;
      const Operation ended = std::move(queue_.front());
      queue_.pop_front();
      --launched_;
      end(*ended);
    }
    return took;
  }

  bool take(ShmOperation& operation) {
    const std::uint64_t number = operation.first + operation.taken;
    ShmSlot& slot = memory_->slot(number);
    if (slot.arrived.load() < unsigned(ranks_)) return false;
    const auto [begin, size] = span_of(operation, operation.taken);
    const std::size_t row =
        operation.rows == 1 ? 0 : static_cast<std::size_t>(rank_);  // that this rank needs
    const auto from = [&, size = size](int rank) {
      return memory_->block(rank, slot.block(rank)) + row * size;
    };
    char* const to = operation.output == nullptr ? nullptr : operation.output + begin;
    switch (operation.kind) {
      case Kind::broadcast:
        if (rank_ != operation.root) std::memcpy(to, from(operation.root), size);
        break;
      case Kind::all_gather:
      case Kind::all_to_all:
        for (int rank = 0; rank < ranks_; ++rank)
          std::memcpy(to + static_cast<std::size_t>(rank) * operation.row, from(rank), size);
        break;
      case Kind::reduce:
        if (rank_ != operation.root) break;
        [[fallthrough]];
      case Kind::all_reduce:
        if (operation.kind != Kind::all_reduce || ranks_ <= 2 || size <= own_result)
          sum(operation, row * operation.row + begin, size, from, to);
        else if (!sum_together(operation, slot, begin, size, from, to))
          return false;
        break;
      default:
        break;
    }
    ++operation.taken;
    memory_->rank(rank_).taken.store(number + 1);
    if (slot.taken.fetch_add(1, std::memory_order_acq_rel) + 1 == unsigned(ranks_)) {
      slot.signature.store(0, std::memory_order_relaxed);
      for (auto* counter : {&slot.arrived, &slot.claimed, &slot.reduced, &slot.taken})
        counter->store(0, std::memory_order_relaxed);
      slot.open.store(number + ShmMemory::slots);
      wake_all(/*starved=*/true);
    }
    return true;
  }

  // Reduces the ranks' bytes [begin, begin + size) of the whole input, which rank r has at `from(r)`, in Gloo's order.
  template <class From>
  void sum(const ShmOperation& operation, std::size_t begin, std::size_t size, const From& from,
           char* to) const {
    if (ranks_ == 1) {
      std::memcpy(to, from(0), size);
      return;
    }
    std::array<const char*, ShmMemory::most_ranks> in;
    const auto ranks = static_cast<std::size_t>(ranks_);
    const std::size_t width = operation.chunk == 0 ? begin + size : operation.chunk;
    for (std::size_t done = 0; done < size;) {
      const std::size_t chunk = (begin + done) / width, end = std::min(size, (chunk + 1) * width - begin);
      for (std::size_t i = 0; i < ranks; ++i)
        in[i] = from(static_cast<int>((chunk + ranks - 1 - i) % ranks)) + done;
      operation.fold(to + done, in.data(), ranks, end - done);
      done = end;
    }
  }
  // The same for an all-reduce of which each rank computes the parts that it finds free, in place: part p lies in the
  // block of rank p. Returns false while another rank computes one.
  template <class From>
  bool sum_together(const ShmOperation& operation, ShmSlot& slot, std::size_t begin, std::size_t size,
                    const From& from, char* to) {
    const auto ranks = unsigned(ranks_);
    const std::size_t width = (size + ranks - 1) / ranks / 64 * 64 + 64;
    const auto parts = static_cast<std::uint32_t>((size + width - 1) / width);
    const auto size_of = [&](std::uint32_t part) { return std::min(width, size - part * width); };
    while (slot.claimed.load(std::memory_order_relaxed) < parts) {
      memory_->rank(rank_).summing.store(operation.first + operation.taken + 1);
      const std::uint32_t part = slot.claimed.fetch_add(1);
      if (part >= parts) break;
      const auto part_of = [&, at = part * width](int rank) { return from(rank) + at; };
      sum(operation, begin + part * width, size_of(part), part_of, part_of(static_cast<int>(part)));
      if (slot.reduced.fetch_add(1) + 1 == parts) wake_all();
    }
    memory_->rank(rank_).summing.store(0);
    if (slot.reduced.load() < parts) return false;
    for (std::uint32_t part = 0; part < parts; ++part)
      std::memcpy(to + part * width, from(static_cast<int>(part)) + part * width, size_of(part));
    return true;
  }

  // ---- Messages -----------------------------------------------------------------------------------------------------

  void step_send(ShmOperation& operation) {
    const int peer = operation.root;
    auto& busy = busy_[static_cast<std::size_t>(peer)];
    if (operation.slot == ShmMemory::messages) {
      operation.slot = static_cast<std::size_t>(__builtin_ctz(~busy));
      if (operation.slot == ShmMemory::messages) return;
      busy |= 1U << operation.slot;
      ShmMessage& message = memory_->message(rank_, peer, operation.slot);
      message.tag = operation.tag;
      message.bytes = operation.row;
      message.signature = operation.signature;
      message.order = order_++;
      message.block = ShmMemory::blocks;
      // Collectives need another one.
      if (early_ < most_early) operation.block = take_block(blocks_for_messages + 1);
      operation.early = operation.block != ShmMemory::blocks;
      if (operation.early) {
        ++early_;
        copy_part(operation, message);
      }
      message.state.store(ShmMessage::announced);
      return wake(peer);
    }
    ShmMessage& message = memory_->message(rank_, peer, operation.slot);
    const auto state = message.state.load();
    if (state == ShmMessage::none) {  // the receiver has all of it
      if (operation.block != ShmMemory::blocks) free_.push_back(operation.block);
      if (operation.early) --early_;
      busy &= ~(1U << operation.slot);
      return end(operation);
    }
    if (state != ShmMessage::wanted) return;
    if (operation.block == ShmMemory::blocks) operation.block = take_block(0);
    if (operation.block == ShmMemory::blocks) return;
    copy_part(operation, message);
    message.state.store(ShmMessage::filled);
    wake(peer);
  }
  void copy_part(ShmOperation& operation, ShmMessage& message) {
    const std::size_t size = std::min(ShmMemory::block_bytes, operation.row - operation.moved);
    if (size > 0)
      std::memcpy(memory_->block(rank_, operation.block), operation.input + operation.moved, size);
    operation.moved += size;
    message.block = static_cast<std::uint32_t>(operation.block);
    message.part = static_cast<std::uint32_t>(size);
  }

  void step_receive(ShmOperation& operation) {
    const int peer = operation.root;
    if (operation.slot == ShmMemory::messages) {
      for (const Operation& earlier : messages_) {
        if (earlier.get() == &operation) break;  // an earlier one takes the older message, also a later one
        if (earlier->kind == Kind::receive && earlier->root == peer && earlier->tag == operation.tag &&
            earlier->slot == ShmMemory::messages)
          return;
      }
      std::uint64_t oldest = ~std::uint64_t{0};
      // A full circle after each one found: an older message may have come behind the scan, and a newer one before it.
      for (std::size_t i = 0, left = ShmMemory::messages; left > 0;
           i = (i + 1) % ShmMemory::messages, --left) {
        const ShmMessage& message = memory_->message(peer, rank_, i);
        if (message.state.load() == ShmMessage::announced && message.tag == operation.tag &&
            message.order < oldest) {
          oldest = message.order;
          operation.slot = i;
          left = ShmMemory::messages;
        }
      }
      if (operation.slot == ShmMemory::messages) return;
      ShmMessage& message = memory_->message(peer, rank_, operation.slot);
      if (message.bytes != operation.row || message.signature != operation.signature) {
        message.state.store(ShmMessage::none);  // the sender does not wait for another receive
        wake(peer);
        return end(operation, error_of<OtherOperation>(other_message));
      }
      if (message.block == ShmMemory::blocks) {
        message.state.store(ShmMessage::wanted);
        return wake(peer);
      }
      return take_part(operation, message);
    }
    ShmMessage& message = memory_->message(peer, rank_, operation.slot);
    if (message.state.load() == ShmMessage::filled) take_part(operation, message);
  }
  void take_part(ShmOperation& operation, ShmMessage& message) {
    const int peer = operation.root;
    const std::size_t size = message.part;
    if (size > 0) std::memcpy(operation.output + operation.moved, memory_->block(peer, message.block), size);
    operation.moved += size;
    const bool complete = operation.moved == operation.row;
    message.state.store(complete ? ShmMessage::none : ShmMessage::wanted);
    wake(peer);
    if (complete) end(operation);
  }

  const std::shared_ptr<ShmMemory> memory_;
  const int rank_, ranks_, spins_;
  std::atomic<int> sleeping_{0};          // threads of this process
  std::atomic<Clock::rep> next_look_{0};  // for ranks that have ended
  std::atomic<bool> backlog_{false};      // another rank may wait until this engine moves on

  std::mutex mutex_;  // of all below
  std::exception_ptr failed_;
  std::uint64_t next_ = 0;       // the number of the next piece
  std::deque<Operation> queue_;  // collectives whose result this rank does not have
  std::size_t launched_ = 0;     // of the collectives in queue_, those whose pieces are all launched
  std::vector<Operation> messages_;
  std::vector<std::size_t> free_;                             // blocks; the last one was used last
  std::deque<std::pair<std::uint64_t, std::size_t>> in_use_;  // (piece, block), not taken by all ranks
  std::size_t allocated_ = ShmMemory::first_blocks;
  Clock::time_point next_allocation_{};
  std::size_t early_ = 0;       // blocks of messages that no receiver has asked for
  std::vector<unsigned> busy_;  // for each rank the messages to it that are in flight, a bit each
  std::uint64_t order_ = 0;     // the number of the next message
};

}  // namespace lockstep::inline v0_1::detail
