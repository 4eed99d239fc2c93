#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/nccl/device.hpp"
#include "lockstep/comm/nccl/flight.hpp"
#include "lockstep/comm/nccl/handle.hpp"
#include "lockstep/comm/nccl/membership.hpp"
#include "lockstep/comm/nccl/options.hpp"
#include "lockstep/comm/nccl/words.hpp"

namespace lockstep::detail {

/// What a communicator and its Works share: NCCL's handle, the stream, what is in flight, the first error,
/// and the watchdog, a thread that looks after all of it while the program computes, or waits where nothing
/// can be told to it.
///
/// The watchdog ends what is in flight when NCCL reports an error, another rank has failed, or the deadline
/// of the oldest collective has passed. Whoever sees an error first keeps it, tells the other ranks unless it
/// comes from one of them, and only then aborts NCCL, so that no rank hears of a consequence before its
/// cause. What the stream holds ends with that, and the error is thrown by the program's next call.
template <NcclDevice D>
class NcclGroup {
 public:
  using Clock = std::chrono::steady_clock;
  using Comm = typename D::Comm;
  using Stream = typename D::Stream;
  using FlightPtr = typename Flights<D>::FlightPtr;

  /// The group of all ranks of `ranks`, which meet in the store.
  NcclGroup(const World& world, std::vector<int> ranks, std::string name, const NcclOptions& options)
      : options_(checked(options)),
        membership_(world, std::move(ranks), std::move(name), options_.deadline),
        device_(open(world)),
        handle_(device_),
        flights_(device_) {
    start([&] {
      check_cards(membership_.meet(fmt::format("{} {}", device_.card(), device_.version())));
      const std::string id = membership_.from_first("NCCL id", [&] { return device_.make_id(); });
      return handle_.make([&](Comm& made) { return device_.init(made, size(), id, rank()); });
    });
  }

  /// The group of some of `parent`'s ranks, this one among them; `name` is its own.
  NcclGroup(NcclGroup& parent, std::vector<int> ranks, std::string name)
      : options_(parent.options_),
        membership_(parent.world(), std::move(ranks), std::move(name), options_.deadline),
        device_(parent.device_),
        handle_(device_),
        flights_(device_) {
    start([&] {
      const Call call{"sub_group", 0, -1, 0, Clock::now()};
      return handle_.make([&](Comm& made) { return parent.split(call, made, 0); });
    });
  }
  /// Takes part in the split of ranks that this one is not among.
  void stay_out_of_split(const Call& call) {
    Comm none{};
    await_ready(call, split(call, none, no_colour));
  }

