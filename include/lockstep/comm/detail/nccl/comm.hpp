#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/detail/bytes_header.hpp"
#include "lockstep/comm/detail/group_state.hpp"
#include "lockstep/comm/detail/nccl/calls.hpp"
#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/comm/detail/nccl/group.hpp"
#include "lockstep/comm/detail/nccl/work.hpp"
#include "lockstep/comm/detail/signature.hpp"
#include "lockstep/comm/options.hpp"
#include "lockstep/detail/const_data.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"

namespace lockstep::detail {

/// Moves host bytes through GPU memory. Blocks.
template <NcclDevice D>
class NcclBytes {
 public:
  NcclBytes(const NcclGroupPtr<D>& group, const Call& call) : group_(group), call_(call) {}

  /// Returns every rank's bytes, by rank.
  [[nodiscard]] std::vector<std::string> gather(const std::string& own) const {
    const int size = group_->state().size();
    const at::Tensor headers = gather_rows(BytesHeader::of(own.size(), call_.served));
    refuse_other_calls(headers, group_->state().ranks());
    const std::vector<std::int64_t> length = BytesHeader::lengths(headers);
    const std::int64_t longest = *std::max_element(length.begin(), length.end());
    std::vector<std::string> all(static_cast<std::size_t>(size));
    if (longest == 0) return all;
    const std::int64_t total = std::accumulate(length.begin(), length.end(), std::int64_t{0});
    if (longest * size <= std::max<std::int64_t>(2 * total, 1 << 16)) {
      const at::Tensor rows = gather_rows(bytes_of(own, longest));
      for (std::size_t r = 0; r < all.size(); ++r)
        all[r] = text_in(rows[static_cast<std::int64_t>(r)], length[r]);
      return all;
    }
    // Padding unequal lengths to the longest would multiply the traffic.
    for (std::size_t r = 0; r < all.size(); ++r)
      if (length[r] > 0) all[r] = send_from(own, length[r], static_cast<int>(r));
    return all;
  }

  /// Returns `root`'s bytes.
  [[nodiscard]] std::string broadcast(const std::string& own, int root) const {
    const at::Tensor own_header = BytesHeader::of(own.size(), call_.served);
    const at::Tensor header = broadcast(own_header, root);
    const std::vector<int>& ranks = group_->state().ranks();
    refuse_other_calls(at::stack({header, own_header}),
                       {ranks.at(static_cast<std::size_t>(root)), group_->state().world().rank()});
    const std::int64_t count = BytesHeader::lengths(header)[0];
    return count == 0 ? std::string() : send_from(own, count, root);
  }

 private:
  // Fails the group with a MismatchError if the headers name different public calls.
  void refuse_other_calls(const at::Tensor& headers, const std::vector<int>& ranks) const {
    if (const std::string calls = BytesHeader::different_calls(headers, ranks); !calls.empty())
      group_->state().fail(std::make_exception_ptr(MismatchError(calls, group_->state().world().rank())),
                           true);
  }
  // Converts bytes to a tensor [length], padded with zeros, and back.
  static at::Tensor bytes_of(const std::string& text, std::int64_t length) {
    auto tensor = at::zeros({length}, at::kByte);
    if (!text.empty()) std::memcpy(tensor.mutable_data_ptr(), text.data(), text.size());
    return tensor;
  }
  static std::string text_in(const at::Tensor& tensor, std::int64_t length) {
    return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::size_t>(length)};
  }

  [[nodiscard]] std::string send_from(const std::string& own, std::int64_t length, int root) const {
    const at::Tensor sent =
        group_->state().rank() == root ? bytes_of(own, length) : at::zeros({length}, at::kByte);
    return text_in(broadcast(sent, root), length);
  }
  [[nodiscard]] at::Tensor gather_rows(const at::Tensor& row) const {
    const at::Tensor rows = upload(at::empty({group_->state().size(), row.numel()}, row.options()));
    return arrive(start_all_gather<D>(group_, call_, {rows}, {upload(row)}), rows);
  }
  [[nodiscard]] at::Tensor broadcast(const at::Tensor& tensor, int root) const {
    const at::Tensor there = upload(tensor);
    return arrive(start_broadcast<D>(group_, call_, {there}, root), there);
  }
  [[nodiscard]] at::Tensor upload(const at::Tensor& tensor) const {
    return group_->guarded(call_, [&] { return group_->device().upload(tensor); });
  }
  [[nodiscard]] at::Tensor arrive(NcclWork<D> work, const at::Tensor& there) const {
    work.synchronize();  // has a timeout; the device's own synchronization does not
    work.wait();
    return group_->guarded(call_, [&] { return group_->device().download(there); });
  }

