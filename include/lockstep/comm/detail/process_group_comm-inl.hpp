#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/detail/backend_bytes.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/sigpipe_guard.hpp"
#include "lockstep/comm/detail/tensor_checks.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace detail {

LOCKSTEP_INLINE ProcessGroupWork::ProcessGroupWork() = default;

LOCKSTEP_INLINE ProcessGroupWork::ProcessGroupWork(ProcessGroupWork&&) noexcept = default;

LOCKSTEP_INLINE ProcessGroupWork::ProcessGroupWork(std::shared_ptr<BackendGroup> group, Call call)
    : group_(std::move(group)), call_(call) {}

LOCKSTEP_INLINE ProcessGroupWork& ProcessGroupWork::operator=(ProcessGroupWork&& other) noexcept {
  if (this == &other) return *this;
  keep_messages();
  group_ = std::move(other.group_);
  call_ = other.call_;
  parts_ = std::move(other.parts_);
  other.parts_.clear();
  at_end_ = std::move(other.at_end_);
  error_ = std::move(other.error_);
  return *this;
}

LOCKSTEP_INLINE ProcessGroupWork::~ProcessGroupWork() {
  keep_messages();
}

LOCKSTEP_INLINE void ProcessGroupWork::wait() {
  if (!group_ || group_->on_host())
    wait_until(call_.start + timeout());
  else
    order_stream();
}

LOCKSTEP_INLINE void ProcessGroupWork::synchronize() {
  wait_until(call_.start + timeout());
}

LOCKSTEP_INLINE void ProcessGroupWork::synchronize(std::chrono::milliseconds timeout) {
  // Take the minimum first: the largest duration would overflow the clock.
  wait_until(std::min(std::chrono::steady_clock::now() + std::min(timeout, this->timeout()),
                      call_.start + this->timeout()));
}

LOCKSTEP_INLINE std::exception_ptr ProcessGroupWork::error() const noexcept {
  if (error_) return error_;
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

LOCKSTEP_INLINE void ProcessGroupWork::add(c10::intrusive_ptr<c10d::Work> part) {
  if (group_ && !group_->on_host()) group_->watch(call_, part);
  parts_.push_back(std::move(part));
}

LOCKSTEP_INLINE void ProcessGroupWork::at_end(std::function<void()> work) {
  if (!at_end_)
    at_end_ = std::move(work);
  else
    at_end_ = [first = std::move(at_end_), then = std::move(work)] {
      first();
      then();
    };
}

LOCKSTEP_INLINE void ProcessGroupWork::at_completion(std::function<void()> function) {
  if (parts_.size() != 1 || !group_ || !group_->on_host()) return;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = parts_.front()->getFuture();
  } catch (const c10::Error&) {  // not every backend implements it
    return;
  }
  future->addCallback([function = std::move(function)](c10::ivalue::Future&) { function(); });
}

LOCKSTEP_INLINE std::chrono::milliseconds ProcessGroupWork::timeout() const {
  return group_ ? group_->timeout() : std::chrono::milliseconds(0);
}

LOCKSTEP_INLINE void ProcessGroupWork::wait_until(std::chrono::steady_clock::time_point until) {
  if (error_) std::rethrow_exception(error_);
  try {
    while (!parts_.empty()) {
      if (call_.peer)
        group_->await_message(call_, parts_.front(), until);
      else
        group_->await(call_, *parts_.front(), until);
      parts_.erase(parts_.begin());  // a message may be waited for only once
    }
  } catch (...) {
    if (group_->state().failed()) error_ = std::current_exception();
    throw;
  }
  group_.reset();
  finish();
}

// The parts stay: error() asks them, and wait() may be called on another stream.
LOCKSTEP_INLINE void ProcessGroupWork::order_stream() {
  if (error_) std::rethrow_exception(error_);
  try {
    for (const auto& part : parts_) group_->order_stream(call_, *part);
  } catch (...) {
    error_ = std::current_exception();
    throw;
  }
  finish();
}

LOCKSTEP_INLINE void ProcessGroupWork::finish() {
  if (at_end_) std::exchange(at_end_, nullptr)();
}

LOCKSTEP_INLINE void ProcessGroupWork::keep_messages() noexcept {
  if (group_ && call_.peer)
    for (auto& part : parts_) group_->keep(std::move(part));
}