  ~NcclGroup() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (watchdog_.joinable()) watchdog_.join();
    handle_.abort();  // nothing where it was destroyed in good order
    // What was aborted is about to end: its memory is not given back before.
    const auto end = Clock::now() + std::chrono::seconds(1);
    try {
      while (!flights_.empty() && Clock::now() < end) {
        flights_.sweep([] { return true; });
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (const std::exception&) {  // the device itself has failed, and its memory is lost with it
    }
    if (stream_ != Stream{}) device_.destroy_stream(stream_);
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  [[nodiscard]] int rank() const { return membership_.rank(); }
  [[nodiscard]] int size() const { return membership_.size(); }
  [[nodiscard]] const World& world() const { return membership_.world(); }
  [[nodiscard]] Membership& membership() { return membership_; }
  [[nodiscard]] const D& device() const { return device_; }
  [[nodiscard]] const NcclOptions& options() const { return options_; }
  [[nodiscard]] std::chrono::milliseconds deadline() const { return options_.deadline; }
  [[nodiscard]] NcclHandle<D>& handle() { return handle_; }
  [[nodiscard]] const Stream& stream() const { return stream_; }
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  [[nodiscard]] std::string next_child() { return fmt::format("{}/{}", membership_.name(), children_++); }
  void label(Label label) { label_ = std::move(label); }

  /// Opens a collective: throws in a rank-zero scope, and the first error again if there was one.
  Call begin(const char* name) {
    Call call = open_call(name, -1, 0);
    call.sequence = membership_.enter(name);
    look(call);
    return call;
  }
  /// Opens a send or recv, which do not count: only two ranks take part.
  Call message(const char* name, int peer, int tag) {
    const Call call = open_call(name, peer, tag);
    look(call);
    return call;
  }

  /// Issues a call's work behind all that the current stream holds. `issue(comm, stream)` issues NCCL's part,
  /// as one group; `before` and `after` issue copies around it. `kept` stays until it is complete.
  template <class Before, class Issue, class After>
  FlightPtr fly(const Call& call, std::vector<at::Tensor> kept, Before&& before, Issue&& issue,
                After&& after) {
    return guarded(call, [&] {
      flights_.sweep([this] { return failed(); });
      FlightPtr flight = flights_.take();
      flight->call = call;
      flight->label = label_;
      flight->from = device_.current_stream();
      flight->captured = device_.capturing(flight->from);
      flight->kept = std::move(kept);
      device_.record(flight->ready, flight->from);
      device_.wait(stream_, flight->ready);
      // From here on the tensors are in use: the flight counts as started whatever happens.
      const Started started{*this, flight};
      before();
      const NcclResult result = handle_.call([&](Comm comm) {
        if (const auto begun = device_.group_start(); begun != NcclResult::success) return begun;
        const NcclResult issued = issue(comm, stream_);
        const NcclResult ended = device_.group_end();
        return issued == NcclResult::success || issued == NcclResult::in_progress ? ended : issued;
      });
      await_ready(call, result);
      after();
      return flight;
    });
  }

  /// Runs `work`, part of a call. What the device throws, such as that its memory has run out, ends the
  /// group.
  template <class Work>
  auto guarded(const Call& call, Work&& work) -> decltype(work()) {
    try {
      return work();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      fail(std::make_exception_ptr(CommunicationError(
               failure_text(text_of(call, label_), world().rank(), first_line_of(error)), world().rank())),
           true);
    }
  }

  /// Makes what the current stream is given next come after the flight. Does not block.
  void join(Flight<D>& flight) {
    if (!flights_.landed(flight)) {
      if (failed()) rethrow();
      look(flight.call);
    }
    const Stream current = device_.current_stream();
    device_.wait(current, flight.done);
    // On another stream, memory that belongs to the first one would be free too early.
    if (current == flight.from) flights_.let_go_of_tensors(flight);
  }

  /// Blocks until `complete()`, asked again and again, is true. Throws when the group has failed, or when
  /// `until` has come.
  template <class Complete>
  void await(const Call& call, const Label& label, Clock::time_point until, Complete&& complete) {
    for (int round = 0; !complete(); ++round) {
      if (failed()) rethrow();
      look(call);
      if (Clock::now() >= until) late(call, label);
      if (round % 64 == 63) {
        if (auto error = nccl_error(call, label)) fail(error, true);
        if (auto error = membership_.look(call)) fail(error, false);
      }
      if (round < 64)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(std::min(round, 1000)));
    }
  }
  /// Blocks until the flight is complete.
  void await(Flight<D>& flight, Clock::time_point until) {
    await(flight.call, flight.label, until, [&] {
      if (flight.captured || !device_.done(flight.done)) return false;
      if (!flights_.landed(flight)) {
        if (failed()) rethrow();
        flights_.land(flight);
      }
      return true;
    });
    flights_.let_go_of_tensors(flight);
  }
  void give_back(Flight<D>& flight) noexcept { flights_.give_back(flight); }

  /// The error of a flight that can never be complete.
  [[nodiscard]] std::exception_ptr error_of(const Flight<D>& flight) const {
    if (!failed() || flights_.landed(flight)) return nullptr;
    std::lock_guard lock(mutex_);
    return error_;
  }

  /// Makes every later call throw, tells the other ranks, and ends what is in flight.
  void abort(const std::string& reason) noexcept {
    if (stick(aborted(reason))) membership_.publish(reason);
    handle_.abort();
  }
  /// The same while an exception is on its way that the destructors it runs do not know.
  void abort_by_exception() noexcept {
    const char* reason = "an exception, which its own output names, has ended it";
    if (stick(aborted(reason))) membership_.publish_vague(reason);
    handle_.abort();
  }

  /// Ends the group in good order: completes what is in flight, and says farewell to the other ranks.
  void shutdown() {
    if (handle_.gone() || failed()) return;
    const Call call = message("shutdown", -1, 0);
    membership_.depart();
    await(call, nullptr, call.start + deadline(), [&] {
      flights_.sweep([this] { return failed(); });
      return flights_.empty();
    });
    await_ready(call, handle_.call([&](Comm comm) { return device_.finalize(comm); }));
    handle_.destroy();
    membership_.farewell();
  }

  /// Throws if NCCL's `result` is an error, after waiting for it to be one thing or the other.
  void await_ready(const Call& call, NcclResult result) {
    result = handle_.settle(result, [&] { check_while_waiting(call); });
    if (result == NcclResult::success) return;
    if (failed()) rethrow();
    fail(explain(call, label_, result), true);
  }

 private:
  struct Started {
    NcclGroup& group;
    const FlightPtr& flight;
    ~Started() {
      try {
        group.device_.record(flight->done, group.stream_);
      } catch (...) {  // the device has failed: it will say so when it is asked again
      }
      group.flights_.start(flight);
      if (!flight->captured) group.wake_watchdog();
    }
  };

  Call open_call(const char* name, int peer, int tag) {
    forbid_in_rank_zero_scope(name);
    if (failed()) rethrow();
    if (handle_.gone())
      throw CommunicationError(fmt::format("{} called after shutdown(): make a new communicator", name),
                               world().rank());
    return {name, 0, peer, tag, Clock::now()};
  }

  // A rank that has no device, or cannot make its communicator, says so: the others would wait for it.
  D open(const World& world) {
    try {
      return D::open(world, options_.device);
    } catch (const std::exception& error) {
      membership_.publish(first_line_of(error));
      throw;
    }
  }
  template <class Make>
  void start(Make&& make) {
    try {
      stream_ = device_.make_stream();
      const Call call{"the start of the communicator", 0, -1, 0, Clock::now()};
      await_ready(call, make());
      watchdog_ = std::thread([this] { watch(); });
    } catch (const PeerError&) {
      handle_.abort();
      throw;
    } catch (const std::exception& error) {
      membership_.publish(first_line_of(error));
      handle_.abort();
      throw;
    }
  }
  NcclResult split(const Call& call, Comm& made, int colour) {
    const NcclResult result =
        handle_.call([&](Comm comm) { return device_.split(made, comm, colour, rank()); });
    await_ready(call, result);
    return colour == no_colour ? NcclResult::success : NcclResult::in_progress;
  }

  // Two ranks on one GPU, or ranks with different NCCLs, would wait for each other without a word.
  void check_cards(const std::vector<std::string>& cards) const {
    std::map<std::string, int> owners;
    std::string first_version;
    for (std::size_t i = 0; i < cards.size(); ++i) {
      const auto space = cards[i].find(' ');
      const std::string card = cards[i].substr(0, space), version = cards[i].substr(space + 1);
      const int rank = membership_.ranks()[i];
      if (i == 0) first_version = version;
      if (version != first_version)
        throw MismatchError(
            fmt::format(
                "rank {} has NCCL {} and rank {} has NCCL {}: run all ranks with one LibTorch and NCCL",
                membership_.ranks()[0], version_text(std::stoi(first_version)), rank,
                version_text(std::stoi(version))),
            world().rank());
      const auto [owner, alone] = owners.emplace(card, rank);
      if (!alone && !device_.shares_devices())
        throw UsageError(
            fmt::format("ranks {} and {} are on one GPU ({}): start one rank a GPU, and give each its own "
                        "LOCAL_RANK or CUDA_VISIBLE_DEVICES",
                        owner->second, rank, card),
            world().rank());
    }
  }

  void wake_watchdog() {
    std::lock_guard lock(mutex_);
    if (!std::exchange(busy_, true)) changed_.notify_all();
  }

  void watch() noexcept {
    try {
      device_.enter_thread();
    } catch (...) {  // the program's own thread will find it
    }
    bool compared = false;
    std::uint64_t last = 0;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (busy_)
        changed_.wait_for(lock, options_.poll, [this] { return stopping_; });
      else
        changed_.wait(lock, [this] { return stopping_ || busy_; });
      if (stopping_) return;
      busy_ = false;
      lock.unlock();
      std::exception_ptr error;
      try {
        error = patrol(last, compared);
      } catch (const Error&) {
        error = std::current_exception();
      } catch (const std::exception& other) {
        error = std::make_exception_ptr(CommunicationError(
            failure_text("the communicator's watchdog", world().rank(), first_line_of(other)),
            world().rank()));
      }
      if (error && !failed()) trip(error);
      const bool more = !flights_.empty();
      lock.lock();
      busy_ = busy_ || more;
    }
  }

