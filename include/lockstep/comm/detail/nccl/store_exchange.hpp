#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/membership.hpp"

namespace lockstep::detail {

/// An asynchronous exchange of bytes through the store. NCCL would move the bytes only through GPU memory,
/// and the program could keep their order with the collectives only by waiting in between.
///
/// Each rank of `from` writes its bytes in the constructor. complete() returns whether all bytes have
/// arrived, and finish() reads them. The last rank to read them deletes them. Every function throws what
/// Membership::at_store throws, at the latest at the group's timeout, even if the store does not answer.
class StoreExchange {
 public:
  /// Receives the bytes of the ranks of `from`, in their order.
  using Deliver = std::function<void(std::vector<std::string>)>;

  StoreExchange(Membership& membership, const Call& call, std::vector<int> from, const std::string& own,
                Deliver deliver)
      : membership_(membership),
        call_(call),
        name_(fmt::format("bytes/{}", call.sequence)),
        from_(std::move(from)),
        deliver_(std::move(deliver)) {
    const int rank = membership.rank();
    if (std::find(from_.begin(), from_.end(), rank) == from_.end()) return;
    membership_.at_store(call_, [name = name_, rank, own](c10d::Store& store) {
      // The store limits the size of a value.
      const std::size_t pieces = (own.size() + piece - 1) / piece;
      for (std::size_t i = 0; i < pieces; ++i) store.set(key(name, rank, i), own.substr(i * piece, piece));
      store.set(key(name, rank), std::to_string(pieces));
      return true;
    });
  }

  /// Returns whether all bytes have arrived. Blocks at most 100 ms if the store does not answer.
  [[nodiscard]] bool complete() {
    const auto arrived =
        membership_.at_store_until(call_, std::chrono::steady_clock::now() + std::chrono::milliseconds(100),
                                   [name = name_, from = from_, known = arrived_](c10d::Store& store) {
                                     std::size_t arrived = known;
                                     while (arrived < from.size() && store.check({key(name, from[arrived])}))
                                       ++arrived;
                                     return arrived;
                                   });
    arrived_ = std::max(arrived_, arrived.value_or(0));
    return arrived_ == from_.size();
  }

  void finish() {
    deliver_(membership_.at_store(
        call_, [name = name_, from = from_, size = membership_.size()](c10d::Store& store) {
          std::vector<std::string> all(from.size());
          std::vector<std::string> keys;
          for (std::size_t i = 0; i < from.size(); ++i) {
            keys.push_back(key(name, from[i]));
            const std::uint64_t pieces = std::stoull(store.get_to_str(keys.back()));
            for (std::size_t p = 0; p < pieces; ++p) {
              keys.push_back(key(name, from[i], p));
              all[i] += store.get_to_str(keys.back());
            }
          }
          keys.push_back(name + "/read");
          if (store.add(keys.back(), 1) == size)
            for (const std::string& key : keys) store.deleteKey(key);
          return all;
        }));
  }

 private:
  static constexpr std::size_t piece = 4 << 20;

  static std::string key(const std::string& name, int rank) { return fmt::format("{}/{}", name, rank); }
  static std::string key(const std::string& name, int rank, std::size_t i) {
    return fmt::format("{}/{}/{}", name, rank, i);
  }

  Membership& membership_;
  Call call_;
  std::string name_;
  std::vector<int> from_;
  std::size_t arrived_ = 0;
  Deliver deliver_;
};

}  // namespace lockstep::detail