/// Returns `options` with the timeout clamped. Throws UsageError for invalid options or a backend that does
/// not fit the world.
inline ProcessGroupOptions checked(ProcessGroupOptions options, const World& world,
                                   const c10::intrusive_ptr<c10d::Backend>& backend) {
  options.timeout = checked_timeout("ProcessGroupOptions", options.timeout);
  if (!backend) throw UsageError("ProcessGroupComm: the backend is null: give it a c10d::Backend");
  if (backend->getRank() != world.rank() || backend->getSize() != world.size())
    throw UsageError(
        detail::formatted("ProcessGroupComm: the backend is rank {} of {}, and the world is rank {} of {}: "
                          "give it the backend of all ranks, and use new_group() for some of them",
                          backend->getRank(), backend->getSize(), world.rank(), world.size()));
  if (!options.device.is_cpu() && !options.device.has_index())
    throw UsageError(detail::formatted(
        "ProcessGroupComm: the device '{}' has no index: name the device of this rank, such as {}:0",
        options.device.str(), options.device.str()));
  return options;
}

}  // namespace detail

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::begin(const char* name, std::optional<ReduceOp> op,
                                                               std::optional<int> root,
                                                               at::TensorList tensors) {
  return Work(group_, group().state().begin(name, detail::CallContent::of(op, root, tensors)));
}

LOCKSTEP_INLINE ProcessGroupComm::ProcessGroupComm(ProcessGroupComm&&) noexcept = default;