  // One look at what is in flight: why it must be ended, if it must.
  std::exception_ptr patrol(std::uint64_t& last, bool& compared) {
    flights_.sweep([this] { return failed(); });
    if (failed() || flights_.empty()) return nullptr;
    const auto [call, label] = flights_.oldest();
    if (auto error = nccl_error(call, label)) return error;
    if (auto error = membership_.look(call)) return error;
    if (call.sequence != last) compared = false;
    last = call.sequence;
    if (Clock::now() >= call.start + deadline()) return lateness_error(call, label);
    if (!compared && rank() == 0 && call.peer < 0 && Clock::now() >= call.start + std::chrono::seconds(5)) {
      compared = true;
      return membership_.compare(call);
    }
    return nullptr;
  }

  // What NCCL has to say that nobody has asked for.
  std::exception_ptr nccl_error(const Call& call, const Label& label) {
    if (handle_.gone()) return nullptr;
    const NcclResult state = handle_.state();
    if (state == NcclResult::success || state == NcclResult::in_progress || failed()) return nullptr;
    return explain(call, label, state);
  }

  // Why NCCL failed: which rank was the reason, where it is not this one.
  std::exception_ptr explain(const Call& call, const Label& label, NcclResult result) {
    const std::string words = nccl_words(result, handle_.last_error());
    const std::string what = text_of(call, label);
    if (result == NcclResult::remote_error || result == NcclResult::system_error) {
      // A rank that fails or leaves says so before it closes its connections.
      if (auto error = membership_.look_soon(call, std::chrono::milliseconds(100))) return error;
      if (const int silent = membership_.silent_rank(); silent >= 0) {
        if (auto error = membership_.look(call)) return error;
        const std::string text =
            fmt::format("it does not answer, and {} has ended with it ({})", what, words);
        membership_.publish(silent, text);
        return std::make_exception_ptr(
            PeerError(fmt::format("rank {} failed first: {}", silent, text), world().rank()));
      }
      if (auto error = membership_.look_soon(call, std::chrono::milliseconds(1000))) return error;
    }
    return std::make_exception_ptr(
        CommunicationError(failure_text(what, world().rank(), words), world().rank()));
  }