  const NcclGroupPtr<D>& group_;
  const Call& call_;
};

/// Collectives on GPU tensors over NCCL, on a stream of their own. NcclComm is the instance over the real
/// CUDA and NCCL; tests substitute another device `D`.
///
/// Every rank constructs its communicators in the same order, and calls the same collectives on each in the
/// same order. A collective is ordered after all prior work on the current stream. Its results are visible to
/// all work on the current stream after `wait()`. Neither blocks the host. Tensors may have any strides
/// (non-contiguous tensors are copied) and must have equal shapes and dtypes on all ranks;
/// NcclOptions::check_shapes turns a difference into a MismatchError on every rank. A list is one NCCL group,
/// without copies. Empty tensors and empty lists are allowed. Averages are NCCL's own: it multiplies each
/// rank's numbers by 1 / size before it adds them.
///
/// Each call throws CommunicationError inside a rank-zero scope or for a tensor that NCCL cannot handle, and
/// PeerError if another rank has failed. If a collective is not complete at its timeout, a watchdog aborts
/// it, and the next call or wait throws TimeoutError, which names the late ranks. The first such error is
/// sticky: later calls rethrow it. A destructor that runs during stack unwinding publishes the failure and
/// aborts; it never waits.
///
/// Thread safety: one thread at a time may launch collectives, since their order must match the other ranks'.
/// Other threads may wait for Works. Any thread may call abort().
template <NcclDevice D>
class BasicNcclComm {
 public:
  using Work = NcclWork<D>;
  /// A graph can capture the collectives, which are stream-ordered. See CapturedStep. Calls that wait for the
  /// other ranks on the host throw UsageError during a capture.
  static constexpr bool capturable = true;

  /// Joins the rendezvous of all ranks. Throws UsageError if this rank has no GPU or two ranks share one,
  /// TimeoutError, which names the missing ranks, PeerError if a rank has failed, and MismatchError if two
  /// ranks have different NCCL versions.
  explicit BasicNcclComm(const World& world, NcclOptions options = {})
      : group_([&] {
          const CallScope scope("the constructor of NcclComm");
          return std::make_shared<NcclGroup<D>>(
              world, all_ranks(world.size()), Membership::next_name(world, "nccl", checked(options).timeout),
              options);
        }()) {}

  BasicNcclComm(BasicNcclComm&&) noexcept = default;
  BasicNcclComm& operator=(BasicNcclComm&& other) noexcept {
    if (this == &other) return *this;
    leave_group(group_, exceptions_);
    group_ = std::move(other.group_);
    exceptions_ = other.exceptions_;
    return *this;
  }
  ~BasicNcclComm() { leave_group(group_, exceptions_); }

  [[nodiscard]] int rank() const { return group_->state().rank(); }
  [[nodiscard]] int size() const { return group_->state().size(); }
  /// Returns the rank in the world of `rank` in this group. Errors name ranks of the world.
  [[nodiscard]] int world_rank(int rank) const {
    return group_->state().ranks().at(static_cast<std::size_t>(rank));
  }
  [[nodiscard]] const World& world() const { return group_->state().world(); }
  /// Returns the device of the communicator's tensors: this rank's GPU.
  [[nodiscard]] at::Device tensor_device() const requires requires(const D& device) {
    device.tensor_device();
  }
  { return device().tensor_device(); }

  /// Throws the first error, if there is one. Never blocks.
  void check_error() { group_->state().check_error(); }

  /// Throws UsageError if the options make every call wait on the host, which a graph cannot capture.
  void check_capturable() const {
    if (group_->options().check_shapes)
      throw UsageError(
          "NcclOptions::check_shapes exchanges shapes on the host in each call, which a captured "
          "step cannot: leave it out",
          world().rank());
  }
  /// Runs `replay()`, which launches a graph with captured collectives of this communicator on the current
  /// stream. Collective: every rank calls it in the same order. Throws the first error instead of launching.
  /// The watchdog watches the replay under the timeout. The groups that new_group() has split from this
  /// communicator, and of which a graph holds collectives, are watched with it.
  template <class Replay>
  void watch_replay(Replay&& replay) {
    group_->watch_replay(std::forward<Replay>(replay));
  }

  /// Labels later collectives in errors, such as "bucket 2 of 5, with fc.weight", until the next call. Null
  /// removes the label.
  void label(Label label) { group_->label(std::move(label)); }

  /// Returns an uninitialized tensor [length] with the dtype and device of `like`, in the memory that
  /// NcclOptions::buffers selects. If one rank uses such a buffer in a collective, every rank must, at the
  /// same offset. The tensor may outlive the communicator; after an abort or shutdown() its memory is
  /// ordinary memory. Throws CommunicationError if that memory is exhausted.
  [[nodiscard]] at::Tensor empty_buffer(std::int64_t length, const at::Tensor& like) {
    return group_->empty_buffer(length, like);
  }

