#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/comm/detail/group_status.hpp"
#include "lockstep/comm/detail/tensor_check.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

LOCKSTEP_INLINE void ProcessGroupWork::wait() {
  if (!group_ || group_->on_host()) return synchronize();
  if (error_) std::rethrow_exception(error_);
  try {  // the parts stay: error() asks them, and wait() may be called on another stream
    for (const auto& part : parts_) group_->order_stream(call_, *part);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  finish();
}

LOCKSTEP_INLINE void ProcessGroupWork::synchronize(std::chrono::milliseconds timeout) {
  if (error_) std::rethrow_exception(error_);
  if (group_) try {
      const auto longest = group_->timeout();
      // Take the minimum first: the largest duration would overflow the clock.
      const auto until =
          std::min(std::chrono::steady_clock::now() + std::min(timeout, longest), call_.start + longest);
      while (!parts_.empty()) {
        group_->await(call_, parts_.front(), until);
        if (call_.peer) group_->forget(parts_.front());
        parts_.erase(parts_.begin());  // a message may be waited for only once
      }
    } catch (...) {
      if (group_->failed()) error_ = std::current_exception();
      throw;
    }
  group_.reset();
  finish();
}

LOCKSTEP_INLINE void ProcessGroupWork::add(c10::intrusive_ptr<c10d::Work> part) {
  group_->hold(call_, part);
  parts_.push_back(std::move(part));
}

LOCKSTEP_INLINE void ProcessGroupWork::at_completion(std::function<void()> function) {
  if (parts_.size() == 1 && group_)
    group_->at_completion(parts_.front(), [function = std::move(function)](bool) { function(); });
}

/// Starts an operation by `start(backend, buffer)` as a part of the Work. If its result is `wanted`, completes what the
/// backend cannot compute of `op`, and copies it from the buffer to the bundle's tensors.
template <class Start>
void start_bundle(ProcessGroupWork& work, BackendGroup& group, const char* name, TensorBundle bundle,
                  const Start& start, std::optional<ReduceOp> op, bool wanted = true) {
  auto part = group.launch(name, [&](c10d::Backend& backend) {
    return start(backend, bundle.received.defined() ? bundle.received : bundle.buffer);
  });
  const int divisor = op == ReduceOp::avg && !group.averages() ? group.size() : 1;
  const bool done = divisor == 1 && bundle.in_place() && !bundle.received.defined();
  if (!wanted || done) return work.add(std::move(part));
  auto finish = [bundle = std::move(bundle), divisor, rank = group.rank()] {
    const at::NoGradGuard no_grad;
    if (bundle.received.defined()) bundle.take_row(rank);
    if (divisor > 1) bundle.buffer.detach().div_(divisor);
    bundle.unpack();
  };
  const bool finishes = group.at_completion(part, [finish](bool error) {
    if (!error) finish();
  });
  if (!finishes) work.at_end(std::move(finish));
  work.add(std::move(part));
}

/// A collective that writes to its tensors. `start(backend, buffer)` starts it on the one buffer of each dtype. A
/// reduction to `root` has a result there, a broadcast from it elsewhere.
template <class Start>
ProcessGroupWork in_place(const std::shared_ptr<BackendGroup>& group, const char* name,
                          at::TensorList tensors, std::optional<ReduceOp> op, std::optional<int> root,
                          const Start& start) {
  for (const at::Tensor& tensor : tensors) check_tensor(group->tensor_check(), name, tensor, op);
  if (root) group->check_rank(name, *root);
  const bool wanted = !root || (group->rank() == *root) == op.has_value();
  if (wanted) check_outputs(name, tensors);
  ProcessGroupWork work(group, group->begin(name, CallContent::of(op, root, tensors)));
  group->launch_all([&] {
    for (TensorBundle& bundle : bundles_of(tensors)) {
      bundle.pack();
      start_bundle(work, *group, name, std::move(bundle), start, op, wanted);
    }
  });
  return work;
}

/// A collective from inputs to outputs, which have `input_rows` and `output_rows` rows: one for each rank, or one.
/// `start(backend, output, input)` starts it on the buffers of each dtype.
template <class Start>
ProcessGroupWork exchange(const std::shared_ptr<BackendGroup>& group, const char* name,
                          at::TensorList outputs, int output_rows, at::TensorList inputs, int input_rows,
                          std::optional<ReduceOp> op, const Start& start) {
  check_outputs(name, outputs);
  ProcessGroupWork work(group, group->begin(name, CallContent::of(op, {}, inputs)));
  group->launch_all([&] {
    auto from = bundles_of(inputs, input_rows), to = bundles_of(outputs, output_rows);
    for (std::size_t i = 0; i < to.size(); ++i) {
      from[i].pack();
      to[i].allocate();
      const at::Tensor& input = from[i].buffer;
      // Not every LibTorch version has a Gloo reduce_scatter. It is an all-reduce of all rows, whose bits are thus its.
      if (op && group->on_host()) to[i].received = from[i].in_place() ? input.detach().clone() : input;
      const auto start_one = [&](c10d::Backend& backend, const at::Tensor& output) {
        return start(backend, output, input);
      };
      start_bundle(work, *group, name, std::move(to[i]), start_one, op);
    }
  });
  return work;
}

}  // namespace detail