  std::exception_ptr lateness_error(const Call& call, const Label& label) {
    if (auto error = membership_.look(call)) return error;
    std::string text = membership_.lateness_of(call);
    if (label) text += fmt::format(" ({})", *label);
    if (auto error = membership_.look(call)) return error;
    return std::make_exception_ptr(TimeoutError(text, world().rank()));
  }

  // Throws if another rank has failed, or has left before this call.
  void look(const Call& call) {
    if (!membership_.news()) return;
    if (auto error = membership_.look(call)) fail(error, false);
  }
  void check_while_waiting(const Call& call) {
    if (failed()) rethrow();
    look(call);
    if (Clock::now() >= call.start + deadline()) late(call, label_);
  }

  // The time to wait for this call has passed.
  [[noreturn]] void late(const Call& call, const Label& label) {
    const bool last = Clock::now() >= call.start + deadline();
    const auto error = lateness_error(call, label);
    if (last || !is_timeout(error)) fail(error, true);
    std::rethrow_exception(error);
  }
  static bool is_timeout(const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (const TimeoutError&) {
      return true;
    } catch (...) {
      return false;
    }
  }

  static std::exception_ptr aborted(const std::string& reason) {
    return std::make_exception_ptr(CommunicationError("the communicator was aborted: " + reason));
  }

  // Keeps the error if it is the first, tells the others of it unless it came from them, and ends what is in
  // flight.
  void trip(const std::exception_ptr& error) noexcept {
    if (stick(error)) {
      try {
        std::rethrow_exception(error);
      } catch (const PeerError&) {
      } catch (const std::exception& own) {
        membership_.publish(first_line_of(own));
      } catch (...) {
      }
    }
    handle_.abort();
  }
  // The same on a thread of the program.
  [[noreturn]] void fail(const std::exception_ptr& error, bool publish) {
    if (publish)
      trip(error);
    else if (stick(error))
      handle_.abort();
    rethrow();
  }
  // Keeps the first error; true if this is it.
  bool stick(std::exception_ptr error) noexcept {
    std::lock_guard lock(mutex_);
    if (error_) return false;
    error_ = std::move(error);
    failed_.store(true, std::memory_order_release);
    return true;
  }
  [[noreturn]] void rethrow() {
    std::unique_lock lock(mutex_);
    const auto error = error_;
    lock.unlock();
    membership_.notice();
    std::rethrow_exception(error);
  }

  NcclOptions options_;
  Membership membership_;
  D device_;
  NcclHandle<D> handle_;
  Stream stream_{};
  Flights<D> flights_;
  Label label_;
  int children_ = 0;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool stopping_ = false, busy_ = false;
  std::thread watchdog_;
};

}  // namespace lockstep::detail
