#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/detail/backend_bytes.hpp"
#include "lockstep/comm/detail/backend_group.hpp"
#include "lockstep/comm/detail/backend_operations.hpp"
#include "lockstep/comm/detail/bytes_header.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/signature.hpp"
#include "lockstep/comm/detail/sigpipe_guard.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/comm/process_group_comm.hpp"
#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

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
  polled_on_host_ = other.polled_on_host_;
  return *this;
}

LOCKSTEP_INLINE ProcessGroupWork::~ProcessGroupWork() {
  keep_messages();
}

LOCKSTEP_INLINE void ProcessGroupWork::wait() {
  if (!group_ || group_->on_host() || polled_on_host_)
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
        group_->await(call_, *parts_.front(), until, polled_on_host_);
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

/// Gathers the signature `own` of every rank. Returns nothing if all are equal. Throws MismatchError if
/// `call` serves another public call on another rank. Blocks.
inline std::vector<std::string> differing_signatures(BackendGroup& group, const Call& call,
                                                     const std::string& own) {
  const auto until = call.start + group.timeout();
  const std::vector<int>& ranks = group.state().ranks();
  std::vector<std::string> signatures;
  if (!group.on_host()) {
    const SentName name = sent_name(call.served);
    const auto work = group.exchange_in_store(
        call, all_ranks(group.state().size()), std::string(name.begin(), name.end()) + own,
        [&](std::vector<std::string> all) { signatures = std::move(all); });
    group.await(call, *work, until, true);
    std::vector<std::string> names;
    for (std::string& text : signatures) {
      names.emplace_back(text.c_str());
      text.erase(0, name.size());
    }
    if (const std::string calls = different_calls(names, ranks); !calls.empty()) throw MismatchError(calls);
    const bool equal = std::all_of(signatures.begin(), signatures.end(),
                                   [&](const std::string& other) { return other == own; });
    return equal ? std::vector<std::string>() : signatures;
  }
  const auto gather = [&](const at::Tensor& row) {
    auto rows = at::empty({group.state().size(), row.numel()}, row.options());
    const auto work = start_all_gather(group.backend(), rows, row);
    group.await(call, *work, until);
    return rows;
  };
  const auto hash = at::full({1}, static_cast<std::int64_t>(fnv1a(own)), at::kLong);
  const auto heads = gather(at::cat({hash, BytesHeader::of(own.size(), call.served)}));
  const auto headers = heads.narrow(1, 1, BytesHeader::numbers).contiguous();
  if (const std::string calls = BytesHeader::different_calls(headers, ranks); !calls.empty())
    throw MismatchError(calls);
  const auto lengths = BytesHeader::lengths(headers);
  if (heads.select(1, 0).eq(hash).all().item<bool>() &&
      std::all_of(lengths.begin(), lengths.end(), [&](std::int64_t length) { return length == lengths[0]; }))
    return {};
  const auto texts = gather(bytes_tensor(own, *std::max_element(lengths.begin(), lengths.end())));
  for (int rank = 0; rank < group.state().size(); ++rank)
    signatures.push_back(bytes_in(texts[rank], lengths[static_cast<std::size_t>(rank)]));
  return signatures;
}

/// Compares the signature `own` over the ranks before the collective sends anything. Throws the same
/// MismatchError on every rank.
inline void compare_over_ranks(BackendGroup& group, const Call& call, const std::string& own) {
  const auto signatures = differing_signatures(group, call, own);
  if (!signatures.empty()) throw MismatchError(mismatch_text(call, signatures, group.state().ranks()));
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
                          "give it the backend of "
                          "all ranks, and use new_group() for some of them",
                          backend->getRank(), backend->getSize(), world.rank(), world.size()));
  if (!options.device.is_cpu() && !options.device.has_index())
    throw UsageError(detail::formatted(
        "ProcessGroupComm: the device '{}' has no index: name the device of this rank, such as {}:0",
        options.device.str(), options.device.str()));
  return options;
}

}  // namespace lockstep::detail