LOCKSTEP_INLINE ProcessGroupComm::ProcessGroupComm(const World& world,
                                                   c10::intrusive_ptr<c10d::Backend> backend,
                                                   ProcessGroupOptions options) {
  if (!backend) throw UsageError("ProcessGroupComm: the backend is null: give it a c10d::Backend");
  if (backend->getRank() != world.rank() || backend->getSize() != world.size())
    throw UsageError(
        detail::formatted("ProcessGroupComm: the backend is rank {} of {}, and the world is rank {} of {}: "
                          "give it the backend of all ranks, and use new_group() for some of them",
                          backend->getRank(), backend->getSize(), world.rank(), world.size()));
  if (const auto& device = options.device; !device.is_cpu() && !device.has_index())
    throw UsageError(detail::formatted(
        "ProcessGroupComm: the device '{}' has no index: name the device of this rank, such as {}:0",
        device.str(), device.str()));
  group_ = detail::world_group("the constructor of ProcessGroupComm", world, std::move(options),
                               std::move(backend));
}

LOCKSTEP_INLINE void ProcessGroupComm::leave() noexcept {
  const auto group = std::move(group_);
  if (!group) return;
  if (group->is_forked()) {
    static_cast<void>(new auto(group));  // its threads run in the parent alone
  } else if (group->failed() || std::uncaught_exceptions() > exceptions_) {
    group->abort("");  // a destructor does not see the exception that unwinds the stack
  } else {
    group->leave();
  }
}

LOCKSTEP_INLINE int ProcessGroupComm::rank() const {
  return group()->rank();
}

LOCKSTEP_INLINE int ProcessGroupComm::size() const {
  return group()->size();
}

LOCKSTEP_INLINE int ProcessGroupComm::world_rank(int rank) const {
  return group()->ranks().at(static_cast<std::size_t>(rank));
}

LOCKSTEP_INLINE const World& ProcessGroupComm::world() const {
  return group()->world();
}

LOCKSTEP_INLINE at::Device ProcessGroupComm::tensor_device() const {
  return group()->options().device;
}

