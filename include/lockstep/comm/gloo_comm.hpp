#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/gloo_bytes.hpp"
#include "lockstep/comm/detail/gloo_operations.hpp"
#include "lockstep/comm/detail/gloo_work.hpp"
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/shape_check.hpp"
#include "lockstep/comm/detail/tensor_lists.hpp"
#include "lockstep/comm/gloo_options.hpp"

namespace lockstep {

/// Collectives of CPU tensors over LibTorch's own Gloo.
///
/// Every rank constructs its communicators in the same order, and calls the same collectives on each in the
/// same order. Tensors may have any strides (what is not contiguous travels as a copy) and must be equal in
/// shape and dtype over the ranks; Gloo ends the process where they are not, GlooOptions::check_shapes turns
/// that into a MismatchError on every rank. Empty tensors and empty lists are allowed.
///
/// Each call throws CommunicationError inside a rank-zero scope or for a tensor that Gloo cannot take, and
/// PeerError when another rank has failed. Waiting throws TimeoutError naming the late ranks when the
/// timeout passes. The first such error is sticky: later calls throw it again. What is destroyed by an
/// exception aborts, and never waits.
///
/// Thread safety: one thread at a time may issue collectives, since their order must be that of the other
/// ranks. Works may be waited for on other threads, and abort() may be called from any.
class GlooComm {
 public:
  using Work = detail::GlooWork;

  /// Meets the other ranks. Throws TimeoutError naming those that have not come when the timeout expires.
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
  /// Of rank `rank` of this group in the world: how errors call it.
  [[nodiscard]] int world_rank(int rank) const { return group().ranks().at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] const World& world() const { return group().world(); }

