#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/serialize/archive.h>

#include "lockstep/data/dataset.hpp"
#include "lockstep/data/detail/option_checks.hpp"
#include "lockstep/data/generator.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/drawn_batch.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1::detail {

/// Makes tensor operations that this thread calls single-threaded, for threads that load data during training.
///
/// `at::set_num_threads` would affect the whole process: it stores a number that threads started later use.
/// OpenMP's own setting affects the calling thread only.
inline void keep_math_on_this_thread() {
  at::get_num_threads();  // LibTorch initializes a thread at its first such call, and would undo the setting
  using SetThreads = void (*)(int);
  static const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads) set_threads(1);
}

/// Returns a hash of a batch, of a large tensor by a million of its bytes; 0 if the values of each tensor are equal, or
/// a tensor is not on the CPU or not contiguous.
template <class Batch>
std::uint64_t hash_of_batch(Batch& batch) {
  std::uint64_t hash = fnv1a_basis;
  bool whole = true, varies = false;
  if constexpr (TensorBatch<Batch>)
    for_each_tensor(batch, [&](const at::Tensor& tensor) {
      if (!(whole = whole && tensor.is_cpu() && tensor.has_storage() && tensor.is_contiguous())) return;
      const std::string_view bytes(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
      for (std::size_t i = 0; i < bytes.size(); i += 1 + (bytes.size() >> 20)) {
        hash = fnv1a(bytes.substr(i, 1), hash);
        varies = varies || bytes[i] != bytes[i % tensor.element_size()];
      }
    });
  return whole && varies ? hash : 0;
}

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

  /// Starts the workers. Throws Error if not all of them can start.
  Prefetcher(std::size_t workers, std::size_t depth, Source source, Work work)
      : Prefetcher(depth, std::move(source), std::move(work)) {
    try {
      while (threads_.size() < workers) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error& error) {  // the destructor stops those that started
      throw Error(formatted("only {} of {} worker threads could be started ({}): ask for fewer workers",
                            threads_.size(), workers, error.code().message()));
    }
  }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  /// False in a forked child, where the threads do not run and the destructor would wait for ever.
  [[nodiscard]] bool runs_here() const { return getpid() == owner_; }
  ~Prefetcher() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

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
  Prefetcher(std::size_t depth, Source source, Work work)
      : depth_(depth), source_(std::move(source)), work_(std::move(work)) {}

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
    keep_math_on_this_thread();
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

  const std::size_t depth_;
  const Source source_;
  const Work work_;
  bool exhausted_ = false;

  std::mutex mutex_;
  std::condition_variable ready_, done_;
  std::deque<Slot> slots_;  // jobs not yet returned, in order; the first `taken_` are running or done
  std::size_t taken_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  const pid_t owner_ = getpid();
};

/// Gives a plain Sampler the members of ResumableSampler that DataLoader uses. Each copy counts its own
/// passes and samples, and every pass starts at position 0.
template <Sampler S>
class CountedSampler {
 public:
  [[nodiscard]] static bool draws_base_seed() { return false; }

  explicit CountedSampler(S sampler) : sampler_(std::move(sampler)) {}

  void set_epoch(std::int64_t epoch) {
    sampler_.set_epoch(epoch);
    epoch_.set(epoch);
    epoch_.enter();
  }
  void reset() {
    sampler_.reset();
    position_ = 0;
    epoch_.begin_pass();
  }
  std::optional<std::vector<std::size_t>> next(std::size_t count) {
    auto indices = sampler_.next(count);
    if (indices) position_ += indices->size();
    return indices;
  }
  void skip(std::size_t count) {
    if (count > 0) next(count);
  }
  void save(torch::serialize::OutputArchive& archive) const { sampler_.save(archive); }

