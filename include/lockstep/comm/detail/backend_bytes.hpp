#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/comm/detail/bytes_header.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

/// Copies a string into a new tensor [length], padded with zeros.
inline at::Tensor bytes_tensor(const std::string& bytes, std::int64_t length) {
  auto tensor = at::zeros({length}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.data_ptr()));
  return tensor;
}
inline std::string bytes_in(const at::Tensor& tensor, std::int64_t length) {
  return {static_cast<const char*>(tensor.data_ptr()), static_cast<std::size_t>(length)};
}

/// Gathers the bytes of every rank. Every exchange of bytes has two halves: `start` sends their headers;
/// `send_bytes` sends the bytes once the headers have arrived, and throws MismatchError if the headers name
/// different public calls. `finish` builds the result from the received bytes.
struct BytesGather {
  std::string own;
  ServedCall served;
  std::vector<int> ranks;        // of the group, as errors name them
  std::vector<std::string> all;  // the result

  BackendWork start(c10d::Backend& backend) {
    headers = at::empty({backend.getSize(), BytesHeader::numbers}, at::kLong);
    return start_all_gather(backend, headers, BytesHeader::of(own.size(), served));
  }
  std::vector<BackendWork> send_bytes(c10d::Backend& backend) {
    if (const std::string calls = BytesHeader::different_calls(headers, ranks); !calls.empty())
      throw MismatchError(calls);
    const int size = backend.getSize();
    lengths = BytesHeader::lengths(headers);
    const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    if (longest == 0) return {};
    if (longest * size <= std::max<std::int64_t>(2 * total, 1 << 16)) {
      const auto rows = at::empty({size, longest}, at::kByte);
      pieces = rows.unbind(0);
      return {start_all_gather(backend, rows, bytes_tensor(own, longest))};
    }
    // Padding unequal lengths to the longest would multiply the traffic.
    std::vector<BackendWork> parts;
    for (int rank = 0; rank < size; ++rank) {
      const std::int64_t length = lengths[static_cast<std::size_t>(rank)];
      pieces.push_back(rank == backend.getRank() ? bytes_tensor(own, length)
                                                 : at::empty({length}, at::kByte));
      if (length > 0) parts.push_back(start_broadcast(backend, pieces.back(), rank));
    }
    return parts;
  }
  void finish() {
    all.assign(lengths.size(), std::string());
    for (std::size_t rank = 0; rank < pieces.size(); ++rank)
      all[rank] = bytes_in(pieces[rank], lengths[rank]);
  }

  at::Tensor headers;
  std::vector<std::int64_t> lengths;
  std::vector<at::Tensor> pieces;  // by rank; none if every rank's bytes are empty
};

/// Broadcasts the bytes of `root`. See BytesGather for the two halves. Only the other ranks compare the names
/// of the calls: the root receives nothing.
struct BytesBroadcast {
  int root = 0;
  std::string bytes;  // the result
  ServedCall served;
  std::vector<int> ranks;  // of the group, as errors name them

  BackendWork start(c10d::Backend& backend) {
    header = BytesHeader::of(bytes.size(), served);
    return start_broadcast(backend, header, root);
  }
  std::vector<BackendWork> send_bytes(c10d::Backend& backend) {
    if (backend.getRank() != root) {
      const auto both = at::stack({header, BytesHeader::of(0, served)});
      const std::string calls = BytesHeader::different_calls(
          both,
          {ranks.at(static_cast<std::size_t>(root)), ranks.at(static_cast<std::size_t>(backend.getRank()))});
      if (!calls.empty()) throw MismatchError(calls);
    }
    const std::int64_t count = BytesHeader::lengths(header)[0];
    if (count == 0) return {};
    content = backend.getRank() == root ? bytes_tensor(bytes, count) : at::empty({count}, at::kByte);
    return {start_broadcast(backend, content, root)};
  }
  void finish() { bytes = content.defined() ? bytes_in(content, content.numel()) : std::string(); }

  at::Tensor header, content;
};

/// Runs asynchronous exchanges of bytes.
///
/// The second half of an exchange starts when its first half completes, on a thread of the backend's and at a
/// different moment on each rank, while the order of collectives must be equal on all ranks. So the second
/// halves run on a process group of their own, created when the first of them is due, in the order of the
/// calls.
class BytesLane : public std::enable_shared_from_this<BytesLane> {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  /// `connect` creates the process group. It runs on a thread of the backend's.
  explicit BytesLane(std::function<Backend()> connect) : connect_(std::move(connect)) {}

  /// Starts an exchange with its first half on `backend`. Returns a work that completes after both halves.
  template <class Exchange>
  BackendWork start(c10d::Backend& backend, const std::shared_ptr<Exchange>& exchange) {
    auto whole = c10::make_intrusive<Whole>();
    auto half = std::make_shared<SecondHalf>();
    half->whole = whole;
    half->send_bytes = [exchange, whole](c10d::Backend& own) {
      finish_after(exchange->send_bytes(own), exchange, whole);
    };
    const BackendWork first = exchange->start(backend);
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(half);
    }
    first->getFuture()->addCallback([lane = shared_from_this(), half](c10::ivalue::Future& future) {
      lane->proceed(*half, future.hasError() ? future.exception_ptr() : nullptr);
    });
    return whole;
  }

  /// Completes the second halves in flight. Requires that no exchange is in its first half; no exchange may
  /// start afterwards.
  void close() { backend_.reset(); }

 private:
  /// A work that completes when `finish` is called.
  struct Whole : c10d::Work {
    using c10d::Work::finish;
  };
  struct SecondHalf {
    c10::intrusive_ptr<Whole> whole;
    std::function<void(c10d::Backend&)> send_bytes;
    std::exception_ptr error;  // of the first half
    bool due = false;
  };

  template <class Exchange>
  static void finish_after(const std::vector<BackendWork>& parts, const std::shared_ptr<Exchange>& exchange,
                           const c10::intrusive_ptr<Whole>& whole) {
    const auto left = std::make_shared<std::atomic<std::size_t>>(parts.size() + 1);
    const auto count_down = [left, exchange, whole] {
      if (--*left > 0) return;
      exchange->finish();
      whole->finish();
    };
    for (const BackendWork& part : parts)
      part->getFuture()->addCallback([count_down, whole](c10::ivalue::Future& future) {
        future.hasError() ? whole->finish(future.exception_ptr()) : count_down();
      });
    count_down();
  }

  // Issues the second halves that are due, in the order of the calls, from one thread at a time.
  void proceed(SecondHalf& due, std::exception_ptr error) {
    std::unique_lock lock(mutex_);
    due.error = std::move(error);
    due.due = true;
    if (std::exchange(issuing_, true)) return;
    while (!waiting_.empty() && waiting_.front()->due) {
      const auto next = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      try {
        if (next->error) std::rethrow_exception(next->error);
        if (!backend_) backend_ = connect_();
        next->send_bytes(*backend_);
      } catch (...) {
        next->whole->finish(std::current_exception());
      }
      lock.lock();
    }
    issuing_ = false;
  }

  std::function<Backend()> connect_;
  Backend backend_;  // used only by the issuing thread
  std::mutex mutex_;
  std::deque<std::shared_ptr<SecondHalf>> waiting_;
  bool issuing_ = false;
};

}  // namespace lockstep::detail