LOCKSTEP_INLINE bool ProcessGroupComm::can_split() const {
  return group()->can_split();
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_reduce(at::TensorList tensors, ReduceOp op) {
  return detail::in_place(
      group(), "all_reduce", tensors, op, {}, [&](c10d::Backend& backend, const at::Tensor& buffer) {
        return detail::start_all_reduce(backend, buffer, detail::native(*group(), op, buffer));
      });
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce(at::TensorList tensors, int root,
                                                                ReduceOp op) {
  return detail::in_place(
      group(), "reduce", tensors, op, root, [&](c10d::Backend& backend, const at::Tensor& buffer) {
        std::vector<at::Tensor> buffers{buffer};
        return backend.reduce(buffers, {.reduceOp = detail::native(*group(), op, buffer), .rootRank = root});
      });
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::broadcast(at::TensorList tensors, int root) {
  return detail::in_place(group(), "broadcast", tensors, {}, root,
                          [&](c10d::Backend& backend, const at::Tensor& buffer) {
                            return detail::start_broadcast(backend, buffer, root);
                          });
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_gather(at::TensorList outputs,
                                                                    at::TensorList inputs) {
  detail::check_pairs(group()->tensor_check(), "all_gather", outputs, inputs, size());
  return detail::exchange(group(), "all_gather", outputs, size(), inputs, 1, {}, detail::start_all_gather);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce_scatter(at::TensorList outputs,
                                                                        at::TensorList inputs, ReduceOp op) {
  for (const at::Tensor& input : inputs)
    detail::check_tensor(group()->tensor_check(), "reduce_scatter", input, op);
  detail::check_pairs(group()->tensor_check(), "reduce_scatter", inputs, outputs, size());
  const auto start = [&](c10d::Backend& backend, const at::Tensor& row, const at::Tensor& rows) {
    if (group()->on_host()) return detail::start_all_reduce(backend, row, detail::native(*group(), op, row));
    at::Tensor output = row.detach().view({-1}), input = rows.detach().view({-1});
    const c10d::ReduceScatterOptions options{.reduceOp = detail::native(*group(), op, row)};
    return detail::reduce_scatter_single(backend, output, input, options);
  };
  return detail::exchange(group(), "reduce_scatter", outputs, 1, inputs, size(), op, start);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_to_all(at::TensorList outputs,
                                                                    at::TensorList inputs) {
  detail::check_pairs(group()->tensor_check(), "all_to_all", outputs, inputs, 1);
  detail::check_rows("all_to_all", inputs, size());
  return detail::exchange(group(), "all_to_all", outputs, size(), inputs, size(), {},
                          detail::start_all_to_all);
}

LOCKSTEP_INLINE std::vector<std::string> ProcessGroupComm::all_gather_bytes(const std::string& bytes) {
  return detail::gather_bytes(*group(), group()->begin("all_gather_bytes"), bytes);
}

LOCKSTEP_INLINE std::string ProcessGroupComm::broadcast_bytes(const std::string& bytes, int root) {
  group()->check_rank("broadcast_bytes", root);
  return detail::broadcast_bytes(
      *group(), group()->begin("broadcast_bytes", detail::CallContent::of({}, root)), bytes, root);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::barrier_async() {
  Work work(group(), group()->begin("barrier"));
  group()->launch_all([&] {
    work.add(group()->launch("barrier", [&](c10d::Backend& backend) {
      c10d::BarrierOptions options;
      if (!group()->on_host()) options.device_ids = {group()->options().device.index()};
      return backend.barrier(options);
    }));
  });
  return work;
}

LOCKSTEP_INLINE std::shared_ptr<detail::BackendGroup> ProcessGroupComm::split_group(
    const std::vector<int>& ranks) {
  return group()->new_group(ranks);
}

LOCKSTEP_INLINE void ProcessGroupComm::check_error() {
  group()->check_error();
}

LOCKSTEP_INLINE void ProcessGroupComm::abort(const std::string& reason) {
  group()->abort(reason);
}

LOCKSTEP_INLINE void ProcessGroupComm::shutdown() {
  group()->shutdown();
}

LOCKSTEP_INLINE const std::shared_ptr<detail::BackendGroup>& ProcessGroupComm::group() const {
  if (!group_)
    throw UsageError(
        "this communicator was moved from, into a Trainer for instance: use the communicator that now holds "
        "the group, such as trainer.comm()");
  return group_;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::message(bool sends, at::TensorList tensors, int peer,
                                                                 int tag) {
  const char* name = sends ? "send" : "recv";
  for (const at::Tensor& tensor : tensors) detail::check_tensor(group()->tensor_check(), name, tensor);
  group()->check_rank(name, peer);
  if (peer == rank())
    throw CommunicationError(detail::formatted("{}: rank {} cannot send to itself", name, peer),
                             world().rank());
  if (tag < 0) throw CommunicationError(detail::formatted("{}: the tag {} is negative", name, tag));
  if (tag != 0 && group()->ignores_tags())
    throw CommunicationError(
        detail::formatted("{}: {} knows no tags, and {} is one: use tag 0, or a new_group for each tag", name,
                          group()->tensor_check().backend, tag));
  Work work(group(), group()->message(name, peer, tag));
  const detail::SigpipeGuard guard;
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    sends ? bundle.pack() : bundle.allocate();
    std::vector<at::Tensor> buffers{bundle.buffer.detach()};
    work.add(group()->launch(name, [&](c10d::Backend& backend) {
      return sends ? backend.send(buffers, peer, tag) : backend.recv(buffers, peer, tag);
    }));
    if (!sends && !bundle.in_place()) work.at_end([bundle = std::move(bundle)] { bundle.unpack(); });
  }
  return work;
}

}  // namespace lockstep::inline v0_1