  [[nodiscard]] std::size_t size() const { return sampler_.size(); }
  [[nodiscard]] std::int64_t pass_epoch() const { return epoch_.pass(); }
  [[nodiscard]] std::size_t position() const { return position_; }
  [[nodiscard]] bool begun() const { return epoch_.begun(); }
  [[nodiscard]] bool resumes() const { return false; }
  [[nodiscard]] int rank() const { return std::max(0, process_rank.load()); }
  [[nodiscard]] S& plain() { return sampler_; }
  [[nodiscard]] const S& plain() const { return sampler_; }

 private:
  S sampler_;
  SamplerEpoch epoch_;
  std::size_t position_ = 0;
};

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

/// A function that transforms a sample or a batch. It must draw from the given generator alone.
using Transform = std::function<Example(Example, at::Generator&)>;

/// Options of DataLoader.
struct LoaderOptions {
  /// Samples per batch of this rank. At least 1.
  std::int64_t batch_size = 32;
  /// Number of worker threads that load batches ahead. 0 loads each batch in the caller's thread, on demand.
  std::int64_t num_workers = 0;
  /// Batches that each worker loads ahead of the consumer. 0 counts as 1.
  std::int64_t prefetch_factor = 2;
  /// Drop the last batch if it is not full.
  bool drop_last = false;
  /// Applied to each sample before collation: the dataset must be able to load single samples.
  Transform transform = {};
  /// Applied to each collated batch.
  Transform batch_transform = {};
  /// Seed of the transforms. Their draws follow from (seed, epoch, rank, index of the batch's first sample),
  /// at any number of workers.
  std::uint64_t seed = 0;
  /// Rank from which the transforms' draws follow. Default: the sampler's rank, or this process's if the
  /// sampler is not a ResumableSampler.
  std::optional<int> rank = std::nullopt;
  /// Advance the epoch with each further pass, unless `set_epoch` was called since the last one.
  bool advance_epoch = true;
  /// Draw one number from the default generator at the start of each pass, as Python's DataLoader does. Other
  /// users of that generator (dropout) then draw the same numbers as in Python.
  bool draw_base_seed = true;
  /// Copy each batch to pinned memory in the thread that loaded it, so that copies to a GPU do not block the
  /// caller (see StagedBatches). No-op without a GPU.
  bool pin_memory = false;
};

/// Combines a dataset and a sampler, and iterates over batches: `for (auto& batch : loader)`. The order is the
/// sampler's, regardless of the workers' timing. A batch of a dataset of tensors is an `Example` of stacked tensors.
///
/// Stores dataset and sampler by value. Workers call the dataset and the transforms concurrently on this one
/// copy; tensor operations in a worker run on its thread alone. If a worker throws, the consumer gets the
/// exception when it reaches that batch: a lockstep error unchanged, any other nested in a DataError that
/// names the rank and the batch. Leaving the loop early stops and joins all workers.
///
/// Supports one pass at a time. Not thread-safe.
///
/// Counterpart: torch.utils.data.DataLoader.
template <Dataset D, Sampler S>
class DataLoader {
 public:
  using Batch = BatchOf<D>;
  class Iterator;

  /// Throws UsageError if the batch size is below 1, a number of workers or batches out of range, or a transform does not fit the
  /// dataset.
  DataLoader(D dataset, S sampler, LoaderOptions options = {})
      : dataset_(std::move(dataset)), sampler_(std::move(sampler)), options_(std::move(options)) {
    detail::check_batch_size(options_.batch_size);
    detail::check_workers(options_.num_workers);
    if (options_.prefetch_factor < 0 || options_.prefetch_factor > 1'000'000)
      throw UsageError(detail::formatted("prefetch_factor is {}: give a number of batches, 0 to 1,000,000",
                                         options_.prefetch_factor));
    if (!std::same_as<Batch, Example> && (options_.transform || options_.batch_transform))
      throw UsageError(
          "the loader's transforms take an Example of two tensors, and this dataset's batches are of another "
          "type: transform the samples in the dataset");
    if (options_.transform && !has_single_samples)
      throw UsageError(
          "this dataset makes whole batches only: give the loader a batch_transform, not a transform");
  }
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Starts a pass. Throws UsageError if another pass is running.
  Iterator begin() {
    if (pass_under_way_)
      throw UsageError("a pass over this DataLoader is already running: end that loop first");
    if (sampler_.begun()) sampler_.set_epoch(sampler_.pass_epoch() + (options_.advance_epoch ? 1 : 0));
    // A resumed pass drew its base seed when it was started.
    if (!sampler_.draws_base_seed() && options_.draw_base_seed && !sampler_.resumes())
      at::empty({}, at::kLong).random_();
    start_.reset();  // frees the order of the last pass
    sampler_.reset();
    start_.emplace(sampler_);
    return Iterator(*this);
  }
  static std::default_sentinel_t end() { return {}; }

