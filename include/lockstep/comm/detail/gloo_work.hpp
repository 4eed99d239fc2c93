#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include <c10/util/SmallVector.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/call.hpp"
#include "lockstep/detail/linkage.hpp"

namespace lockstep::detail {

class GlooGroup;

/// The Work of GlooComm. On a CPU wait() and synchronize() are equivalent. Not thread-safe.
class [[nodiscard]] GlooWork {
 public:
  /// Constructs a Work that is complete.
  GlooWork();
  GlooWork(std::shared_ptr<GlooGroup> group, Call call);

  GlooWork(GlooWork&&) noexcept;
  GlooWork& operator=(GlooWork&& other) noexcept;
  ~GlooWork();

  void wait();
  void synchronize();
  void synchronize(std::chrono::milliseconds timeout);

  [[nodiscard]] std::exception_ptr error() const noexcept;

  /// Adds a c10d work that must be complete before this one is.
  void add(c10::intrusive_ptr<c10d::Work> part);
  /// Sets the function that the first wait runs after completion. It never runs if nothing waits.
  void at_end(std::function<void()> work);

 private:
  [[nodiscard]] std::chrono::milliseconds timeout() const;

  void wait_until(std::chrono::steady_clock::time_point until);

  // Gloo drops a message whose work is destroyed, so the group keeps it.
  void let_go() noexcept;

  std::shared_ptr<GlooGroup> group_;
  Call call_;
  c10::SmallVector<c10::intrusive_ptr<c10d::Work>, 1> parts_;
  std::function<void()> at_end_;
  std::exception_ptr error_;
};

static_assert(AsyncWork<GlooWork>);

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/comm/detail/gloo_work-inl.hpp"
#endif
