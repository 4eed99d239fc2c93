#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Runs jobs ahead on worker threads and returns their results in the order of the jobs.
///
/// Draws jobs from `source` on the consumer's thread only, until it returns nullopt. Runs `work` on the
/// workers, at most `depth` jobs ahead of the consumer. An exception of `work` is rethrown by the `next()`
/// that would have returned its result. The destructor finishes running jobs, discards queued jobs and joins
/// all threads. Only one thread may call `next()`.
template <class Job, class Result>
class Prefetcher {
 public:
  using Source = std::function<std::optional<Job>()>;
  using Work = std::function<Result(Job&)>;

  /// Starts the workers. `enter` runs first on each worker thread. Throws Error if not all workers can start.
  Prefetcher(std::size_t workers, std::size_t depth, Source source, Work work,
             std::function<void()> enter = {})
      : depth_(depth < 1 ? 1 : depth),
        source_(std::move(source)),
        work_(std::move(work)),
        enter_(std::move(enter)) {
    try {
      while (threads_.size() < workers) threads_.emplace_back([this] { run(); });
    } catch (...) {  // no more threads are available: stop those that started
      const std::size_t started = threads_.size();
      stop();
      try {
        throw;
      } catch (const std::system_error& error) {
        throw Error("only " + std::to_string(started) + " of " + std::to_string(workers) +
                    " worker threads could be started (" + error.code().message() +
                    "): ask for fewer workers");
      }
    }
  }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  ~Prefetcher() { stop(); }

  /// Blocks until the next result is ready and returns it; nullopt after the last one.
  std::optional<Result> next() {
    refill();
    std::optional<Result> result;
    std::exception_ptr error;
    {
      std::unique_lock lock(mutex_);
      if (slots_.empty()) return std::nullopt;
      done_.wait(lock, [this] { return slots_.front().done; });
      result = std::move(slots_.front().result);
      error = slots_.front().error;
      slots_.pop_front();
      --taken_;
    }
    if (error) std::rethrow_exception(error);
    refill();  // keeps the workers busy while the consumer works
    return result;
  }

 private:
  struct Slot {
    explicit Slot(Job given) : job(std::move(given)) {}
    Job job;
    std::optional<Result> result;
    std::exception_ptr error;
    bool done = false;
  };

  void refill() {
    while (!exhausted_) {
      {
        const std::lock_guard lock(mutex_);
        if (slots_.size() >= depth_) return;
      }
      std::optional<Job> job = source_();
      if (!job) {
        exhausted_ = true;
        return;
      }
      {
        const std::lock_guard lock(mutex_);
        slots_.emplace_back(std::move(*job));
      }
      ready_.notify_one();
    }
  }

  void run() {
    if (enter_) enter_();
    std::unique_lock lock(mutex_);
    while (true) {
      ready_.wait(lock, [this] { return stopping_ || taken_ < slots_.size(); });
      if (stopping_) return;
      Slot& slot = slots_[taken_++];  // a deque's elements stay in place while its ends grow and shrink
      lock.unlock();
      try {
        slot.result.emplace(work_(slot.job));
      } catch (...) {
        slot.error = std::current_exception();
      }
      lock.lock();
      slot.done = true;
      done_.notify_one();
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  const std::size_t depth_;
  const Source source_;
  const Work work_;
  const std::function<void()> enter_;
  bool exhausted_ = false;

  std::mutex mutex_;
  std::condition_variable ready_, done_;
  std::deque<Slot> slots_;  // jobs not yet returned, in order; the first `taken_` are running or done
  std::size_t taken_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lockstep::detail