  /// Returns the number of this rank's batches in a pass, before it starts.
  [[nodiscard]] std::size_t size() const { return batches(sampler_.size()); }

  /// Writes the state that the sampler has after `samples` samples of the current pass, regardless of how far
  /// workers have read ahead. To resume, call `sampler().load` before a pass.
  void save(torch::serialize::OutputArchive& archive, std::size_t samples) const {
    SamplerWithPosition saved(start_ ? *start_ : sampler_);
    saved.skip(samples);
    saved.save(archive);
  }

  /// Sets the epoch of the next pass.
  void set_epoch(std::int64_t epoch) {
    if (pass_under_way_)
      next_epoch_ = epoch;  // the sampler would begin it at once
    else
      sampler_.set_epoch(epoch);
  }
  /// Returns the epoch of the current pass, or the sampler's epoch before the first pass.
  [[nodiscard]] std::int64_t epoch() const { return sampler_.pass_epoch(); }

  /// Returns the dataset that it reads.
  [[nodiscard]] const D& dataset() const { return dataset_; }
  [[nodiscard]] S& sampler() { return plain(sampler_); }
  [[nodiscard]] const S& sampler() const { return plain(sampler_); }
  /// Returns the options that it was constructed with.
  [[nodiscard]] const LoaderOptions& options() const { return options_; }

 private:
  static_assert(
      ResumableSampler<S> || !requires(const S& sampler) { sampler.resumes(); },
      "lockstep: a sampler with resumes() has all members of ResumableSampler");

  // The sampler, or its adapter if it does not count its passes and samples itself.
  using SamplerWithPosition = std::conditional_t<ResumableSampler<S>, S, detail::CountedSampler<S>>;

  struct Job {
    std::vector<std::size_t> indices;
    std::size_t number;  // of its first sample in this rank's pass
    std::int64_t epoch;
    int rank;
  };

  static constexpr bool gives_examples = requires(D & dataset, c10::ArrayRef<std::size_t> indices) {
    { dataset.get_batch(indices) } -> std::same_as<std::vector<Example>>;
  };
  static constexpr bool has_single_samples = IndexedDataset<D> || gives_examples;

  static auto& plain(auto& sampler) {
    if constexpr (ResumableSampler<S>)
      return sampler;
    else
      return sampler.plain();
  }

  [[nodiscard]] int rank() const { return options_.rank ? *options_.rank : sampler_.rank(); }
  [[nodiscard]] std::size_t batch_size() const { return static_cast<std::size_t>(options_.batch_size); }
  [[nodiscard]] std::size_t batches(std::size_t samples) const {
    return samples / batch_size() + (!options_.drop_last && samples % batch_size() != 0 ? 1 : 0);
  }
  // The number of batches of the last rank in the coming pass, and the number of ranks; none if it is unknown.
  [[nodiscard]] detail::DrawnBatch last_rank() const {
    if constexpr (CountingSampler<S> && requires { sampler_.world_size(); })
      return {0, batches(sampler_.size_of(sampler_.world_size() - 1)), sampler_.world_size(), 0};
    return {};
  }

  std::optional<Job> next_job() {
    const std::size_t number = sampler_.position();
    auto indices = sampler_.next(batch_size());
    if (!indices || (options_.drop_last && indices->size() < batch_size())) return std::nullopt;
    return Job{std::move(*indices), number, epoch(), rank()};
  }

