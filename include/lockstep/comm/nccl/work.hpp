#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <utility>

#include "lockstep/comm/nccl/group.hpp"
#include "lockstep/comm/nccl/store_exchange.hpp"
#include "lockstep/comm/work.hpp"

namespace lockstep {

/// The Work of BasicNcclComm. join_stream() makes the current stream wait for the collective and returns at
/// once; an error that comes later is thrown by the communicator's next call. Of bytes, which are for the
/// host, it waits as wait_host() does. One thread may use it at a time.
template <NcclDevice D>
class [[nodiscard]] NcclWork {
 public:
  using Group = std::shared_ptr<detail::NcclGroup<D>>;
  using Clock = std::chrono::steady_clock;

  /// A complete one.
  NcclWork() = default;
  NcclWork(Group group, typename detail::Flights<D>::FlightPtr flight)
      : group_(std::move(group)), flight_(std::move(flight)) {}
  NcclWork(Group group, detail::Call call, std::unique_ptr<detail::StoreExchange> exchange)
      : group_(std::move(group)), call_(call), exchange_(std::move(exchange)) {}

  NcclWork(NcclWork&& other) noexcept = default;
  NcclWork& operator=(NcclWork&& other) noexcept {
    if (this == &other) return *this;
    let_go();
    group_ = std::move(other.group_);
    flight_ = std::move(other.flight_);
    call_ = other.call_;
    exchange_ = std::move(other.exchange_);
    return *this;
  }
  ~NcclWork() { let_go(); }

  void join_stream() {
    if (flight_)
      group_->join(*flight_);
    else
      wait_host();
  }
  void wait_host() {
    if (group_) wait_until(start() + group_->deadline());
  }
  void wait_host(std::chrono::milliseconds deadline) {
    // The smaller of the two first: the largest duration there is has no place on the clock.
    if (group_)
      wait_until(
          std::min(Clock::now() + std::min(deadline, group_->deadline()), start() + group_->deadline()));
  }

  [[nodiscard]] std::exception_ptr error() const noexcept {
    return flight_ ? group_->error_of(*flight_) : nullptr;
  }

 private:
  [[nodiscard]] Clock::time_point start() const { return flight_ ? flight_->call.start : call_.start; }

  void wait_until(Clock::time_point until) {
    if (flight_) {
      group_->await(*flight_, until);
    } else if (exchange_) {
      group_->await(call_, nullptr, until, [&] { return exchange_->complete(); });
      exchange_->finish();
      exchange_.reset();
    }
  }

  void let_go() noexcept {
    if (flight_) group_->give_back(flight_);
    flight_.reset();
  }

  Group group_;
  typename detail::Flights<D>::FlightPtr flight_;
  detail::Call call_;  // of an exchange
  std::unique_ptr<detail::StoreExchange> exchange_;
};

}  // namespace lockstep