LOCKSTEP_INLINE ProcessGroupComm::ProcessGroupComm(const World& world,
                                                   c10::intrusive_ptr<c10d::Backend> backend,
                                                   ProcessGroupOptions options) {
  const detail::CallScope scope("the constructor of ProcessGroupComm");
  options = detail::checked(std::move(options), world, backend);
  std::string name = detail::Membership::next_name(world, "comm", options.timeout);
  group_ = std::make_shared<detail::BackendGroup>(world, detail::all_ranks(world.size()), std::move(name),
                                                  std::move(options), std::move(backend));
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

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_reduce(at::TensorList tensors, ReduceOp op) {
  for (const at::Tensor& tensor : tensors) detail::check_reducible(check(), "all_reduce", tensor, op);
  Work work = begin("all_reduce", op, {}, tensors);
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    bundle.pack();
    auto part = group().launch("all_reduce", [&](c10d::Backend& backend) {
      return detail::start_all_reduce(backend, bundle.buffer,
                                      detail::native(op, bundle.buffer.scalar_type(), group().averages()));
    });
    add(work, std::move(part), std::move(bundle), true, divisor(op));
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce(at::TensorList tensors, int root,
                                                                ReduceOp op) {
  for (const at::Tensor& tensor : tensors) detail::check_reducible(check(), "reduce", tensor, op);
  group().state().check_rank("reduce", root);
  Work work = begin("reduce", op, root, tensors);
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    bundle.pack();
    auto part = group().launch("reduce", [&](c10d::Backend& backend) {
      return detail::start_reduce(backend, bundle.buffer,
                                  detail::native(op, bundle.buffer.scalar_type(), group().averages()), root);
    });
    add(work, std::move(part), std::move(bundle), rank() == root, divisor(op));
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::broadcast(at::TensorList tensors, int root) {
  for (const at::Tensor& tensor : tensors) detail::check_tensor(check(), "broadcast", tensor);
  group().state().check_rank("broadcast", root);
  Work work = begin("broadcast", std::nullopt, root, tensors);
  for (detail::TensorBundle& bundle : detail::bundles_of(tensors)) {
    bundle.pack();
    auto part = group().launch("broadcast", [&](c10d::Backend& backend) {
      return detail::start_broadcast(backend, detail::movable(bundle.buffer), root);
    });
    add(work, std::move(part), std::move(bundle), rank() != root);
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_gather(at::TensorList outputs,
                                                                    at::TensorList inputs) {
  detail::check_pairs(check(), "all_gather", outputs, inputs, size());
  Work work = begin("all_gather", std::nullopt, {}, inputs);
  auto from = detail::bundles_of(inputs), to = detail::bundles_of(outputs, size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    auto part = group().launch("all_gather", [&](c10d::Backend& backend) {
      const auto rows = detail::movable(to[i].buffer), row = detail::movable(from[i].buffer);
      return group().on_host() ? detail::start_all_gather(backend, rows, row)
                               : detail::start_all_gather_single(backend, rows, row);
    });
    add(work, std::move(part), std::move(to[i]));
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce_scatter(at::TensorList outputs,
                                                                        at::TensorList inputs, ReduceOp op) {
  for (const at::Tensor& input : inputs) detail::check_reducible(check(), "reduce_scatter", input, op);
  detail::check_pairs(check(), "reduce_scatter", inputs, outputs, size());
  Work work = begin("reduce_scatter", op, {}, inputs);
  auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs);
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    if (!group().on_host()) {
      auto part = group().launch("reduce_scatter", [&](c10d::Backend& backend) {
        return detail::start_reduce_scatter(
            backend, to[i].buffer, from[i].buffer,
            detail::native(op, to[i].buffer.scalar_type(), group().averages()));
      });
      add(work, std::move(part), std::move(to[i]), true, divisor(op));
      continue;
    }
    // Not every LibTorch version has a Gloo reduce_scatter: exchange the rows, then reduce them here in rank order.
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
  detail::check_pairs(check(), "all_to_all", outputs, inputs, 1);
  detail::check_rows("all_to_all", inputs, size());
  Work work = begin("all_to_all", std::nullopt, {}, inputs);
  auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs, size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    auto part = group().launch("all_to_all", [&](c10d::Backend& backend) {
      return detail::start_all_to_all(backend, detail::movable(to[i].buffer),
                                      detail::movable(from[i].buffer));
    });
    add(work, std::move(part), std::move(to[i]));
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::send(at::TensorList tensors, int peer, int tag) {
  return message(true, tensors, peer, tag);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::recv(at::TensorList tensors, int peer, int tag) {
  return message(false, tensors, peer, tag);
}

LOCKSTEP_INLINE std::vector<std::string> ProcessGroupComm::all_gather_bytes(const std::string& bytes) {
  return detail::gather_bytes(group(), group().state().begin("all_gather_bytes"), bytes);
}

LOCKSTEP_INLINE std::string ProcessGroupComm::broadcast_bytes(const std::string& bytes, int root) {
  group().state().check_rank("broadcast_bytes", root);
  return detail::broadcast_bytes(
      group(), group().state().begin("broadcast_bytes", detail::CallContent::of({}, root)), bytes, root);
}

LOCKSTEP_INLINE void ProcessGroupComm::barrier() {
  barrier_async().synchronize();
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

LOCKSTEP_INLINE std::optional<ProcessGroupComm> ProcessGroupComm::new_group(const std::vector<int>& ranks) {
  if (auto group = split_group(ranks)) return ProcessGroupComm(std::move(group));
  return std::nullopt;
}

LOCKSTEP_INLINE std::shared_ptr<detail::BackendGroup> ProcessGroupComm::split_group(
    const std::vector<int>& ranks) {
  detail::GroupState& state = group().state();
  state.check_subgroup(ranks);
  state.begin("new_group");
  const detail::CallScope scope("new_group");
  if (!can_split())
    throw CommunicationError(
        detail::formatted("new_group: {} cannot split: set ProcessGroupOptions::make_backend",
                          check().backend),
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

LOCKSTEP_INLINE ProcessGroupComm::ProcessGroupComm(std::shared_ptr<detail::BackendGroup> group)
    : group_(std::move(group)) {}

LOCKSTEP_INLINE detail::BackendGroup& ProcessGroupComm::group() const {
  if (!group_)
    throw UsageError(
        "this communicator was moved from, into a Trainer for instance: use the communicator that now holds "
        "the group, such as trainer.comm()");
  return *group_;
}

LOCKSTEP_INLINE const detail::TensorCheck& ProcessGroupComm::check() const {
  return group().tensor_check();
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::message(bool sends, at::TensorList tensors, int peer,
                                                                 int tag) {
  const char* name = sends ? "send" : "recv";
  for (const at::Tensor& tensor : tensors) detail::check_tensor(check(), name, tensor);
  group().state().check_peer(name, peer);
  if (tag < 0) throw CommunicationError(detail::formatted("{}: the tag {} is negative", name, tag));
  if (tag != 0 && group().ignores_tags())
    throw CommunicationError(
        detail::formatted("{}: {} knows no tags, and {} is one: use tag 0, or a new_group for each tag", name,
                          check().backend, tag));
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

LOCKSTEP_INLINE void ProcessGroupComm::add(Work& work, detail::BackendWork part, detail::TensorBundle bundle,
                                           bool wanted, int divisor) {
  if (wanted && (divisor > 1 || !bundle.in_place()))
    add_with(work, std::move(part), [bundle = std::move(bundle), divisor] {
      detail::divide(bundle.buffer, divisor);
      bundle.unpack();
    });
  else
    work.add(std::move(part));
}

template <class Finish>
void ProcessGroupComm::add_with(Work& work, detail::BackendWork part, Finish finish) {
  if (!group().finish_in_callback(part, finish)) work.at_end(std::move(finish));
  work.add(std::move(part));
}

LOCKSTEP_INLINE int ProcessGroupComm::divisor(ReduceOp op) const {
  return op == ReduceOp::avg && !group().averages() ? size() : 1;
}

}  // namespace lockstep