  /// Combines `tensor` over the ranks, in place on every one. `average` needs a floating dtype; on bool,
  /// `sum` is "any" and `product` "all".
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    detail::check_reducible("all_reduce", tensor, op);
    Work work = begin("all_reduce", op, -1, tensor);
    if (tensor.numel() == 0) return work;
    if (!tensor.is_contiguous()) {
      reduce_bundle(work, detail::TensorBundle{{tensor}}, op);
      return work;
    }
    auto part = detail::start_all_reduce(gloo(), tensor, op);
    if (op == ReduceOp::average)
      detail::after(part, [tensor, divisor = size()] { detail::divide(tensor, divisor); });
    work.add(std::move(part));
    return work;
  }
  /// The same for a list of any dtypes: one buffer travels for each dtype.
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    for (const at::Tensor& tensor : list) detail::check_reducible("all_reduce", tensor, op);
    Work work = begin("all_reduce", op, -1, list);
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) reduce_bundle(work, std::move(bundle), op);
    return work;
  }

  /// Combines `tensor` over the ranks, in place on `root`; on the others it holds anything afterwards.
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    return reduce(std::vector<at::Tensor>{tensor}, root, op);
  }
  /// The same for a list of any dtypes: one buffer travels for each dtype.
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

  /// Gives every rank `root`'s `tensor`, in place. Any dtype.
  Work broadcast(const at::Tensor& tensor, int root = 0) {
    return broadcast(std::vector<at::Tensor>{tensor}, root);
  }
  /// The same for a list of any dtypes: one buffer travels for each dtype.
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

  /// Gives every rank the `input` [...] of all: `output` [size, ...], by rank. Any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return all_gather(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  /// The same for as many outputs as inputs, of any dtypes: one buffer travels for each dtype.
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

  /// Combines the rows of every rank's `input` [size, ...] and gives rank r row r: `output` [...].
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    return reduce_scatter(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input}, op);
  }
  /// The same for as many outputs as inputs, of any dtypes: one buffer travels for each dtype.
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) {
    for (const at::Tensor& input : inputs) detail::check_reducible("reduce_scatter", input, op);
    detail::check_pairs("reduce_scatter", inputs, outputs, size());
    Work work = begin("reduce_scatter", op, -1, inputs);
    auto from = detail::bundles_of(inputs, size()), to = detail::bundles_of(outputs);
    for (std::size_t i = 0; i < to.size(); ++i) {
      from[i].pack();
      to[i].make_room();
      // Gloo has none in all LibTorch versions: exchange the rows, then combine them here in the order of the
      // ranks.
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

  /// Sends row r of `input` [size, ...] to rank r; row s of `output` [size, ...] comes from rank s. Any
  /// dtype.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    return all_to_all(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  /// The same for as many outputs as inputs, of any dtypes: one buffer travels for each dtype.
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    detail::check_pairs("all_to_all", outputs, inputs, 1);
    for (const at::Tensor& input : inputs)
      if (input.dim() == 0 || input.size(0) != size())
        throw CommunicationError(
            fmt::format("all_to_all: the input {} must have one row for each of {} ranks",
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

  /// Sends `tensor` to the rank `peer`, which must call recv with the same tag, shape and dtype. The Work is
  /// complete when the tensor may be changed again. A dropped Work is sent all the same, and kept until
  /// shutdown.
  Work send(const at::Tensor& tensor, int peer, int tag = 0) {
    return send(std::vector<at::Tensor>{tensor}, peer, tag);
  }
  /// The same for a list of any dtypes, which recv must take as a whole: one message for each dtype.
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
  /// The same for a list, as send was given one.
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

  /// Every rank's bytes, by rank. Blocks.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    detail::BytesGather exchange;
    exchange.own = bytes;
    exchange_bytes_now(group().begin("all_gather_bytes"), exchange);
    return std::move(exchange.all);
  }
  /// The same without blocking: `all` holds the bytes once the Work has been waited for, and must live until
  /// then.
  Work all_gather_bytes_async(std::vector<std::string>& all, std::string bytes) {
    auto exchange = std::make_shared<detail::BytesGather>();
    exchange->own = std::move(bytes);
    return exchange_bytes(group().begin("all_gather_bytes"), exchange,
                          [exchange, &all] { all = std::move(exchange->all); });
  }

  /// `root`'s bytes. Blocks.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    detail::BytesBroadcast exchange;
    exchange.root = root;
    if (rank() == root) exchange.bytes = bytes;
    exchange_bytes_now(group().begin("broadcast_bytes"), exchange);
    return std::move(exchange.bytes);
  }
  /// Gives every rank `root`'s `bytes` in place, without blocking: they are there once the Work has been
  /// waited for, and must live until then.
  Work broadcast_bytes_async(std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    auto exchange = std::make_shared<detail::BytesBroadcast>();
    exchange->root = root;
    if (rank() == root) exchange->bytes = bytes;
    return exchange_bytes(group().begin("broadcast_bytes"), exchange,
                          [exchange, &bytes] { bytes = std::move(exchange->bytes); });
  }

  /// Blocks until every rank has come. Throws TimeoutError naming the missing ranks when the timeout expires.
  void barrier() { barrier_async().synchronize(); }
  /// The same without blocking: the Work is complete when every rank has come.
  Work barrier_async() {
    Work work(group_, group().begin("barrier"));
    work.add(gloo().barrier());
    return work;
  }

  /// A group of some of this group's ranks, ascending. Every rank of this group calls it with the same list;
  /// those that are not in the list get nothing.
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

  /// Ends every wait of the other ranks with a PeerError that gives `reason`, and every later call here with
  /// an error. Does not block.
  void abort(const std::string& reason) { group().abort(reason); }

  /// Leaves the group in good order. Works that are in flight are completed first.
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
      throw CommunicationError(fmt::format("{}: there is no rank {} in a group of {}", name, rank, size()));
  }
  Work begin_message(const char* name, const std::vector<at::Tensor>& list, int peer, int tag) {
    for (const at::Tensor& tensor : list) detail::check_tensor(name, tensor);
    check_rank(name, peer);
    if (peer == rank())
      throw CommunicationError(fmt::format("{}: rank {} cannot send to itself", name, peer));
    if (tag < 0) throw CommunicationError(fmt::format("{}: the tag {} is negative", name, tag));
    return Work(group_, group().message(name, peer, tag));
  }

  // What arrives in the bundle's buffer is divided and goes to its tensors where they are `wanted`.
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
  [[nodiscard]] int divisor(ReduceOp op) const { return op == ReduceOp::average ? size() : 1; }

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
