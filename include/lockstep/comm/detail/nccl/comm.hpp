#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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
#include "lockstep/comm/detail/membership.hpp"
#include "lockstep/comm/detail/nccl/bytes.hpp"
#include "lockstep/comm/detail/nccl/calls.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/group.hpp"
#include "lockstep/comm/detail/nccl/tensor_check.hpp"
#include "lockstep/comm/detail/nccl/work.hpp"
#include "lockstep/comm/detail/signature.hpp"
#include "lockstep/comm/nccl_options.hpp"

namespace lockstep::detail {

/// Collectives of a GPU's tensors over NCCL, on a stream of their own. NcclComm is this over the real CUDA
/// and NCCL; `D` is whatever stands for them.
///
/// Every rank constructs its communicators in the same order, and calls the same collectives on each in the
/// same order. A collective comes after all that the current stream holds at its call, and its results are
/// there for what the current stream is given after `wait()`; the host waits for neither. Tensors may
/// have any strides (what is not contiguous travels as a copy) and must be equal in shape and dtype over the
/// ranks; NcclOptions::check_shapes turns a difference into a MismatchError on every rank. A list is one
/// group of NCCL's, without copies. Empty tensors and empty lists are allowed. Averages are NCCL's own, which
/// multiplies each rank's numbers by 1 / size before they are added.
///
/// Each call throws CommunicationError inside a rank-zero scope or for a tensor that NCCL cannot take, and
/// PeerError when another rank has failed. When a collective is not complete at its timeout, a watchdog ends
/// it, and the next call or wait throws TimeoutError naming the late ranks. The first such error is sticky:
/// later calls throw it again. What is destroyed by an exception tells the other ranks and aborts, and never
/// waits.
///
/// Thread safety: one thread at a time may issue collectives, since their order must be that of the other
/// ranks. Works may be waited for on other threads, and abort() may be called from any.
template <NcclDevice D>
class BasicNcclComm {
 public:
  using Work = NcclWork<D>;
  /// A graph can hold its collectives, which are issued behind the current stream; see CapturedStep. What
  /// waits for the other ranks on the host throws UsageError while one is captured.
  static constexpr bool capturable = true;

  /// Meets the other ranks. Throws UsageError where there is no GPU for this rank or two ranks are on one,
  /// TimeoutError naming the ranks that have not come when the timeout expires, PeerError where one has
  /// failed, MismatchError where two have different NCCLs.
  explicit BasicNcclComm(const World& world, NcclOptions options = {})
      : group_(std::make_shared<NcclGroup<D>>(world, all_ranks(world.size()), next_name(world, options),
                                              options)) {}

  BasicNcclComm(BasicNcclComm&&) noexcept = default;
  BasicNcclComm& operator=(BasicNcclComm&& other) noexcept {
    if (this == &other) return *this;
    end();
    group_ = std::move(other.group_);
    exceptions_ = other.exceptions_;
    return *this;
  }
  ~BasicNcclComm() { end(); }

  [[nodiscard]] int rank() const { return group_->rank(); }
  [[nodiscard]] int size() const { return group_->size(); }
  /// Of rank `rank` of this group in the world: how errors call it.
  [[nodiscard]] int world_rank(int rank) const {
    return group_->membership().ranks().at(static_cast<std::size_t>(rank));
  }
  [[nodiscard]] const World& world() const { return group_->world(); }
  /// Where its tensors live: the GPU of this rank.
  [[nodiscard]] at::Device tensor_device() const requires requires(const D& device) {
    device.tensor_device();
  }
  { return device().tensor_device(); }

  /// Throws the first error, as every call does, if there was one. Never blocks.
  void check_error() { group_->check_error(); }

  /// Throws UsageError where the options make every call wait on the host, which a graph cannot hold.
  void check_capturable() const {
    if (group_->options().check_shapes)
      throw UsageError(
          "NcclOptions::check_shapes exchanges shapes on the host in each call, which a captured "
          "step cannot: leave it out",
          world().rank());
  }
  /// Runs `replay()`, which gives the current stream a graph in which collectives of this communicator were
  /// captured. As of any collective, every rank calls it in the same order; it throws the first error and
  /// repeats nothing then, and the watchdog looks after what was repeated, under the timeout.
  template <class Replay>
  void watch_replay(Replay&& replay) {
    group_->watch_replay(std::forward<Replay>(replay));
  }

