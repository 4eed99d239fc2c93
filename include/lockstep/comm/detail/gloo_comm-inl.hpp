#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/comm/detail/gloo_bytes.hpp"
#include "lockstep/comm/detail/gloo_group.hpp"
#include "lockstep/comm/detail/gloo_operations.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/signature.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/comm/gloo_comm.hpp"
#include "lockstep/detail/fnv1a.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/error.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE GlooWork::GlooWork() = default;

LOCKSTEP_INLINE GlooWork::GlooWork(GlooWork&&) noexcept = default;

LOCKSTEP_INLINE GlooWork::GlooWork(std::shared_ptr<GlooGroup> group, Call call)
    : group_(std::move(group)), call_(call) {}

LOCKSTEP_INLINE GlooWork& GlooWork::operator=(GlooWork&& other) noexcept {
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

LOCKSTEP_INLINE GlooWork::~GlooWork() {
  keep_messages();
}

LOCKSTEP_INLINE void GlooWork::wait() {
  wait_until(call_.start + timeout());
}

LOCKSTEP_INLINE void GlooWork::synchronize() {
  wait_until(call_.start + timeout());
}

LOCKSTEP_INLINE void GlooWork::synchronize(std::chrono::milliseconds timeout) {
  // Take the minimum first: the largest duration would overflow the clock.
  wait_until(std::min(std::chrono::steady_clock::now() + std::min(timeout, this->timeout()),
                      call_.start + this->timeout()));
}

LOCKSTEP_INLINE std::exception_ptr GlooWork::error() const noexcept {
  if (error_) return error_;
  for (const auto& part : parts_)
    if (auto error = part->exception()) return error;
  return nullptr;
}

LOCKSTEP_INLINE void GlooWork::add(c10::intrusive_ptr<c10d::Work> part) {
  parts_.push_back(std::move(part));
}

LOCKSTEP_INLINE void GlooWork::at_end(std::function<void()> work) {
  at_end_ = std::move(work);
}

LOCKSTEP_INLINE std::chrono::milliseconds GlooWork::timeout() const {
  return group_ ? group_->timeout() : std::chrono::milliseconds(0);
}

LOCKSTEP_INLINE void GlooWork::wait_until(std::chrono::steady_clock::time_point until) {
  if (error_) std::rethrow_exception(error_);
  try {
    while (!parts_.empty()) {
      if (call_.peer >= 0)
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
  if (at_end_) std::exchange(at_end_, nullptr)();
}

LOCKSTEP_INLINE void GlooWork::keep_messages() noexcept {
  if (group_ && call_.peer >= 0)
    for (auto& part : parts_) group_->keep(std::move(part));
}

/// Compares the signature `own` over the ranks before the collective sends anything. Throws the same
/// MismatchError on every rank.
inline void compare_over_ranks(GlooGroup& group, const Call& call, const std::string& own) {
  const auto gather = [&](const at::Tensor& row) {
    auto rows = at::empty({group.state().size(), row.numel()}, row.options());
    const auto work = start_all_gather(group.process_group(), rows, row);
    group.await(call, *work, call.start + group.timeout());
    return rows;
  };
  const auto length = static_cast<std::int64_t>(own.size());
  auto head = at::empty({2}, at::kLong);
  head.data_ptr<std::int64_t>()[0] = length;
  head.data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(fnv1a(own));
  const auto heads = gather(head);
  if (heads.eq(head).all().item<bool>()) return;
  const auto longest = heads.select(1, 0).max().item<std::int64_t>();
  const auto texts = gather(bytes_tensor(own, longest));
  std::vector<std::string> signatures;
  for (int rank = 0; rank < group.state().size(); ++rank)
    signatures.push_back(bytes_in(texts[rank], heads[rank][0].item<std::int64_t>()));
  throw MismatchError(mismatch_text(call, signatures, group.state().ranks()));
}

}  // namespace lockstep::detail

namespace lockstep {

template <class Tensors>
GlooComm::Work GlooComm::begin(const char* name, std::optional<ReduceOp> op, int root,
                               const Tensors& tensors) {
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
void GlooComm::exchange_bytes_now(const detail::Call& call, Exchange& exchange) {
  const auto complete = [&](const detail::GlooPart& part) {
    group_->await(call, *part, call.start + group_->timeout());
  };
  complete(exchange.start(gloo()));
  for (const detail::GlooPart& part : exchange.send_bytes(gloo())) complete(part);
  exchange.finish();
}

template <class Exchange, class Deliver>
GlooComm::Work GlooComm::exchange_bytes(const detail::Call& call, const std::shared_ptr<Exchange>& exchange,
                                        Deliver deliver) {
  Work work(group_, call);
  work.add(group_->bytes_lane().start(gloo(), exchange));
  work.at_end(std::move(deliver));
  return work;
}

LOCKSTEP_INLINE GlooComm::GlooComm(GlooComm&&) noexcept = default;

LOCKSTEP_INLINE GlooComm::GlooComm(const World& world, GlooOptions options)
    : GlooComm(std::make_shared<detail::GlooGroup>(
          world, detail::all_ranks(world.size()),
          detail::Membership::next_name(world, "comm", detail::checked(options).timeout), options)) {}

LOCKSTEP_INLINE GlooComm& GlooComm::operator=(GlooComm&& other) noexcept {
  if (this == &other) return *this;
  detail::leave_group(group_, exceptions_);
  group_ = std::move(other.group_);
  exceptions_ = other.exceptions_;
  return *this;
}

LOCKSTEP_INLINE GlooComm::~GlooComm() {
  detail::leave_group(group_, exceptions_);
}

LOCKSTEP_INLINE int GlooComm::rank() const {
  return group().state().rank();
}

LOCKSTEP_INLINE int GlooComm::size() const {
  return group().state().size();
}

LOCKSTEP_INLINE int GlooComm::world_rank(int rank) const {
  return group().state().ranks().at(static_cast<std::size_t>(rank));
}

LOCKSTEP_INLINE const World& GlooComm::world() const {
  return group().state().world();
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  detail::check_reducible("all_reduce", tensor, op);
  Work work = begin("all_reduce", op, -1, tensor);
  if (tensor.numel() == 0) return work;
  if (!tensor.is_contiguous()) {
    reduce_bundle(work, detail::TensorBundle{{tensor}}, op);
    return work;
  }
  auto part = detail::start_all_reduce(gloo(), tensor, op);
  if (op == ReduceOp::avg)
    detail::after(part, [tensor, divisor = size()] { detail::divide(tensor, divisor); });
  work.add(std::move(part));
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_reduce(const std::vector<at::Tensor>& list, ReduceOp op) {
  for (const at::Tensor& tensor : list) detail::check_reducible("all_reduce", tensor, op);
  Work work = begin("all_reduce", op, -1, list);
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) reduce_bundle(work, std::move(bundle), op);
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::reduce(const at::Tensor& tensor, int root, ReduceOp op) {
  return reduce(std::vector<at::Tensor>{tensor}, root, op);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::reduce(const std::vector<at::Tensor>& list, int root, ReduceOp op) {
  for (const at::Tensor& tensor : list) detail::check_reducible("reduce", tensor, op);
  group().state().check_rank("reduce", root);
  Work work = begin("reduce", op, root, list);
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
    bundle.pack();
    auto part = detail::start_reduce(gloo(), bundle.buffer, op, root);
    add(work, std::move(part), std::move(bundle), rank() == root, divisor(op));
  }
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::broadcast(const at::Tensor& tensor, int root) {
  return broadcast(std::vector<at::Tensor>{tensor}, root);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::broadcast(const std::vector<at::Tensor>& list, int root) {
  for (const at::Tensor& tensor : list) detail::check_tensor("broadcast", tensor);
  group().state().check_rank("broadcast", root);
  Work work = begin("broadcast", std::nullopt, root, list);
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
    bundle.pack();
    auto part = detail::start_broadcast(gloo(), detail::movable(bundle.buffer), root);
    add(work, std::move(part), std::move(bundle), rank() != root);
  }
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_gather(const at::Tensor& output, const at::Tensor& input) {
  return all_gather(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_gather(const std::vector<at::Tensor>& outputs,
                                                    const std::vector<at::Tensor>& inputs) {
  detail::check_pairs("all_gather", outputs, inputs, size());
  Work work = begin("all_gather", std::nullopt, -1, inputs);
  auto from = detail::bundles_of(inputs), to = detail::bundles_of(outputs, size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    auto part =
        detail::start_all_gather(gloo(), detail::movable(to[i].buffer), detail::movable(from[i].buffer));
    add(work, std::move(part), std::move(to[i]));
  }
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                        ReduceOp op) {
  return reduce_scatter(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input}, op);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::reduce_scatter(const std::vector<at::Tensor>& outputs,
                                                        const std::vector<at::Tensor>& inputs, ReduceOp op) {
  for (const at::Tensor& input : inputs) detail::check_reducible("reduce_scatter", input, op);
  detail::check_pairs("reduce_scatter", inputs, outputs, size());
  Work work = begin("reduce_scatter", op, -1, inputs);
  auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs);
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    // Not every LibTorch version has a Gloo reduce_scatter: exchange the rows, then reduce them here in
    // rank order.
    const auto rows =
        at::empty({size(), to[i].buffer.numel()}, from[i].buffer.options().requires_grad(false));
    auto part = detail::start_all_to_all(gloo(), rows, from[i].buffer);
    detail::after(part, [bundle = std::move(to[i]), rows, op] {
      detail::combine_rows(bundle.buffer, rows, op);
      bundle.unpack();
    });
    work.add(std::move(part));
  }
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_to_all(const at::Tensor& output, const at::Tensor& input) {
  return all_to_all(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_to_all(const std::vector<at::Tensor>& outputs,
                                                    const std::vector<at::Tensor>& inputs) {
  detail::check_pairs("all_to_all", outputs, inputs, 1);
  for (const at::Tensor& input : inputs)
    if (input.dim() == 0 || input.size(0) != size())
      throw CommunicationError(
          detail::formatted("all_to_all: the input {} must have one row for each of {} ranks",
                            detail::describe(input), size()));
  Work work = begin("all_to_all", std::nullopt, -1, inputs);
  auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs, size());
  for (std::size_t i = 0; i < to.size(); ++i) {
    from[i].pack();
    to[i].allocate();
    auto part =
        detail::start_all_to_all(gloo(), detail::movable(to[i].buffer), detail::movable(from[i].buffer));
    add(work, std::move(part), std::move(to[i]));
  }
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::send(const at::Tensor& tensor, int peer, int tag) {
  return send(std::vector<at::Tensor>{tensor}, peer, tag);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::send(const std::vector<at::Tensor>& list, int peer, int tag) {
  Work work = begin_message("send", list, peer, tag);
  const detail::SigpipeGuard guard;
  for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
    bundle.pack();
    std::vector<at::Tensor> tensors{bundle.buffer.detach()};
    work.add(gloo().send(tensors, peer, tag));
  }
  return work;
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::recv(const at::Tensor& tensor, int peer, int tag) {
  return recv(std::vector<at::Tensor>{tensor}, peer, tag);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::recv(const std::vector<at::Tensor>& list, int peer, int tag) {
  Work work = begin_message("recv", list, peer, tag);
  const detail::SigpipeGuard guard;
  auto bundles = detail::bundles_of(list);
  for (detail::TensorBundle& bundle : bundles) {
    bundle.allocate();
    std::vector<at::Tensor> tensors{bundle.buffer.detach()};
    work.add(gloo().recv(tensors, peer, tag));
  }
  std::erase_if(bundles, [](const detail::TensorBundle& bundle) { return bundle.in_place(); });
  if (!bundles.empty())
    work.at_end([bundles = std::move(bundles)] {
      for (const detail::TensorBundle& bundle : bundles) bundle.unpack();
    });
  return work;
}

LOCKSTEP_INLINE std::vector<std::string> GlooComm::all_gather_bytes(const std::string& bytes) {
  detail::BytesGather exchange;
  exchange.own = bytes;
  exchange_bytes_now(group().state().begin("all_gather_bytes"), exchange);
  return std::move(exchange.all);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::all_gather_bytes_async(std::vector<std::string>& all,
                                                                std::string bytes) {
  auto exchange = std::make_shared<detail::BytesGather>();
  exchange->own = std::move(bytes);
  return exchange_bytes(group().state().begin("all_gather_bytes"), exchange,
                        [exchange, &all] { all = std::move(exchange->all); });
}

LOCKSTEP_INLINE std::string GlooComm::broadcast_bytes(const std::string& bytes, int root) {
  group().state().check_rank("broadcast_bytes", root);
  detail::BytesBroadcast exchange;
  exchange.root = root;
  if (rank() == root) exchange.bytes = bytes;
  exchange_bytes_now(group().state().begin("broadcast_bytes"), exchange);
  return std::move(exchange.bytes);
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::broadcast_bytes_async(std::string& bytes, int root) {
  group().state().check_rank("broadcast_bytes", root);
  auto exchange = std::make_shared<detail::BytesBroadcast>();
  exchange->root = root;
  if (rank() == root) exchange->bytes = bytes;
  return exchange_bytes(group().state().begin("broadcast_bytes"), exchange,
                        [exchange, &bytes] { bytes = std::move(exchange->bytes); });
}

LOCKSTEP_INLINE void GlooComm::barrier() {
  barrier_async().synchronize();
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::barrier_async() {
  Work work(group_, group().state().begin("barrier"));
  work.add(gloo().barrier());
  return work;
}

LOCKSTEP_INLINE std::optional<GlooComm> GlooComm::new_group(const std::vector<int>& ranks) {
  detail::GroupState& state = group().state();
  state.check_subgroup(ranks);
  state.begin("new_group");
  std::string name = state.next_child();
  if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) return std::nullopt;
  return GlooComm(std::make_shared<detail::GlooGroup>(world(), state.world_ranks(ranks), std::move(name),
                                                      group().options()));
}

LOCKSTEP_INLINE void GlooComm::abort(const std::string& reason) {
  group().state().abort(reason);
}

LOCKSTEP_INLINE void GlooComm::shutdown() {
  group().shutdown();
}

LOCKSTEP_INLINE GlooComm::GlooComm(std::shared_ptr<detail::GlooGroup> group) : group_(std::move(group)) {}

LOCKSTEP_INLINE detail::GlooGroup& GlooComm::group() const {
  if (!group_)
    throw UsageError(
        "this communicator was moved from, into a Trainer for instance: use the communicator that now holds "
        "the group, such as "
        "trainer.comm()");
  return *group_;
}

LOCKSTEP_INLINE c10d::ProcessGroupGloo& GlooComm::gloo() {
  return group().process_group();
}

LOCKSTEP_INLINE GlooComm::Work GlooComm::begin_message(const char* name, const std::vector<at::Tensor>& list,
                                                       int peer, int tag) {
  for (const at::Tensor& tensor : list) detail::check_tensor(name, tensor);
  group().state().check_peer(name, peer);
  if (tag < 0) throw CommunicationError(detail::formatted("{}: the tag {} is negative", name, tag));
  return Work(group_, group().state().message(name, peer, tag));
}

LOCKSTEP_INLINE void GlooComm::add(Work& work, detail::GlooPart part, detail::TensorBundle bundle,
                                   bool wanted, int divisor) {
  if (wanted && (divisor > 1 || !bundle.in_place()))
    detail::after(part, [bundle = std::move(bundle), divisor] {
      detail::divide(bundle.buffer, divisor);
      bundle.unpack();
    });
  work.add(std::move(part));
}

LOCKSTEP_INLINE void GlooComm::reduce_bundle(Work& work, detail::TensorBundle bundle, ReduceOp op) {
  bundle.pack();
  auto part = detail::start_all_reduce(gloo(), bundle.buffer, op);
  add(work, std::move(part), std::move(bundle), true, divisor(op));
}

LOCKSTEP_INLINE int GlooComm::divisor(ReduceOp op) const {
  return op == ReduceOp::avg ? size() : 1;
}

}  // namespace lockstep