  /// Reduces `tensor` over the ranks, in place. ReduceOp::avg needs a floating dtype. For bool, `sum` is a
  /// logical or and `product` a logical and.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    return all_reduce(std::vector<at::Tensor>{tensor}, op);
  }
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    check("all_reduce").reduces(list, op);
    const Call call = begin("all_reduce", op, {}, list);
    return run(call, {}, {}, list, [this, op](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_changed([&](const at::Tensor& tensor) {
        const auto wire = reduced_as(tensor);
        return device().all_reduce(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(),
                                   wire.count, wire.type, reduced_by(tensor, op));
      });
    });
  }

  /// Reduces `tensor` over the ranks, in place on `root`. Its contents are unspecified on the other ranks.
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    return reduce(std::vector<at::Tensor>{tensor}, root, op);
  }
  Work reduce(const std::vector<at::Tensor>& list, int root = 0, ReduceOp op = ReduceOp::sum) {
    check("reduce").reduces(list, op);
    group_->state().check_rank("reduce", root);
    const Call call = begin("reduce", op, root, list);
    return run(call, {}, {}, list, [this, op, root](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_changed([&](const at::Tensor& tensor) {
        const auto wire = reduced_as(tensor);
        return device().reduce(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(), wire.count,
                               wire.type, reduced_by(tensor, op), root);
      });
    });
  }

  /// Broadcasts `root`'s `tensor`, in place. Any dtype.
  Work broadcast(const at::Tensor& tensor, int root = 0) {
    return broadcast(std::vector<at::Tensor>{tensor}, root);
  }
  Work broadcast(const std::vector<at::Tensor>& list, int root = 0) {
    check("broadcast").moves(list);
    group_->state().check_rank("broadcast", root);
    return start_broadcast<D>(group_, begin("broadcast", std::nullopt, root, list), list, root);
  }

  /// Gathers the `input` [...] of all ranks into `output` [size, ...], by rank. Any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    return all_gather(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input});
  }
  Work all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    check("all_gather").pairs(outputs, inputs, size());
    return start_all_gather<D>(group_, begin("all_gather", std::nullopt, {}, inputs), outputs, inputs);
  }

  /// Reduces the rows of every rank's `input` [size, ...]. Rank r receives row r in `output` [...].
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    return reduce_scatter(std::vector<at::Tensor>{output}, std::vector<at::Tensor>{input}, op);
  }
  Work reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      ReduceOp op = ReduceOp::sum) {
    check("reduce_scatter").reduces(inputs, op);
    check("reduce_scatter").pairs(inputs, outputs, size());
    const Call call = begin("reduce_scatter", op, {}, inputs);
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
            .refuse(detail::formatted("the input {} must have one row for each of {} ranks", describe(input),
                                      size()));
    const Call call = begin("all_to_all", std::nullopt, {}, inputs);
    return run(call, outputs, inputs, {}, [this](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_pair([&](const at::Tensor& output, const at::Tensor& input) {
        const auto wire = moved_as(input);
        const std::size_t count = wire.count / static_cast<std::size_t>(size());
        const std::size_t bytes = input.nbytes() / static_cast<std::size_t>(size());
        auto result = NcclResult::success;
        for (int peer = 0; peer < size() && no_error(result); ++peer) {
          const auto* from =
              static_cast<const char*>(input.const_data_ptr()) + static_cast<std::size_t>(peer) * bytes;
          auto* to = static_cast<char*>(output.mutable_data_ptr()) + static_cast<std::size_t>(peer) * bytes;
          result = device().send(comm, stream, from, count, wire.type, peer);
          if (no_error(result)) result = device().recv(comm, stream, to, count, wire.type, peer);
        }
        return result;
      });
    });
  }

  /// Sends `tensor` to the rank `peer`, which must call recv with the same shape and dtype. Messages share
  /// the stream and the order of the collectives. NCCL has no tags: the tag must be 0.
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

  /// Returns every rank's bytes, by rank, through GPU memory. Blocks.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    return NcclBytes<D>(group_, begin_on_host("all_gather_bytes")).gather(bytes);
  }
  /// Non-blocking all_gather_bytes() through the store. `all` holds the bytes once the Work has been waited
  /// for, and must live until then.
  Work all_gather_bytes_async(std::vector<std::string>& all, const std::string& bytes) {
    return exchange_in_store("all_gather_bytes", all_ranks(size()), bytes,
                             [&all](std::vector<std::string> got) { all = std::move(got); });
  }

  /// Returns `root`'s bytes, through GPU memory. Blocks.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    group_->state().check_rank("broadcast_bytes", root);
    return NcclBytes<D>(group_, begin_on_host("broadcast_bytes")).broadcast(bytes, root);
  }
  /// Broadcasts `root`'s `bytes` in place through the store, without blocking. `bytes` holds them once the
  /// Work has been waited for, and must live until then.
  Work broadcast_bytes_async(std::string& bytes, int root = 0) {
    group_->state().check_rank("broadcast_bytes", root);
    return exchange_in_store("broadcast_bytes", {root}, bytes,
                             [&bytes](std::vector<std::string> got) { bytes = std::move(got[0]); });
  }

  /// Blocks until every rank has called it and prior work on the current streams of all ranks has completed.
  /// Throws TimeoutError, which names the missing ranks, at the timeout.
  void barrier() { barrier_async().synchronize(); }
  /// Non-blocking barrier(): the Work completes once every rank has called it.
  Work barrier_async() {
    const Call call = token_.defined() ? group_->state().begin("barrier") : begin_on_host("barrier");
    if (!token_.defined())
      token_ = group_->guarded(call, [&] { return device().upload(at::zeros({1}, at::kInt)); });
    return run(call, {}, {}, {token_}, [this](auto comm, const auto& stream, const auto& operands) {
      return operands.for_each_changed([&](const at::Tensor& tensor) {
        return device().all_reduce(comm, stream, tensor.const_data_ptr(), tensor.mutable_data_ptr(), 1,
                                   at::kInt, ReduceOp::max);
      });
    });
  }

  /// Returns a group of some of this group's ranks, in ascending order, and std::nullopt on ranks outside the
  /// list. Every rank of this group calls it with the same list.
  [[nodiscard]] std::optional<BasicNcclComm> new_group(const std::vector<int>& ranks) {
    group_->state().check_subgroup(ranks);
    const Call call = begin_on_host("new_group");
    const CallScope scope("new_group");
    std::string name = group_->state().next_child();
    if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) {
      group_->stay_out_of_split(call);
      return std::nullopt;
    }
    auto child =
        std::make_shared<NcclGroup<D>>(*group_, call, group_->state().world_ranks(ranks), std::move(name));
    group_->add_child(child);
    return BasicNcclComm(std::move(child));
  }

  /// Aborts the collectives in flight and fails every later call. Every wait of another rank throws a
  /// PeerError with `reason`. Does not wait for another rank. Thread-safe.
  void abort(const std::string& reason) { group_->state().abort(reason); }

  /// Leaves the group after the collectives in flight have completed. Blocks. Throws TimeoutError when the
  /// timeout expires. A no-op after a failure.
  void shutdown() { group_->shutdown(); }

 private:
  explicit BasicNcclComm(std::shared_ptr<NcclGroup<D>> group) : group_(std::move(group)) {}

  [[nodiscard]] const D& device() const { return group_->device(); }
  [[nodiscard]] NcclTensorCheck<D> check(const char* name) const { return {name, device(), world().rank()}; }
  Call begin(const char* name, std::optional<ReduceOp> op, std::optional<int> root,
             const std::vector<at::Tensor>& list) {
    if (!group_->options().check_shapes || size() == 1) return group_->state().begin(name);
    const Call call = begin_on_host(name);
    const std::vector<std::string> all =
        NcclBytes<D>(group_, call).gather(signature(operation_text(name, op, root), list));
    for (const std::string& other : all)
      if (other != all[0])
        throw MismatchError(mismatch_text(call, all, group_->state().ranks()), world().rank());
    return call;
  }
  // Begins a call that needs the host.
  Call begin_on_host(const char* name) {
    refuse_in_capture(*group_, name);
    return group_->state().begin(name);
  }
  Call begin_message(const char* name, const std::vector<at::Tensor>& list, int peer, int tag) {
    check(name).moves(list);
    group_->state().check_peer(name, peer);
    if (tag != 0)
      throw CommunicationError(
          detail::formatted("{}: NCCL knows no tags, and {} is one: use tag 0, or a new_group for each tag",
                            name, tag),
          world().rank());
    return group_->state().message(name, peer, tag);
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
    group_->at_store(call, call.start + group_->timeout(), [&] {
      exchange = std::make_unique<StoreExchange>(group_->state().membership(), call, std::move(from), own,
                                                 std::move(deliver));
    });
    return Work(group_, call, std::move(exchange));
  }

  std::shared_ptr<NcclGroup<D>> group_;
  at::Tensor token_;  // the operand of barriers
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace lockstep::detail
