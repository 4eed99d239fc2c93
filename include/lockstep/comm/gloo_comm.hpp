#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/gloo_bytes.hpp"
#include "lockstep/comm/detail/gloo_operations.hpp"
#include "lockstep/comm/detail/gloo_work.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/shape_check.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/comm/gloo_options.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep {

/// Collectives of CPU tensors over LibTorch's own Gloo.
///
/// Every rank constructs its communicators in the same order and calls the same collectives on each of them
/// in the same order. Tensors may have any strides; a non-contiguous tensor is copied. Shape and dtype must
/// be equal on all ranks. Gloo ends the process if they differ; GlooOptions::check_shapes throws a
/// MismatchError on every rank instead. Empty tensors and empty lists are allowed. A list may mix dtypes;
/// each dtype is one buffer.
///
/// Each call throws CommunicationError inside a rank-zero scope, after shutdown(), or for a tensor that
/// Gloo does not support, and PeerError after another rank has failed. Waiting for a Work throws
/// TimeoutError, which names the late ranks, when the timeout expires. The first failure of the group is
/// sticky: later calls rethrow it. A `synchronize(d)` that times out before the group's timeout is not such
/// a failure. During stack unwinding the destructor aborts and never waits for other ranks.
///
/// Thread safety: one thread at a time may launch collectives, since their order must match the other ranks'.
/// Other threads may wait for Works. Any thread may call abort().
/// Counterpart: torch.distributed.ProcessGroupGloo.
class GlooComm {
 public:
  using Work = detail::GlooWork;

  /// Performs the rendezvous with the other ranks. Collective. Blocks. Throws TimeoutError that names the
  /// missing ranks when the timeout expires.
  explicit GlooComm(const World& world, GlooOptions options = {})
      : GlooComm(std::make_shared<detail::GlooGroup>(world, all_ranks(world.size()),
                                                     next_name(world, options), options)) {}

  GlooComm(GlooComm&&) noexcept = default;
  GlooComm& operator=(GlooComm&& other) noexcept {
    if (this == &other) return *this;
    end();
    group_ = std::move(other.group_);
    exceptions_ = other.exceptions_;
    return *this;
  }
  ~GlooComm() { end(); }

  [[nodiscard]] int rank() const { return group().rank(); }
  [[nodiscard]] int size() const { return group().size(); }
  /// Returns the world rank of the group's rank `rank`; errors name ranks by it.
  [[nodiscard]] int world_rank(int rank) const { return group().ranks().at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] const World& world() const { return group().world(); }

