#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::detail {

/// Bytes that go through the store while the program goes on: what NCCL would move only through the memory of
/// the GPUs, and in an order with the collectives that nobody can keep who does not wait in between.
///
/// Each rank of `from` puts its bytes there at the call; complete() asks, without blocking, whether all have
/// come, and finish() reads them. The last to have read takes them out again.
class StoreExchange {
 public:
  /// `deliver` is given the bytes of the ranks of `from`, in their order.
  using Deliver = std::function<void(std::vector<std::string>)>;

  StoreExchange(c10d::Store& store, const std::string& name, std::vector<int> from, int rank, int size,
                const std::string& own, Deliver deliver)
      : store_(store), name_(name), from_(std::move(from)), size_(size), deliver_(std::move(deliver)) {
    if (std::find(from_.begin(), from_.end(), rank) == from_.end()) return;
    // In pieces, of which a store takes any.
    const std::size_t pieces = (own.size() + piece - 1) / piece;
    for (std::size_t i = 0; i < pieces; ++i) store_.set(key(rank, i), own.substr(i * piece, piece));
    store_.set(key(rank), std::to_string(pieces));
  }

  [[nodiscard]] bool complete() {
    while (arrived_ < from_.size() && store_.check({key(from_[arrived_])})) ++arrived_;
    return arrived_ == from_.size();
  }

  void finish() {
    std::vector<std::string> all(from_.size());
    std::vector<std::string> keys;
    for (std::size_t i = 0; i < from_.size(); ++i) {
      keys.push_back(key(from_[i]));
      const std::uint64_t pieces = std::stoull(store_.get_to_str(keys.back()));
      for (std::size_t p = 0; p < pieces; ++p) {
        keys.push_back(key(from_[i], p));
        all[i] += store_.get_to_str(keys.back());
      }
    }
    keys.push_back(name_ + "/read");
    if (store_.add(keys.back(), 1) == size_)
      for (const std::string& key : keys) store_.deleteKey(key);
    deliver_(std::move(all));
  }

 private:
  static constexpr std::size_t piece = 4 << 20;

  [[nodiscard]] std::string key(int rank) const { return fmt::format("{}/{}", name_, rank); }
  [[nodiscard]] std::string key(int rank, std::size_t i) const { return fmt::format("{}/{}", key(rank), i); }

  c10d::Store& store_;
  std::string name_;
  std::vector<int> from_;
  int size_;
  std::size_t arrived_ = 0;
  Deliver deliver_;
};

}  // namespace lockstep::detail