  // Workers call this concurrently: it must not write to members.
  Batch load(const Job& job) {
    const at::NoGradGuard no_grad;
    try {
      Batch batch = load_unchecked(job);
      if constexpr (TensorBatch<Batch>)
        if (options_.pin_memory && at::hasCUDA())
          for_each_tensor(batch, [](at::Tensor& tensor) {
            if (tensor.is_cpu()) tensor = tensor.pin_memory();
          });
      return batch;
    } catch (const Error&) {
      throw;
    } catch (const c10::Error& error) {
      std::throw_with_nested(DataError(describe(job, error.what_without_backtrace())));
    } catch (const std::exception& error) {
      std::throw_with_nested(DataError(describe(job, error.what())));
    }
  }

  Batch load_unchecked(const Job& job) {
    if constexpr (std::same_as<Batch, Example>) {
      if (options_.transform || options_.batch_transform) {
        at::Generator generator =
            keyed_generator({options_.seed, job.epoch, static_cast<std::uint32_t>(job.rank), job.number});
        Batch batch =
            options_.transform ? load_transformed(job, generator) : make_batch(dataset_, job.indices);
        return options_.batch_transform ? options_.batch_transform(std::move(batch), generator) : batch;
      }
    }
    return make_batch(dataset_, job.indices);
  }

  Batch load_transformed(const Job& job, at::Generator& generator) {
    std::vector<Example> examples;
    if constexpr (gives_examples) {
      examples = dataset_.get_batch(job.indices);
      for (Example& example : examples) example = options_.transform(std::move(example), generator);
    } else if constexpr (IndexedDataset<D>) {
      examples.reserve(job.indices.size());
      for (const std::size_t index : job.indices)
        examples.push_back(options_.transform(dataset_.get(index), generator));
    }
    return collate(std::move(examples));
  }

  std::string describe(const Job& job, const std::string& what) const {
    return detail::formatted("rank {} could not load batch {} of epoch {} (dataset indices {}{}): {}",
                             job.rank, job.number / batch_size() + 1, job.epoch + 1, job.indices.front(),
                             job.indices.size() > 1 ? detail::formatted(", ..., {}", job.indices.back()) : "",
                             what);
  }

  D dataset_;
  SamplerWithPosition sampler_;
  LoaderOptions options_;
  std::optional<SamplerWithPosition> start_;  // the sampler at the start of the last pass
  std::optional<std::int64_t> next_epoch_;    // that was set during the pass
  bool pass_under_way_ = false;
};

