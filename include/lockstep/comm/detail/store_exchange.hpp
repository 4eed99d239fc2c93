#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/world/detail/store_keys.hpp"

namespace lockstep::detail {

/// An asynchronous exchange of bytes through the store, for a transport that moves bytes only through GPU
/// memory, or whose two collectives per exchange would need a wait in between.
///
/// Each rank of `from` writes its bytes in the constructor. complete() returns whether all bytes have
/// arrived, and finish() reads them. The last rank to read them deletes them. Every function throws as
/// Membership::at_store does.
class StoreExchange {
 public:
  using Clock = std::chrono::steady_clock;
  /// Receives the bytes of the ranks of `from`, in their order.
  using Deliver = std::function<void(std::vector<std::string>)>;

  StoreExchange(Membership& membership, const Call& call, std::vector<int> from, const std::string& own,
                Deliver deliver)
      : membership_(membership),
        call_(call),
        name_(store_keys::bytes(call.sequence)),
        from_(std::move(from)),
        deliver_(std::move(deliver)) {
    for (const int from : from_) keys_.push_back(key(name_, from));
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

  /// Returns whether all bytes have arrived. Blocks until `until` at most if the store does not answer.
  [[nodiscard]] bool complete(Clock::time_point until) {
    return membership_
        .at_store_until(call_, until, [keys = keys_](c10d::Store& store) { return store.check(keys); })
        .value_or(false);
  }

  /// Reads and delivers the bytes. Throws TimeoutError if the store has not answered at `until`.
  void finish(Clock::time_point until) {
    auto all = membership_.at_store_until(
        call_, until, [name = name_, from = from_, size = membership_.size()](c10d::Store& store) {
          std::vector<std::string> bytes(from.size());
          std::vector<std::string> keys;
          for (std::size_t i = 0; i < from.size(); ++i) {
            keys.push_back(key(name, from[i]));
            const std::uint64_t pieces = std::stoull(store.get_to_str(keys.back()));
            for (std::size_t p = 0; p < pieces; ++p) {
              keys.push_back(key(name, from[i], p));
              bytes[i] += store.get_to_str(keys.back());
            }
          }
          keys.push_back(name + "/read");
          if (store.add(keys.back(), 1) == size)
            for (const std::string& key : keys) store.deleteKey(key);
          return bytes;
        });
    if (!all) membership_.throw_store_timeout(call_);
    deliver_(std::move(*all));
  }

 private:
  static constexpr std::size_t piece = 4 << 20;

  static std::string key(const std::string& name, int rank) { return detail::formatted("{}/{}", name, rank); }
  static std::string key(const std::string& name, int rank, std::size_t i) {
    return detail::formatted("{}/{}/{}", name, rank, i);
  }

  Membership& membership_;
  Call call_;
  std::string name_;
  std::vector<int> from_;
  std::vector<std::string> keys_;  // of `from_`, by their order there
  Deliver deliver_;
};

}  // namespace lockstep::detail
