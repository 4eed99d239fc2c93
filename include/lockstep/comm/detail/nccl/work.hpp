#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <utility>

#include "lockstep/comm/detail/call.hpp"
#include "lockstep/comm/detail/nccl/group.hpp"
#include "lockstep/comm/detail/store_exchange.hpp"

namespace lockstep::detail {

/// The Work of BasicNcclComm. wait() is stream-ordered and returns at once; the communicator's next call
/// throws an error that occurs later. For an exchange of bytes, whose results are on the host, wait() is
/// synchronize(). Not thread-safe.
template <NcclDevice D>
class [[nodiscard]] NcclWork {
 public:
  using Group = std::shared_ptr<NcclGroup<D>>;
  using Clock = std::chrono::steady_clock;

  /// Constructs a Work that is complete.
  NcclWork() = default;
  NcclWork(Group group, typename InFlightOps<D>::InFlightOpPtr op)
      : group_(std::move(group)), op_(std::move(op)) {}
  NcclWork(Group group, Call call, std::unique_ptr<StoreExchange> exchange)
      : group_(std::move(group)), call_(call), exchange_(std::move(exchange)) {}

  NcclWork(NcclWork&& other) noexcept = default;
  NcclWork& operator=(NcclWork&& other) noexcept {
    if (this == &other) return *this;
    release_op();
    group_ = std::move(other.group_);
    op_ = std::move(other.op_);
    call_ = other.call_;
    exchange_ = std::move(other.exchange_);
    return *this;
  }
  ~NcclWork() { release_op(); }

  void wait() {
    if (op_)
      group_->wait(*op_);
    else
      synchronize();
  }
  void synchronize() {
    if (group_) wait_until(start() + group_->timeout());
  }
  void synchronize(std::chrono::milliseconds timeout) {
    // Take the minimum first: the largest duration would overflow the clock.
    if (group_)
      wait_until(std::min(Clock::now() + std::min(timeout, group_->timeout()), start() + group_->timeout()));
  }

  [[nodiscard]] std::exception_ptr error() const noexcept { return op_ ? group_->error_of(*op_) : nullptr; }

 private:
  [[nodiscard]] Clock::time_point start() const { return op_ ? op_->call.start : call_.start; }

  void wait_until(Clock::time_point until) {
    if (op_) {
      group_->await(*op_, until);
    } else if (exchange_) {
      group_->at_store(call_, until, [&] {
        group_->await(call_, nullptr, until, [&] { return exchange_->complete(until); });
        exchange_->finish(until);
      });
      exchange_.reset();
    }
  }

  void release_op() noexcept {
    if (op_) group_->give_back(op_);
    op_.reset();
  }

  Group group_;
  typename InFlightOps<D>::InFlightOpPtr op_;
  Call call_;  // of an exchange of bytes
  std::unique_ptr<StoreExchange> exchange_;
};

}  // namespace lockstep::detail