/// A pass over a loader's batches. Move-only; its destructor ends the pass.
template <Dataset D, Sampler S>
class DataLoader<D, S>::Iterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using iterator_concept = std::input_iterator_tag;

  Iterator(Iterator&& other) noexcept
      : loader_(std::exchange(other.loader_, nullptr)),
        prefetcher_(std::move(other.prefetcher_)),
        batch_(std::move(other.batch_)),
        drawn_(other.drawn_),
        outer_(other.outer_) {}
  Iterator& operator=(Iterator&& other) noexcept {
    std::swap(loader_, other.loader_);
    std::swap(prefetcher_, other.prefetcher_);
    std::swap(batch_, other.batch_);
    std::swap(drawn_, other.drawn_);
    std::swap(outer_, other.outer_);
    return *this;
  }
  ~Iterator() { finish(); }

  Batch& operator*() const { return *batch_; }
  Batch* operator->() const { return &*batch_; }
  Iterator& operator++() {
    advance();
    return *this;
  }
  void operator++(int) { advance(); }
  bool operator==(std::default_sentinel_t) const { return !batch_; }

 private:
  friend class DataLoader;

  explicit Iterator(DataLoader& loader) : loader_(&loader), drawn_(loader.last_rank()) {
    loader.pass_under_way_ = true;
    try {
      if (const auto workers = static_cast<std::size_t>(loader.options_.num_workers); workers > 0)
        prefetcher_ = std::make_unique<detail::Prefetcher<Job, Batch>>(
            workers,
            workers * static_cast<std::size_t>(std::max<std::int64_t>(1, loader.options_.prefetch_factor)),
            [&loader] { return loader.next_job(); }, [&loader](Job& job) { return loader.load(job); });
      advance();
    } catch (...) {
      finish();
      throw;
    }
  }

  void advance() {
    batch_.reset();  // frees its memory for the next batch
    if (!loader_) return;
    try {
      if (prefetcher_) {
        batch_ = prefetcher_->next();
      } else if (const auto job = loader_->next_job()) {
        batch_ = loader_->load(*job);
      }
    } catch (...) {
      finish();
      throw;
    }
    if (!batch_) return finish();
    if (++drawn_.number == 1) drawn_.first = detail::hash_of_batch(*batch_);
    detail::drawn_batch = drawn_;
    if (detail::served_call.name) detail::drawn_batch.ranks = 0;
  }

  void finish() {
    if (prefetcher_ && !prefetcher_->runs_here()) static_cast<void>(prefetcher_.release());
    prefetcher_.reset();  // joins the workers
    if (!loader_) return;
    DataLoader& loader = *std::exchange(loader_, nullptr);
    loader.pass_under_way_ = false;
    if (const auto epoch = std::exchange(loader.next_epoch_, std::nullopt)) loader.sampler_.set_epoch(*epoch);
    detail::drawn_batch = outer_;
  }

  DataLoader* loader_;
  std::unique_ptr<detail::Prefetcher<Job, Batch>> prefetcher_;
  mutable std::optional<Batch> batch_;
  detail::DrawnBatch drawn_;
  detail::DrawnBatch outer_ = detail::drawn_batch;  // of a loop around this one
};

template <class D, class S>
DataLoader(D, S, LoaderOptions) -> DataLoader<D, S>;
template <class D, class S>
DataLoader(D, S) -> DataLoader<D, S>;

namespace detail {

/// A stream from LibTorch's pool of a device that copies batches concurrently with the computation on the
/// current stream. Not thread-safe.
class SideStream {
 public:
  explicit SideStream(const c10::Device& device)
      : device_(device), guard_(device.type()), side_(guard_.getStreamFromGlobalPool(device)) {}

  /// Launches the copy of a pinned tensor, which must live until the copy is complete.
  [[nodiscard]] at::Tensor copy(const at::Tensor& tensor) const {
    const c10::StreamGuard on_side(side_);
    return tensor.to(device_, tensor.scalar_type(), /*non_blocking=*/true);
  }
  /// Returns an event after all copies launched so far.
  [[nodiscard]] c10::Event record() const {
    c10::Event event(device_.type());
    event.record(side_);
    return event;
  }
  /// Makes all later work on the current stream wait for the event. Does not block the host.
  void wait(const c10::Event& event) const { event.block(guard_.getStream(device_)); }
  /// Keeps the memory of a tensor of this stream until the work submitted to the current stream is complete.
  void hand_over(const at::Tensor& tensor) const { tensor.record_stream(guard_.getStream(device_)); }

 private:
  c10::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream side_;
};

}  // namespace detail

/// A pass over a loader's batches that copies each to a device while the caller computes on the previous one:
/// from pinned memory, on a separate stream, without blocking the host. Without a stream it yields the
/// loader's batches unchanged and does not read ahead.
///
/// With a stream it reads one batch ahead of the caller. The increment that reaches a batch, or the
/// constructor, throws the exception from reading it. Tensors that are not on the CPU stay where they are.
/// Not thread-safe; loader and stream must outlive it.
template <class Loader>
class StagedPass {
 public:
  using Batch = typename Loader::Batch;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using iterator_concept = std::input_iterator_tag;

