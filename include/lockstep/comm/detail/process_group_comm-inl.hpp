#pragma once

#include <algorithm>
#include <chrono>
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
#include "lockstep/comm/detail/describe.hpp"
#include "lockstep/comm/detail/group.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
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
      if (group_->state().failed()) error_ = std::current_exception();
      throw;
    }
  group_.reset();
  finish();
}

LOCKSTEP_INLINE std::exception_ptr ProcessGroupWork::error() const noexcept {
  if (error_) return error_;
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

LOCKSTEP_INLINE void ProcessGroupWork::add(c10::intrusive_ptr<c10d::Work> part) {
  if (!group_->on_host())
    group_->watch(call_, part);
  else if (call_.peer)
    group_->keep(part);
  parts_.push_back(std::move(part));
}

LOCKSTEP_INLINE void ProcessGroupWork::at_completion(std::function<void()> function) {
  if (parts_.size() == 1 && group_)
    group_->at_completion(parts_.front(), [function = std::move(function)](bool) { function(); });
}

}  // namespace detail

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::begin(const char* name, std::optional<ReduceOp> op,
                                                               std::optional<int> root,
                                                               at::TensorList tensors) {
  return Work(group_, group().state().begin(name, detail::CallContent::of(op, root, tensors)));
}

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

LOCKSTEP_INLINE ProcessGroupComm& ProcessGroupComm::operator=(ProcessGroupComm&& other) noexcept {
  if (this == &other) return *this;
  detail::leave_group(group_, exceptions_);
  group_ = std::move(other.group_);
  exceptions_ = other.exceptions_;
  return *this;
}

LOCKSTEP_INLINE ProcessGroupComm::~ProcessGroupComm() {
  detail::leave_group(group_, exceptions_);
}

LOCKSTEP_INLINE int ProcessGroupComm::rank() const {
  return group().state().rank();
}

LOCKSTEP_INLINE int ProcessGroupComm::size() const {
  return group().state().size();
}

LOCKSTEP_INLINE int ProcessGroupComm::world_rank(int rank) const {
  return group().state().ranks().at(static_cast<std::size_t>(rank));
}

LOCKSTEP_INLINE const World& ProcessGroupComm::world() const {
  return group().state().world();
}

LOCKSTEP_INLINE at::Device ProcessGroupComm::tensor_device() const {
  return group().options().device;
}

LOCKSTEP_INLINE bool ProcessGroupComm::can_split() const {
  return group().can_split();
}

template <class Start>
void ProcessGroupComm::launch(Work& work, const char* name, detail::TensorBundle bundle, const Start& start,
                              std::optional<ReduceOp> op, bool wanted) {
  auto part = group().launch(name, [&](c10d::Backend& backend) { return start(backend, bundle.buffer); });
  const int divisor = op == ReduceOp::avg && !group().averages() ? size() : 1;
  if (!wanted || (divisor == 1 && bundle.in_place())) return work.add(std::move(part));
  add_with(work, std::move(part), [bundle = std::move(bundle), divisor] {
    detail::divide(bundle.buffer, divisor);
    bundle.unpack();
  });
}