namespace lockstep {

template <class Tensors>
ProcessGroupComm::Work ProcessGroupComm::begin(const char* name, std::optional<ReduceOp> op,
                                               std::optional<int> root, const Tensors& tensors) {
  const detail::Call call = group().state().begin(name);
  if (group().options().check_shapes && size() > 1) {
    const std::string operation = detail::operation_text(name, op, root);
    if constexpr (std::is_same_v<Tensors, at::Tensor>)
      detail::compare_over_ranks(*group_, call, detail::signature(operation, {tensors}));
    else
      detail::compare_over_ranks(*group_, call, detail::signature(operation, tensors));
  }
  return Work(group_, call);
}

template <class Exchange>
void ProcessGroupComm::prepare(const detail::Call& call, Exchange& exchange) const {
  exchange.served = call.served;
  exchange.ranks = group_->state().ranks();
}

template <class Exchange>
void ProcessGroupComm::exchange_bytes_now(const detail::Call& call, Exchange& exchange) {
  const auto complete = [&](const detail::BackendWork& part) {
    group_->await(call, *part, call.start + group_->timeout());
  };
  prepare(call, exchange);
  complete(group().launch(call.name, [&](c10d::Backend& backend) { return exchange.start(backend); }));
  std::vector<detail::BackendWork> parts;
  try {
    parts = exchange.send_bytes(group().backend());
  } catch (const MismatchError&) {
    group().state().fail(std::current_exception(), true);
  }
  for (const detail::BackendWork& part : parts) complete(part);
  exchange.finish();
}

template <class Exchange, class Deliver>
ProcessGroupComm::Work ProcessGroupComm::exchange_bytes(const detail::Call& call,
                                                        const std::shared_ptr<Exchange>& exchange,
                                                        Deliver deliver) {
  prepare(call, *exchange);
  Work work(group_, call);
  work.add(group_->bytes_lane()->start(group_->backend(), exchange));
  work.at_end(std::move(deliver));
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::exchange_in_store(
    const detail::Call& call, std::vector<int> from, const std::string& own,
    std::function<void(std::vector<std::string>)> deliver) {
  Work work(group_, call);
  work.add(group_->exchange_in_store(call, std::move(from), own, std::move(deliver)));
  work.poll_on_host();
  return work;
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

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  detail::check_reducible(check(), "all_reduce", tensor, op);
  Work work = begin("all_reduce", op, {}, tensor);
  if (tensor.numel() == 0) return work;
  if (!tensor.is_contiguous()) {
    reduce_bundle(work, detail::TensorBundle{{tensor}}, op);
    return work;
  }
  auto part = group().launch("all_reduce", [&](c10d::Backend& backend) {
    return detail::start_all_reduce(backend, tensor,
                                    detail::native(op, tensor.scalar_type(), group().averages()));
  });
  if (const int by = divisor(op); by > 1)
    add_with(work, std::move(part), [tensor, by] { detail::divide(tensor, by); });
  else
    work.add(std::move(part));
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_reduce(const std::vector<at::Tensor>& list,
                                                                    ReduceOp op) {
  for (const at::Tensor& tensor : list) detail::check_reducible(check(), "all_reduce", tensor, op);
  Work work = begin("all_reduce", op, {}, list);
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) reduce_bundle(work, std::move(bundle), op);
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce(const at::Tensor& tensor, int root,
                                                                ReduceOp op) {
  return reduce(std::vector<at::Tensor>{tensor}, root, op);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce(const std::vector<at::Tensor>& list, int root,
                                                                ReduceOp op) {
  for (const at::Tensor& tensor : list) detail::check_reducible(check(), "reduce", tensor, op);
  group().state().check_rank("reduce", root);
  Work work = begin("reduce", op, root, list);
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
    bundle.pack();
    auto part = group().launch("reduce", [&](c10d::Backend& backend) {
      return detail::start_reduce(backend, bundle.buffer,
                                  detail::native(op, bundle.buffer.scalar_type(), group().averages()), root);
    });
    add(work, std::move(part), std::move(bundle), rank() == root, divisor(op));
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::broadcast(const at::Tensor& tensor, int root) {
  return broadcast(std::vector<at::Tensor>{tensor}, root);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::broadcast(const std::vector<at::Tensor>& list,
                                                                   int root) {
  for (const at::Tensor& tensor : list) detail::check_tensor(check(), "broadcast", tensor);
  group().state().check_rank("broadcast", root);
  Work work = begin("broadcast", std::nullopt, root, list);
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
    bundle.pack();
    auto part = group().launch("broadcast", [&](c10d::Backend& backend) {
      return detail::start_broadcast(backend, detail::movable(bundle.buffer), root);
    });
    add(work, std::move(part), std::move(bundle), rank() != root);
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_gather(const at::Tensor& output,
                                                                    const at::Tensor& input) {
  return all_gather(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_gather(const std::vector<at::Tensor>& outputs,
                                                                    const std::vector<at::Tensor>& inputs) {
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

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce_scatter(const at::Tensor& output,
                                                                        const at::Tensor& input,
                                                                        ReduceOp op) {
  return reduce_scatter(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input}, op);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::reduce_scatter(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, ReduceOp op) {
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
    // Not every LibTorch version has a Gloo reduce_scatter: exchange the rows, then reduce them here in
    // rank order.
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

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_to_all(const at::Tensor& output,
                                                                    const at::Tensor& input) {
  return all_to_all(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_to_all(const std::vector<at::Tensor>& outputs,
                                                                    const std::vector<at::Tensor>& inputs) {
  detail::check_pairs(check(), "all_to_all", outputs, inputs, 1);
  for (const at::Tensor& input : inputs)
    if (input.dim() == 0 || input.size(0) != size())
      throw CommunicationError(
          detail::formatted("all_to_all: the input {} must have one row for each of {} ranks",
                            detail::describe(input), size()));
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

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::send(const at::Tensor& tensor, int peer, int tag) {
  return send(std::vector<at::Tensor>{tensor}, peer, tag);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::send(const std::vector<at::Tensor>& list, int peer,
                                                              int tag) {
  Work work = begin_message("send", list, peer, tag);
  const detail::SigpipeGuard guard;
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
    bundle.pack();
    std::vector<at::Tensor> tensors{bundle.buffer.detach()};
    work.add(
        group().launch("send", [&](c10d::Backend& backend) { return backend.send(tensors, peer, tag); }));
  }
  return work;
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::recv(const at::Tensor& tensor, int peer, int tag) {
  return recv(std::vector<at::Tensor>{tensor}, peer, tag);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::recv(const std::vector<at::Tensor>& list, int peer,
                                                              int tag) {
  Work work = begin_message("recv", list, peer, tag);
  const detail::SigpipeGuard guard;
  auto bundles = detail::bundles_of(list);
  for (detail::TensorBundle& bundle : bundles) {
    bundle.allocate();
    std::vector<at::Tensor> tensors{bundle.buffer.detach()};
    work.add(
        group().launch("recv", [&](c10d::Backend& backend) { return backend.recv(tensors, peer, tag); }));
  }
  std::erase_if(bundles, [](const detail::TensorBundle& bundle) { return bundle.in_place(); });
  if (!bundles.empty())
    work.at_end([bundles = std::move(bundles)] {
      for (const detail::TensorBundle& bundle : bundles) bundle.unpack();
    });
  return work;
}

LOCKSTEP_INLINE std::vector<std::string> ProcessGroupComm::all_gather_bytes(const std::string& bytes) {
  if (!group().on_host()) {
    std::vector<std::string> all;
    all_gather_bytes_async(all, bytes).synchronize();
    return all;
  }
  detail::BytesGather exchange;
  exchange.own = bytes;
  exchange_bytes_now(group().state().begin("all_gather_bytes"), exchange);
  return std::move(exchange.all);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::all_gather_bytes_async(std::vector<std::string>& all,
                                                                                std::string bytes) {
  const detail::Call call = group().state().begin("all_gather_bytes");
  if (!group().bytes_lane())
    return exchange_in_store(call, detail::all_ranks(size()), bytes,
                             [&all](std::vector<std::string> got) { all = std::move(got); });
  auto exchange = std::make_shared<detail::BytesGather>();
  exchange->own = std::move(bytes);
  return exchange_bytes(call, exchange, [exchange, &all] { all = std::move(exchange->all); });
}

LOCKSTEP_INLINE std::string ProcessGroupComm::broadcast_bytes(const std::string& bytes, int root) {
  group().state().check_rank("broadcast_bytes", root);
  if (!group().on_host()) {
    std::string own = rank() == root ? bytes : std::string();
    broadcast_bytes_async(own, root).synchronize();
    return own;
  }
  detail::BytesBroadcast exchange;
  exchange.root = root;
  if (rank() == root) exchange.bytes = bytes;
  exchange_bytes_now(group().state().begin("broadcast_bytes"), exchange);
  return std::move(exchange.bytes);
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::broadcast_bytes_async(std::string& bytes, int root) {
  group().state().check_rank("broadcast_bytes", root);
  const detail::Call call = group().state().begin("broadcast_bytes");
  if (!group().bytes_lane())
    return exchange_in_store(call, {root}, bytes,
                             [&bytes](std::vector<std::string> got) { bytes = std::move(got[0]); });
  auto exchange = std::make_shared<detail::BytesBroadcast>();
  exchange->root = root;
  if (rank() == root) exchange->bytes = bytes;
  return exchange_bytes(call, exchange, [exchange, &bytes] { bytes = std::move(exchange->bytes); });
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
  group().state().check_error();
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
        "the group, such as "
        "trainer.comm()");
  return *group_;
}

LOCKSTEP_INLINE const detail::TensorCheck& ProcessGroupComm::check() const {
  return group().tensor_check();
}

LOCKSTEP_INLINE ProcessGroupComm::Work ProcessGroupComm::begin_message(const char* name,
                                                                       const std::vector<at::Tensor>& list,
                                                                       int peer, int tag) {
  for (const at::Tensor& tensor : list) detail::check_tensor(check(), name, tensor);
  group().state().check_peer(name, peer);
  if (tag < 0) throw CommunicationError(detail::formatted("{}: the tag {} is negative", name, tag));
  if (tag != 0 && group().ignores_tags())
    throw CommunicationError(
        detail::formatted("{}: {} knows no tags, and {} is one: use tag 0, or a new_group for each tag", name,
                          check().backend, tag));
  return Work(group_, group().state().message(name, peer, tag));
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

LOCKSTEP_INLINE void ProcessGroupComm::reduce_bundle(Work& work, detail::TensorBundle bundle, ReduceOp op) {
  bundle.pack();
  auto part = group().launch("all_reduce", [&](c10d::Backend& backend) {
    return detail::start_all_reduce(backend, bundle.buffer,
                                    detail::native(op, bundle.buffer.scalar_type(), group().averages()));
  });
  add(work, std::move(part), std::move(bundle), true, divisor(op));
}

LOCKSTEP_INLINE int ProcessGroupComm::divisor(ReduceOp op) const {
  return op == ReduceOp::avg && !group().averages() ? size() : 1;
}

}  // namespace lockstep