  /// Starts a pass of `loader`. `stream` may be null.
  StagedPass(Loader& loader, detail::SideStream* stream) : stream_(stream), host_(loader.begin()) {
    if (!stream_) return;
    stage();
    advance();
  }
  StagedPass(StagedPass&& other) = default;
  StagedPass& operator=(StagedPass&&) = delete;
  /// Blocks until the copies in flight, whose memory it owns, are complete.
  ~StagedPass() {
    try {
      while (!copying_.empty()) release_first();
    } catch (...) {  // the device has failed; the next operation on it reports that
    }
  }

  Batch& operator*() const { return stream_ ? *batch_ : *host_; }
  Batch* operator->() const { return &**this; }
  StagedPass& operator++() {
    if (stream_)
      advance();
    else
      ++host_;
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t end) const { return stream_ ? !batch_ : host_ == end; }

 private:
  struct Copying {
    c10::Event event;
    std::vector<at::Tensor> pinned;
  };

  // Maximum number of copies in flight: the next batch's, and one that is about to complete.
  static constexpr std::size_t most_copying = 2;

  void advance() {
    batch_.reset();  // frees its memory for another batch
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    if (!next_) return;
    if (!arrived_.empty()) stream_->wait(copying_.back().event);
    for (const at::Tensor& tensor : arrived_) stream_->hand_over(tensor);
    arrived_.clear();
    batch_ = std::exchange(next_, std::nullopt);
    const detail::DrawnBatch drawn = next_drawn_;
    stage();
    detail::drawn_batch = drawn;
  }

  // Reads the next batch and launches its copies.
  void stage() {
    try {
      if (drawn_) ++host_;
      drawn_ = true;
      if (host_ == std::default_sentinel) return;
      next_.emplace(std::move(*host_));
      next_drawn_ = detail::drawn_batch;
      if constexpr (TensorBatch<Batch>) begin_copies(*next_);
    } catch (...) {
      arrived_.clear();
      next_.reset();
      error_ = std::current_exception();
    }
  }

  void begin_copies(Batch& batch) {
    while (!copying_.empty() && (copying_.size() >= most_copying || copying_.front().event.query()))
      release_first();
    std::vector<at::Tensor> pinned;
    const auto keep = [&] {
      if (!pinned.empty()) copying_.push_back({stream_->record(), std::move(pinned)});
    };
    try {
      for_each_tensor(batch, [&](at::Tensor& tensor) {
        if (!tensor.is_cpu()) return;
        pinned.push_back(tensor.is_pinned() ? tensor : tensor.pin_memory());
        tensor = stream_->copy(pinned.back());
        arrived_.push_back(tensor);
      });
    } catch (...) {
      keep();  // keeps the memory of the copies already launched
      throw;
    }
    keep();
  }

  void release_first() {
    copying_.front().event.synchronize();
    copying_.pop_front();
  }

  detail::SideStream* stream_;
  typename Loader::Iterator host_;
  bool drawn_ = false;
  std::optional<Batch> next_;
  detail::DrawnBatch next_drawn_;
  mutable std::optional<Batch> batch_;
  std::vector<at::Tensor> arrived_;  // tensors of `next_`, which the last event of `copying_` covers
  std::deque<Copying> copying_;
  std::exception_ptr error_;
};

/// Iterates over a loader's batches on a device: `for (auto& batch : StagedBatches{loader, device})`, each a
/// StagedPass. On another device than a GPU, and for batches that do not model TensorBatch, yields the loader's
/// batches unchanged. Supports one pass at a time; the loader must outlive it.
template <class Loader>
class StagedBatches {
 public:
  /// `device` receives the batches; a CUDA device gets a stream for the copies.
  StagedBatches(Loader& loader, const c10::Device& device) : loader_(loader) {
    if (device.is_cuda()) stream_.emplace(device);
  }

  [[nodiscard]] StagedPass<Loader> begin() {
    return StagedPass<Loader>(loader_, stream_ ? &*stream_ : nullptr);
  }
  static std::default_sentinel_t end() { return {}; }

 private:
  Loader& loader_;
  std::optional<detail::SideStream> stream_;
};

}  // namespace lockstep::inline v0_1