template <class Finish>
void ProcessGroupComm::add_with(Work& work, detail::BackendWork part, Finish finish) {
  const bool finishes = group().at_completion(part, [finish](bool error) {
    if (!error) finish();
  });
  if (!finishes) work.at_end(std::move(finish));
  work.add(std::move(part));
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_reduce(at::TensorList tensors, ReduceOp op) {
  for (const at::Tensor& tensor : tensors)
    detail::check_reducible(group().tensor_check(), "all_reduce", tensor, op);
  Work work = begin("all_reduce", op, {}, tensors);
  const auto start = [&](c10d::Backend& backend, const at::Tensor& buffer) {
    std::vector<at::Tensor> buffers{buffer};
    return backend.allreduce(buffers, {.reduceOp = detail::native(op, buffer, group().averages())});
  };
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    bundle.pack();
    launch(work, "all_reduce", std::move(bundle), start, op);
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce(at::TensorList tensors, int root,
                                                                ReduceOp op) {
  for (const at::Tensor& tensor : tensors)
    detail::check_reducible(group().tensor_check(), "reduce", tensor, op);
  group().state().check_rank("reduce", root);
  Work work = begin("reduce", op, root, tensors);
  const auto start = [&](c10d::Backend& backend, const at::Tensor& buffer) {
    std::vector<at::Tensor> buffers{buffer};
    return backend.reduce(buffers,
                          {.reduceOp = detail::native(op, buffer, group().averages()), .rootRank = root});
  };
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    bundle.pack();
    launch(work, "reduce", std::move(bundle), start, op, rank() == root);
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::broadcast(at::TensorList tensors, int root) {
  for (const at::Tensor& tensor : tensors) detail::check_tensor(group().tensor_check(), "broadcast", tensor);
  group().state().check_rank("broadcast", root);
  Work work = begin("broadcast", std::nullopt, root, tensors);
  const auto start = [&](c10d::Backend& backend, const at::Tensor& buffer) {
    return detail::start_broadcast(backend, detail::movable(buffer), root);
  };
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    bundle.pack();
    launch(work, "broadcast", std::move(bundle), start, {}, rank() != root);
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_gather(at::TensorList outputs,
                                                                    at::TensorList inputs) {
  detail::check_pairs(group().tensor_check(), "all_gather", outputs, inputs, size());
  Work work = begin("all_gather", std::nullopt, {}, inputs);
  auto from = detail::bundles_of(inputs), to = detail::bundles_of(outputs, size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    launch(work, "all_gather", std::move(to[i]), [&](c10d::Backend& backend, const at::Tensor& rows) {
      return detail::start_all_gather(backend, detail::movable(rows), detail::movable(from[i].buffer));
    });
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce_scatter(at::TensorList outputs,
                                                                        at::TensorList inputs, ReduceOp op) {
  for (const at::Tensor& input : inputs)
    detail::check_reducible(group().tensor_check(), "reduce_scatter", input, op);
  detail::check_pairs(group().tensor_check(), "reduce_scatter", inputs, outputs, size());
  Work work = begin("reduce_scatter", op, {}, inputs);
  auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs);
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    if (!group().on_host()) {
      const auto start = [&](c10d::Backend& backend, const at::Tensor& row) {
        at::Tensor output = row.detach().view({-1}), input = from[i].buffer.detach().view({-1});
        const c10d::ReduceScatterOptions options{.reduceOp = detail::native(op, row, group().averages())};
        return detail::reduce_scatter_single(backend, output, input, options);
      };
      launch(work, "reduce_scatter", std::move(to[i]), start, op);
      continue;
    }
    // Not every LibTorch version has a Gloo reduce_scatter: exchange the rows, then reduce them here in rank
    // order.
    const auto rows =
        at::empty({size(), to[i].buffer.numel()}, from[i].buffer.options().requires_grad(false));
    auto part = group().launch("reduce_scatter", [&](c10d::Backend& backend) {
      return detail::start_all_to_all(backend, rows, from[i].buffer);
    });
    add_with(work, std::move(part), [bundle = std::move(to[i]), rows, op] {
      detail::combine_rows(bundle.buffer, rows, op);
      bundle.unpack();
    });
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_to_all(at::TensorList outputs,
                                                                    at::TensorList inputs) {
  detail::check_pairs(group().tensor_check(), "all_to_all", outputs, inputs, 1);
  detail::check_rows("all_to_all", inputs, size());
  Work work = begin("all_to_all", std::nullopt, {}, inputs);
  auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs, size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    launch(work, "all_to_all", std::move(to[i]), [&](c10d::Backend& backend, const at::Tensor& rows) {
      return detail::start_all_to_all(backend, detail::movable(rows), detail::movable(from[i].buffer));
    });
  }
  return work;
}

LOCKSTEP_INLINE std::vector<std::string> ProcessGroupComm::all_gather_bytes(const std::string& bytes) {
  return detail::gather_bytes(group(), group().state().begin("all_gather_bytes"), bytes);
}

LOCKSTEP_INLINE std::string ProcessGroupComm::broadcast_bytes(const std::string& bytes, int root) {
  group().state().check_rank("broadcast_bytes", root);
  return detail::broadcast_bytes(
      group(), group().state().begin("broadcast_bytes", detail::CallContent::of({}, root)), bytes, root);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::barrier_async() {
  Work work(group_, group().state().begin("barrier"));
  work.add(group().launch("barrier", [&](c10d::Backend& backend) {
    c10d::BarrierOptions options;
    if (!group().on_host()) options.device_ids = {group().options().device.index()};
    return backend.barrier(options);
  }));
  return work;
}

LOCKSTEP_INLINE std::shared_ptr<detail::BackendGroup> ProcessGroupComm::split_group(
    const std::vector<int>& ranks) {
  detail::Group& state = group().state();
  state.check_subgroup(ranks);
  state.begin("new_group");
  const detail::CallScope scope("new_group");
  if (!can_split())
    throw CommunicationError(
        detail::formatted("new_group: {} cannot split: set ProcessGroupOptions::make_backend",
                          group().tensor_check().backend),
        world().rank());
  std::string name = state.next_child();
  auto backend = ranks.empty() ? c10::intrusive_ptr<c10d::Backend>() : group().split_backend(ranks, name);
  if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) return nullptr;
  return std::make_shared<detail::BackendGroup>(world(), state.world_ranks(ranks), std::move(name),
                                                group().options(), std::move(backend));
}

LOCKSTEP_INLINE void ProcessGroupComm::check_error() {
  group().check_error();
}

LOCKSTEP_INLINE void ProcessGroupComm::abort(const std::string& reason) {
  group().state().abort(reason);
}

LOCKSTEP_INLINE void ProcessGroupComm::shutdown() {
  group().shutdown();
}

LOCKSTEP_INLINE detail::BackendGroup& ProcessGroupComm::group() const {
  if (!group_)
    throw UsageError(
        "this communicator was moved from, into a Trainer for instance: use the communicator that now holds "
        "the group, such as trainer.comm()");
  return *group_;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::message(bool sends, at::TensorList tensors, int peer,
                                                                 int tag) {
  const char* name = sends ? "send" : "recv";
  for (const at::Tensor& tensor : tensors) detail::check_tensor(group().tensor_check(), name, tensor);
  group().state().check_peer(name, peer);
  if (tag < 0) throw CommunicationError(detail::formatted("{}: the tag {} is negative", name, tag));
  if (tag != 0 && group().ignores_tags())
    throw CommunicationError(
        detail::formatted("{}: {} knows no tags, and {} is one: use tag 0, or a new_group for each tag", name,
                          group().tensor_check().backend, tag));
  Work work(group_, group().state().message(name, peer, tag));
  const detail::SigpipeGuard guard;
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    sends ? bundle.pack() : bundle.allocate();
    std::vector<at::Tensor> buffers{bundle.buffer.detach()};
    work.add(group().launch(name, [&](c10d::Backend& backend) {
      return sends ? backend.send(buffers, peer, tag) : backend.recv(buffers, peer, tag);
    }));
    if (!sends && !bundle.in_place()) work.at_end([bundle = std::move(bundle)] { bundle.unpack(); });
  }
  return work;
}

}  // namespace lockstep