  /// Reduces `tensor` over the ranks, in place on every rank. `average` needs a floating-point dtype. For
  /// bool, `sum` is a logical or and `product` a logical and.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
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
  /// Reduces each tensor of a list.
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    for (const at::Tensor& tensor : list) detail::check_reducible("all_reduce", tensor, op);
    Work work = begin("all_reduce", op, -1, list);
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) reduce_bundle(work, std::move(bundle), op);
    return work;
  }

  /// Reduces `tensor` over the ranks, in place on `root`. Its content is undefined on the other ranks.
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    return reduce(std::vector<at::Tensor>{tensor}, root, op);
  }
  /// Reduces each tensor of a list.
  Work reduce(const std::vector<at::Tensor>& list, int root = 0, ReduceOp op = ReduceOp::sum) {
    for (const at::Tensor& tensor : list) detail::check_reducible("reduce", tensor, op);
    check_rank("reduce", root);
    Work work = begin("reduce", op, root, list);
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
      bundle.pack();
      auto part = detail::start_reduce(gloo(), bundle.buffer, op, root);
      add(work, std::move(part), std::move(bundle), rank() == root, divisor(op));
    }
    return work;
  }

  /// Broadcasts `root`'s `tensor` in place. Any dtype.
  Work broadcast(const at::Tensor& tensor, int root = 0) {
    return broadcast(std::vector<at::Tensor>{tensor}, root);
  }
  /// Broadcasts each tensor of a list.
  Work broadcast(const std::vector<at::Tensor>& list, int root = 0) {
    for (const at::Tensor& tensor : list) detail::check_tensor("broadcast", tensor);
    check_rank("broadcast", root);
    Work work = begin("broadcast", std::nullopt, root, list);
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
      bundle.pack();
      auto part = detail::start_broadcast(gloo(), detail::movable(bundle.buffer), root);
      add(work, std::move(part), std::move(bundle), rank() != root);
    }
    return work;
  }

  /// Gathers every rank's `input` [...] into `output` [size, ...], ordered by rank. Any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return all_gather(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  /// Gathers each tensor of a list. `outputs` and `inputs` have equal lengths.
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    detail::check_pairs("all_gather", outputs, inputs, size());
    Work work = begin("all_gather", std::nullopt, -1, inputs);
    auto from = detail::bundles_of(inputs), to = detail::bundles_of(outputs, size());
    for (std::size_t i = 0; i < to.size(); ++i) {
      from[i].pack();
      to[i].make_room();
      auto part =
          detail::start_all_gather(gloo(), detail::movable(to[i].buffer), detail::movable(from[i].buffer));
      add(work, std::move(part), std::move(to[i]));
    }
    return work;
  }

  /// Reduces every rank's `input` [size, ...] and writes row r to the `output` [...] of rank r.
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    return reduce_scatter(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input}, op);
  }
  /// Reduces and scatters each tensor of a list. `outputs` and `inputs` have equal lengths.
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) {
    for (const at::Tensor& input : inputs) detail::check_reducible("reduce_scatter", input, op);
    detail::check_pairs("reduce_scatter", inputs, outputs, size());
    Work work = begin("reduce_scatter", op, -1, inputs);
    auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs);
    for (std::size_t i = 0; i < to.size(); ++i) {
      from[i].pack();
      to[i].make_room();
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

  /// Sends row r of `input` [size, ...] to rank r. Row s of `output` [size, ...] comes from rank s. Any
  /// dtype.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    return all_to_all(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  /// Exchanges each tensor of a list. `outputs` and `inputs` have equal lengths.
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
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
      to[i].make_room();
      auto part =
          detail::start_all_to_all(gloo(), detail::movable(to[i].buffer), detail::movable(from[i].buffer));
      add(work, std::move(part), std::move(to[i]));
    }
    return work;
  }

  /// Sends `tensor` to rank `peer`, which must call recv with the same tag, shape and dtype. Once the Work is
  /// complete the tensor may be modified. A message whose Work is destroyed is still sent; its tensor is kept
  /// until shutdown. Throws CommunicationError for this rank itself or a negative tag.
  Work send(const at::Tensor& tensor, int peer, int tag = 0) {
    return send(std::vector<at::Tensor>{tensor}, peer, tag);
  }
  /// Sends a list, which recv must receive as a list. One message per dtype.
  Work send(const std::vector<at::Tensor>& list, int peer, int tag = 0) {
    Work work = begin_message("send", list, peer, tag);
    const detail::SigpipeGuard guard;
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
      bundle.pack();
      std::vector<at::Tensor> tensors{bundle.buffer.detach()};
      work.add(gloo().send(tensors, peer, tag));
    }
    return work;
  }
  /// Receives into `tensor`, which holds the message once the Work has been waited for.
  Work recv(const at::Tensor& tensor, int peer, int tag = 0) {
    return recv(std::vector<at::Tensor>{tensor}, peer, tag);
  }
  /// Receives a list that was sent as a list of the same shapes and dtypes.
  Work recv(const std::vector<at::Tensor>& list, int peer, int tag = 0) {
    Work work = begin_message("recv", list, peer, tag);
    const detail::SigpipeGuard guard;
    auto bundles = detail::bundles_of(list);
    for (detail::TensorBundle& bundle : bundles) {
      bundle.make_room();
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

  /// Returns every rank's bytes, ordered by rank. Collective. Blocks.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    detail::BytesGather exchange;
    exchange.own = bytes;
    exchange_bytes_now(group().begin("all_gather_bytes"), exchange);
    return std::move(exchange.all);
  }
  /// Gathers every rank's bytes into `all` without blocking. `all` holds them once the Work has been waited
  /// for, and must outlive that wait.
  Work all_gather_bytes_async(std::vector<std::string>& all, std::string bytes) {
    auto exchange = std::make_shared<detail::BytesGather>();
    exchange->own = std::move(bytes);
    return exchange_bytes(group().begin("all_gather_bytes"), exchange,
                          [exchange, &all] { all = std::move(exchange->all); });
  }

  /// Returns `root`'s bytes. Collective. Blocks.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    detail::BytesBroadcast exchange;
    exchange.root = root;
    if (rank() == root) exchange.bytes = bytes;
    exchange_bytes_now(group().begin("broadcast_bytes"), exchange);
    return std::move(exchange.bytes);
  }
  /// Broadcasts `root`'s `bytes` in place without blocking. `bytes` is valid once the Work has been waited
  /// for, and must outlive that wait.
  Work broadcast_bytes_async(std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    auto exchange = std::make_shared<detail::BytesBroadcast>();
    exchange->root = root;
    if (rank() == root) exchange->bytes = bytes;
    return exchange_bytes(group().begin("broadcast_bytes"), exchange,
                          [exchange, &bytes] { bytes = std::move(exchange->bytes); });
  }

  /// Blocks until every rank has called it. Throws TimeoutError that names the missing ranks when the timeout
  /// expires.
  void barrier() { barrier_async().synchronize(); }
  /// Launches a barrier without blocking. The Work completes when every rank has called it.
  Work barrier_async() {
    Work work(group_, group().begin("barrier"));
    work.add(gloo().barrier());
    return work;
  }

  /// Creates a group of some of this group's ranks, in ascending order. Collective over this group: every
  /// rank passes the same list. Returns std::nullopt on ranks outside the list. Throws CommunicationError for
  /// a list that does not ascend or names a rank outside the group.
  /// Counterpart: torch.distributed.new_group.
  [[nodiscard]] std::optional<GlooComm> new_group(const std::vector<int>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      check_rank("new_group", ranks[i]);
      if (i > 0 && ranks[i] <= ranks[i - 1])
        throw CommunicationError("new_group: the ranks must ascend, and none may be named twice");
    }
    group().begin("new_group");
    std::string name = group().next_child();
    if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) return std::nullopt;
    std::vector<int> global;
    for (int rank : ranks) global.push_back(group().ranks()[static_cast<std::size_t>(rank)]);
    return GlooComm(
        std::make_shared<detail::GlooGroup>(world(), std::move(global), std::move(name), group().options()));
  }

  /// Aborts the group: every wait of the other ranks ends with a PeerError that contains `reason`, and every
  /// later call on this rank throws. Does not wait for other ranks; takes at most 1 s. Thread-safe.
  void abort(const std::string& reason) { group().abort(reason); }

  /// Leaves the group after the Works in flight have completed. Blocks. Throws TimeoutError when the timeout
  /// expires. A no-op after a failure.
  void shutdown() { group().shutdown(); }

 private:
  explicit GlooComm(std::shared_ptr<detail::GlooGroup> group) : group_(std::move(group)) {}

  static std::vector<int> all_ranks(int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  static std::string next_name(const World& world, const GlooOptions& options) {
    return detail::Membership::next_name(world, "comm", detail::checked(options).timeout);
  }

  void end() noexcept {
    if (!group_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      group_->abort_by_exception();
    } else {
      try {
        group_->shutdown();
      } catch (const std::exception& error) {
        group_->abort(error.what());
      }
    }
    group_.reset();
  }

  [[nodiscard]] detail::GlooGroup& group() const {
    if (!group_)
      throw UsageError(
          "this communicator was moved from, into a Trainer for instance: use the one that it became, such "
          "as "
          "trainer.comm()");
    return *group_;
  }
  [[nodiscard]] c10d::ProcessGroupGloo& gloo() { return group().process_group(); }

  template <class Tensors>
  Work begin(const char* name, std::optional<ReduceOp> op, int root, const Tensors& tensors) {
    const detail::Call call = group().begin(name);
    if (group().options().check_shapes && size() > 1) {
      const std::string operation = detail::operation_text(name, op, root);
      if constexpr (std::is_same_v<Tensors, at::Tensor>)
        detail::compare_over_ranks(*group_, call, detail::signature(operation, {tensors}));
      else
        detail::compare_over_ranks(*group_, call, detail::signature(operation, tensors));
    }
    return Work(group_, call);
  }

  void check_rank(const char* name, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(
          detail::formatted("{}: there is no rank {} in a group of {}", name, rank, size()));
  }
  Work begin_message(const char* name, const std::vector<at::Tensor>& list, int peer, int tag) {
    for (const at::Tensor& tensor : list) detail::check_tensor(name, tensor);
    check_rank(name, peer);
    if (peer == rank())
      throw CommunicationError(detail::formatted("{}: rank {} cannot send to itself", name, peer));
    if (tag < 0) throw CommunicationError(detail::formatted("{}: the tag {} is negative", name, tag));
    return Work(group_, group().message(name, peer, tag));
  }

  // Adds a part to the Work. If the result is `wanted`, divides it and copies it from the bundle's buffer to
  // its tensors.
  static void add(Work& work, detail::GlooPart part, detail::TensorBundle bundle, bool wanted = true,
                  int divisor = 1) {
    if (wanted && (divisor > 1 || !bundle.in_place()))
      detail::after(part, [bundle = std::move(bundle), divisor] {
        detail::divide(bundle.buffer, divisor);
        bundle.unpack();
      });
    work.add(std::move(part));
  }
  void reduce_bundle(Work& work, detail::TensorBundle bundle, ReduceOp op) {
    bundle.pack();
    auto part = detail::start_all_reduce(gloo(), bundle.buffer, op);
    add(work, std::move(part), std::move(bundle), true, divisor(op));
  }
  [[nodiscard]] int divisor(ReduceOp op) const { return op == ReduceOp::avg ? size() : 1; }

  template <class Exchange>
  void exchange_bytes_now(const detail::Call& call, Exchange& exchange) {
    const auto complete = [&](const detail::GlooPart& part) {
      group_->await(call, *part, call.start + group_->timeout());
    };
    complete(exchange.start(gloo()));
    for (const detail::GlooPart& part : exchange.go_on(gloo())) complete(part);
    exchange.finish();
  }
  template <class Exchange, class Deliver>
  Work exchange_bytes(const detail::Call& call, const std::shared_ptr<Exchange>& exchange, Deliver deliver) {
    Work work(group_, call);
    work.add(group_->bytes_lane().start(gloo(), exchange));
    work.at_end(std::move(deliver));
    return work;
  }

  std::shared_ptr<detail::GlooGroup> group_;
  int exceptions_ = std::uncaught_exceptions();
};

static_assert(Reducing<GlooComm> && Gathering<GlooComm> && PointToPoint<GlooComm> && Splittable<GlooComm>);

}  // namespace lockstep