  /// What errors call the collectives that follow, such as "bucket 2 of 5, with fc.weight", until it is
  /// changed; null for nothing.
  void label(Label label) { group_->label(std::move(label)); }

  /// A tensor [length], uninitialised, with the dtype and the device of `like`, in memory that
  /// NcclOptions::buffers chooses. What one rank sends from such a buffer or receives there, every rank
  /// does, at the same place in its own. It may outlive the communicator; after an abort or shutdown() it is
  /// memory like any other. Throws CommunicationError when that memory has run out.
  [[nodiscard]] at::Tensor empty_buffer(std::int64_t length, const at::Tensor& like) {
    return group_->empty_buffer(length, like);
  }

  /// Combines `tensor` over the ranks, in place on every one. `average` needs a floating dtype; on bool,
  /// `sum` is "any" and `product` "all".
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    return all_reduce(std::vector<at::Tensor>{tensor}, op);
  }
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    check("all_reduce").reduces(list, op);
    const Call call = begin("all_reduce", op, -1, list);
    return run(call, {}, {}, list, [this, op](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_changed([&](const at::Tensor& tensor) {
        const auto wire = reduced_as(tensor);
        return device().all_reduce(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(),
                                   wire.count, wire.type, reduced_by(tensor, op));
      });
    });
  }

  /// Combines `tensor` over the ranks, in place on `root`; on the others it holds anything afterwards.
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    return reduce(std::vector<at::Tensor>{tensor}, root, op);
  }
  Work reduce(const std::vector<at::Tensor>& list, int root = 0, ReduceOp op = ReduceOp::sum) {
    check("reduce").reduces(list, op);
    check_rank("reduce", root);
    const Call call = begin("reduce", op, root, list);
    return run(call, {}, {}, list, [this, op, root](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_changed([&](const at::Tensor& tensor) {
        const auto wire = reduced_as(tensor);
        return device().reduce(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(), wire.count,
                               wire.type, reduced_by(tensor, op), root);
      });
    });
  }

  /// Gives every rank `root`'s `tensor`, in place. Any dtype.
  Work broadcast(const at::Tensor& tensor, int root = 0) {
    return broadcast(std::vector<at::Tensor>{tensor}, root);
  }
  Work broadcast(const std::vector<at::Tensor>& list, int root = 0) {
    check("broadcast").moves(list);
    check_rank("broadcast", root);
    return start_broadcast<D>(group_, begin("broadcast", std::nullopt, root, list), list, root);
  }

  /// Gives every rank the `input` [...] of all: `output` [size, ...], by rank. Any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return all_gather(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    check("all_gather").pairs(outputs, inputs, size());
    return start_all_gather<D>(group_, begin("all_gather", std::nullopt, -1, inputs), outputs, inputs);
  }

  /// Combines the rows of every rank's `input` [size, ...] and gives rank r row r: `output` [...].
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    return reduce_scatter(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input}, op);
  }
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) {
    check("reduce_scatter").reduces(inputs, op);
    check("reduce_scatter").pairs(inputs, outputs, size());
    const Call call = begin("reduce_scatter", op, -1, inputs);
    return run(call, outputs, inputs, {}, [this, op](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_pair([&](const at::Tensor& output, const at::Tensor& input) {
        const auto wire = reduced_as(output);
        return device().reduce_scatter(comm, stream, input.const_data_ptr(), output.mutable_data_ptr(),
                                       wire.count, wire.type, reduced_by(output, op));
      });
    });
  }

  /// Sends row r of `input` [size, ...] to rank r; row s of `output` [size, ...] comes from rank s. Any
  /// dtype.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    return all_to_all(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  Work all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    check("all_to_all").pairs(outputs, inputs, 1);
    for (const at::Tensor& input : inputs)
      if (input.dim() == 0 || input.size(0) != size())
        check("all_to_all")
            .refuse(
                fmt::format("the input {} must have one row for each of {} ranks", describe(input), size()));
    const Call call = begin("all_to_all", std::nullopt, -1, inputs);
    return run(call, outputs, inputs, {}, [this](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_pair([&](const at::Tensor& output, const at::Tensor& input) {
        const auto wire = moved_as(input);
        const std::size_t count = wire.count / static_cast<std::size_t>(size());
        const std::size_t bytes = input.nbytes() / static_cast<std::size_t>(size());
        auto result = NcclResult::success;
        for (int peer = 0; peer < size() && went_well(result); ++peer) {
          const auto* from =
              static_cast<const char*>(input.const_data_ptr()) + static_cast<std::size_t>(peer) * bytes;
          auto* to = static_cast<char*>(output.mutable_data_ptr()) + static_cast<std::size_t>(peer) * bytes;
          result = device().send(comm, stream, from, count, wire.type, peer);
          if (went_well(result)) result = device().recv(comm, stream, to, count, wire.type, peer);
        }
        return result;
      });
    });
  }

  /// Sends `tensor` to the rank `peer`, which must call recv with the same shape and dtype. Messages share
  /// the stream, and so the order, of the collectives. NCCL knows no tags: the tag is 0.
  Work send(const at::Tensor& tensor, int peer, int tag = 0) {
    return send(std::vector<at::Tensor>{tensor}, peer, tag);
  }
  Work send(const std::vector<at::Tensor>& list, int peer, int tag = 0) {
    const Call call = begin_message("send", list, peer, tag);
    return run(call, {}, list, {}, [this, peer](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_read([&](const at::Tensor& tensor) {
        const auto wire = moved_as(tensor);
        return device().send(comm, stream, tensor.const_data_ptr(), wire.count, wire.type, peer);
      });
    });
  }
  /// Receives into `tensor`, which holds the message once the Work has been waited for.
  Work recv(const at::Tensor& tensor, int peer, int tag = 0) {
    return recv(std::vector<at::Tensor>{tensor}, peer, tag);
  }
  Work recv(const std::vector<at::Tensor>& list, int peer, int tag = 0) {
    const Call call = begin_message("recv", list, peer, tag);
    return run(call, list, {}, {}, [this, peer](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_written([&](const at::Tensor& tensor) {
        const auto wire = moved_as(tensor);
        return device().recv(comm, stream, tensor.mutable_data_ptr(), wire.count, wire.type, peer);
      });
    });
  }

  /// Every rank's bytes, by rank, through the memory of the GPUs. Blocks.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    return NcclBytes<D>(group_, begin_on_host("all_gather_bytes")).gather(bytes);
  }
  /// The same without blocking, through the store: `all` holds the bytes once the Work has been waited for,
  /// and must live until then.
  Work all_gather_bytes_async(std::vector<std::string>& all, const std::string& bytes) {
    return exchange_in_store("all_gather_bytes", all_ranks(size()), bytes,
                             [&all](std::vector<std::string> got) { all = std::move(got); });
  }

  /// `root`'s bytes, through the memory of the GPUs. Blocks.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    return NcclBytes<D>(group_, begin_on_host("broadcast_bytes")).broadcast(bytes, root);
  }
  /// Gives every rank `root`'s `bytes` in place, without blocking, through the store: they are there once the
  /// Work has been waited for, and must live until then.
  Work broadcast_bytes_async(std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    return exchange_in_store("broadcast_bytes", {root}, bytes,
                             [&bytes](std::vector<std::string> got) { bytes = std::move(got[0]); });
  }

  /// Blocks until every rank has come, and the current streams of all have. Throws TimeoutError naming the
  /// missing ranks when the timeout expires.
  void barrier() { barrier_async().synchronize(); }
  /// The same without blocking: the Work is complete when every rank has come.
  Work barrier_async() {
    const Call call = token_.defined() ? group_->begin("barrier") : begin_on_host("barrier");
    if (!token_.defined())
      token_ = group_->guarded(call, [&] { return device().upload(at::zeros({1}, at::kInt)); });
    return run(call, {}, {}, {token_}, [this](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_changed([&](const at::Tensor& tensor) {
        return device().all_reduce(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(), 1,
                                   at::kInt, ReduceOp::max);
      });
    });
  }

  /// A group of some of this group's ranks, ascending. Every rank of this group calls it with the same list;
  /// those that are not in the list get nothing.
  [[nodiscard]] std::optional<BasicNcclComm> new_group(const std::vector<int>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      check_rank("new_group", ranks[i]);
      if (i > 0 && ranks[i] <= ranks[i - 1])
        throw CommunicationError("new_group: the ranks must ascend, and none may be named twice",
                                 world().rank());
    }
    const Call call = begin_on_host("new_group");
    std::string name = group_->next_child();
    if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) {
      group_->stay_out_of_split(call);
      return std::nullopt;
    }
    std::vector<int> global;
    for (int rank : ranks) global.push_back(group_->membership().ranks()[static_cast<std::size_t>(rank)]);
    return BasicNcclComm(std::make_shared<NcclGroup<D>>(*group_, call, std::move(global), std::move(name)));
  }

  /// Ends what is in flight, and every wait of the other ranks with a PeerError that gives `reason`; every
  /// later call here throws an error. Does not block.
  void abort(const std::string& reason) { group_->abort(reason); }

  /// Leaves the group in good order. What is in flight is completed first.
  void shutdown() { group_->shutdown(); }

 private:
  explicit BasicNcclComm(std::shared_ptr<NcclGroup<D>> group) : group_(std::move(group)) {}

  static std::vector<int> all_ranks(int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  static std::string next_name(const World& world, const NcclOptions& options) {
    return Membership::next_name(world, "nccl", checked(options).timeout);
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

  [[nodiscard]] const D& device() const { return group_->device(); }
  [[nodiscard]] NcclTensorCheck<D> check(const char* name) const { return {name, device(), world().rank()}; }
  void check_rank(const char* name, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(fmt::format("{}: there is no rank {} in a group of {}", name, rank, size()),
                               world().rank());
  }

  Call begin(const char* name, std::optional<ReduceOp> op, int root, const std::vector<at::Tensor>& list) {
    if (!group_->options().check_shapes || size() == 1) return group_->begin(name);
    const Call call = begin_on_host(name);
    const std::vector<std::string> all =
        NcclBytes<D>(group_, call).gather(signature(operation_text(name, op, root), list));
    for (const std::string& other : all)
      if (other != all[0])
        throw MismatchError(mismatch_text(call, all, group_->membership().ranks()), world().rank());
    return call;
  }
  // Of one in which the host takes part.
  Call begin_on_host(const char* name) {
    refuse_in_capture(*group_, name);
    return group_->begin(name);
  }
  Call begin_message(const char* name, const std::vector<at::Tensor>& list, int peer, int tag) {
    check(name).moves(list);
    check_rank(name, peer);
    if (peer == rank())
      throw CommunicationError(fmt::format("{}: rank {} cannot send to itself", name, peer), world().rank());
    if (tag != 0)
      throw CommunicationError(
          fmt::format("{}: NCCL knows no tags, and {} is one: use tag 0, or a new_group for each tag", name,
                      tag),
          world().rank());
    return group_->message(name, peer, tag);
  }

  template <class Issue>
  Work run(const Call& call, const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read,
           const std::vector<at::Tensor>& changed, Issue&& issue) {
    return start<D>(group_, call, written, read, changed, std::forward<Issue>(issue));
  }
  Work exchange_in_store(const char* name, std::vector<int> from, const std::string& own,
                         StoreExchange::Deliver deliver) {
    const Call call = begin_on_host(name);
    std::unique_ptr<StoreExchange> exchange;
    group_->at_store(call, [&] {
      exchange = std::make_unique<StoreExchange>(group_->membership(), call, std::move(from), own,
                                                 std::move(deliver));
    });
    return Work(group_, call, std::move(exchange));
  }

  std::shared_ptr<NcclGroup<D>> group_;
  at::Tensor token_;  // of barriers
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace lockstep::detail
