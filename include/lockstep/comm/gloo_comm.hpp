#pragma once

#include <atomic>
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
#include "lockstep/comm/gloo_options.hpp"
#include "lockstep/comm/gloo_work.hpp"
#include "lockstep/comm/shape_check.hpp"
#include "lockstep/comm/tensor_lists.hpp"

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
/// deadline passes. The first such error is sticky: later calls throw it again. What is destroyed by an
/// exception aborts, and never waits.
///
/// Thread safety: one thread at a time may issue collectives, since their order must be that of the other
/// ranks. Works may be waited for on other threads, and abort() may be called from any.
class GlooComm {
 public:
  using Work = GlooWork;

  /// Meets the other ranks. Throws TimeoutError naming those that have not come when the deadline passes.
  explicit GlooComm(const World& world, GlooOptions options = {})
      : GlooComm(std::make_shared<detail::GlooGroup>(world, all_ranks(world.size()), next_name(), options)) {}

  GlooComm(GlooComm&&) noexcept = default;
  GlooComm& operator=(GlooComm&& other) noexcept {
    if (this == &other) return *this;
    end();
    group_ = std::move(other.group_);
    exceptions_ = other.exceptions_;
    return *this;
  }
  ~GlooComm() { end(); }

  [[nodiscard]] int rank() const { return group_->rank(); }
  [[nodiscard]] int size() const { return group_->size(); }
  [[nodiscard]] const World& world() const { return group_->world(); }

  /// Combines `tensor` over the ranks, in place on every one. `average` needs a floating dtype; on bool,
  /// `sum` is "any" and `product` "all".
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    detail::check_reducible("all_reduce", tensor, op);
    Work work = begin("all_reduce", op, -1, tensor);
    if (tensor.numel() == 0) return work;
    if (tensor.is_contiguous())
      work.add(reduce_everywhere(tensor, op));
    else
      reduce_bundle(work, detail::TensorBundle{{tensor}, {}}, op);
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
    detail::check_reducible("reduce", tensor, op);
    check_rank("reduce", root);
    Work work = begin("reduce", op, root, tensor);
    if (tensor.numel() == 0) return work;
    detail::TensorBundle bundle{{tensor}, {}};
    bundle.pack();
    c10d::ReduceOptions options;
    options.reduceOp = detail::native(op, tensor.scalar_type());
    options.rootRank = root;
    std::vector<at::Tensor> tensors{bundle.buffer};
    auto part = gloo().reduce(tensors, options);
    if (rank() == root && (op == ReduceOp::average || !bundle.in_place()))
      after(part, [bundle = std::move(bundle), divisor = op == ReduceOp::average ? size() : 1] {
        detail::divide(bundle.buffer, divisor);
        bundle.unpack();
      });
    work.add(std::move(part));
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
      auto part = spread(detail::movable(bundle.buffer), root);
      if (rank() != root && !bundle.in_place())
        after(part, [bundle = std::move(bundle)] { bundle.unpack(); });
      work.add(std::move(part));
    }
    return work;
  }

  /// Gives every rank the `input` [...] of all: `output` [size, ...], by rank. Any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    check_rows("all_gather", output, input, size());
    Work work = begin("all_gather", std::nullopt, -1, input);
    if (input.numel() == 0) return work;
    detail::TensorBundle bundle = landing(output);
    work.add(
        with_landing(collect(detail::movable(bundle.buffer), detail::movable(input.contiguous())), bundle));
    return work;
  }

  /// Combines the rows of every rank's `input` [size, ...] and gives rank r row r: `output` [...].
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::sum) {
    detail::check_reducible("reduce_scatter", input, op);
    check_rows("reduce_scatter", input, output, size());
    Work work = begin("reduce_scatter", op, -1, input);
    if (input.numel() == 0) return work;
    // Gloo has none in all LibTorch versions: exchange the rows, then combine them here in the order of the
    // ranks.
    auto rows = at::empty({size(), output.numel()}, input.options().requires_grad(false));
    auto part = exchange(gloo(), rows, input.detach().contiguous().view({size(), -1}));
    after(part, [output, rows, op] { detail::combine_rows(output, rows, op); });
    work.add(std::move(part));
    return work;
  }

  /// Sends row r of `input` [size, ...] to rank r; row s of `output` [size, ...] comes from rank s. Any
  /// dtype.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input) {
    check_rows("all_to_all", output, input, 1);
    if (input.dim() == 0 || input.size(0) != size())
      throw CommunicationError(fmt::format("all_to_all: the input {} must have one row for each of {} ranks",
                                           detail::describe(input), size()));
    Work work = begin("all_to_all", std::nullopt, -1, input);
    if (input.numel() == 0) return work;
    detail::TensorBundle bundle = landing(output);
    auto part = exchange(gloo(), detail::movable(bundle.buffer).view({size(), -1}),
                         detail::movable(input.detach().contiguous()).view({size(), -1}));
    work.add(with_landing(std::move(part), bundle));
    return work;
  }

  /// Sends `tensor` to the rank `peer`, which must call recv with the same tag, shape and dtype. The Work is
  /// complete when the tensor may be changed again. A dropped Work is sent all the same, and kept until
  /// shutdown.
  Work send(const at::Tensor& tensor, int peer, int tag = 0) {
    return message("send", tensor.defined() ? tensor.detach().contiguous() : tensor, peer, tag);
  }
  /// Receives into `tensor`, which must be contiguous.
  Work recv(const at::Tensor& tensor, int peer, int tag = 0) { return message("recv", tensor, peer, tag); }

  /// Every rank's bytes, by rank. Blocks.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    const Call call = group_->begin("all_gather_bytes");
    const auto ranks = static_cast<std::size_t>(size());
    auto lengths = at::empty({size()}, at::kLong);
    complete(call, collect(lengths, at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong)));
    const auto* length = lengths.data_ptr<std::int64_t>();
    const std::int64_t total = std::accumulate(length, length + size(), std::int64_t{0});
    const std::int64_t longest = *std::max_element(length, length + size());
    std::vector<std::string> result(ranks);
    if (longest == 0) return result;
    if (longest * size() <= std::max<std::int64_t>(2 * total, 1 << 16)) {
      auto own = at::zeros({longest}, at::kByte);
      std::copy(bytes.begin(), bytes.end(), static_cast<char*>(own.data_ptr()));
      auto rows = at::empty({size(), longest}, at::kByte);
      complete(call, collect(rows, own));
      for (std::size_t r = 0; r < ranks; ++r)
        result[r].assign(static_cast<const char*>(rows[static_cast<std::int64_t>(r)].data_ptr()),
                         static_cast<std::size_t>(length[r]));
      return result;
    }
    // Lengths that differ much: padding all to the longest would multiply what travels.
    for (std::size_t r = 0; r < ranks; ++r) {
      result[r] =
          static_cast<int>(r) == rank() ? bytes : std::string(static_cast<std::size_t>(length[r]), '\0');
      if (!result[r].empty()) complete(call, spread(bytes_of(result[r]), static_cast<int>(r)));
    }
    return result;
  }

  /// `root`'s bytes. Blocks.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    check_rank("broadcast_bytes", root);
    const Call call = group_->begin("broadcast_bytes");
    auto length = at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong);
    complete(call, spread(length, root));
    std::string result = rank() == root ? bytes : std::string();
    result.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
    if (!result.empty()) complete(call, spread(bytes_of(result), root));
    return result;
  }

  /// Blocks until every rank has come. Throws TimeoutError naming the missing ranks when the deadline passes.
  void barrier() {
    const Call call = group_->begin("barrier");
    complete(call, gloo().barrier());
  }

  /// A group of some of this group's ranks, ascending. Every rank of this group calls it with the same list;
  /// those that are not in the list get nothing.
  [[nodiscard]] std::optional<GlooComm> sub_group(const std::vector<int>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      check_rank("sub_group", ranks[i]);
      if (i > 0 && ranks[i] <= ranks[i - 1])
        throw CommunicationError("sub_group: the ranks must ascend, and none may be named twice");
    }
    group_->begin("sub_group");
    std::string name = group_->next_child();
    if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) return std::nullopt;
    std::vector<int> global;
    for (int rank : ranks) global.push_back(group_->ranks()[static_cast<std::size_t>(rank)]);
    return GlooComm(
        std::make_shared<detail::GlooGroup>(world(), std::move(global), std::move(name), group_->options()));
  }

  /// Ends every wait of the other ranks with a PeerError that gives `reason`, and every later call here with
  /// an error. Does not block.
  void abort(const std::string& reason) { group_->abort(reason); }

  /// Leaves the group in good order. Works that are in flight are completed first.
  void shutdown() { group_->shutdown(); }

 private:
  using Call = detail::Call;
  using Part = c10::intrusive_ptr<c10d::Work>;

  explicit GlooComm(std::shared_ptr<detail::GlooGroup> group) : group_(std::move(group)) {}

  static std::vector<int> all_ranks(int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  static std::string next_name() {
    static std::atomic<int> count{0};
    return fmt::format("lockstep/comm/{}", count++);
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

  [[nodiscard]] c10d::ProcessGroupGloo& gloo() { return group_->process_group(); }

  template <class Tensors>
  Work begin(const char* name, std::optional<ReduceOp> op, int root, const Tensors& tensors) {
    const Call call = group_->begin(name);
    if (group_->options().check_shapes && size() > 1) {
      static constexpr const char* ops[] = {"sum", "average", "min", "max", "product"};
      std::string operation = name;
      if (op) operation += fmt::format(" of {}", ops[static_cast<int>(*op)]);
      if (root >= 0) operation += fmt::format(" with root {}", root);
      if constexpr (std::is_same_v<Tensors, at::Tensor>)
        detail::compare_over_ranks(*group_, call, detail::signature(operation, {tensors}));
      else
        detail::compare_over_ranks(*group_, call, detail::signature(operation, tensors));
    }
    return Work(group_, call);
  }

  void complete(const Call& call, const Part& part) {
    group_->await(call, *part, call.start + group_->deadline());
  }

  void check_rank(const char* name, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(fmt::format("{}: there is no rank {} in a group of {}", name, rank, size()));
  }
  static void check_rows(const char* name, const at::Tensor& whole, const at::Tensor& row, int rows) {
    detail::check_tensor(name, whole);
    detail::check_tensor(name, row);
    if (whole.scalar_type() != row.scalar_type() || whole.numel() != rows * row.numel())
      throw CommunicationError(fmt::format("{}: {} is not {} times {}", name, detail::describe(whole), rows,
                                           detail::describe(row)));
  }

  Work message(const char* name, const at::Tensor& tensor, int peer, int tag) {
    detail::check_tensor(name, tensor);
    check_rank(name, peer);
    if (peer == rank())
      throw CommunicationError(fmt::format("{}: rank {} cannot send to itself", name, peer));
    if (tag < 0) throw CommunicationError(fmt::format("{}: the tag {} is negative", name, tag));
    if (!tensor.is_contiguous())
      throw CommunicationError(
          fmt::format("{}: {} is not contiguous: receive into a contiguous tensor and copy it", name,
                      detail::describe(tensor)));
    Work work(group_, group_->message(name, peer, tag));
    if (tensor.numel() == 0) return work;
    std::vector<at::Tensor> tensors{tensor.detach()};
    const detail::SigpipeGuard guard;
    work.add(name[0] == 's' ? gloo().send(tensors, peer, tag) : gloo().recv(tensors, peer, tag));
    return work;
  }

  static at::Tensor bytes_of(std::string& bytes) {
    return at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
  }

  // Where a result arrives: in `output` itself if it is contiguous, else in a buffer that is copied there.
  static detail::TensorBundle landing(const at::Tensor& output) {
    detail::TensorBundle bundle{{output}, output};
    if (!output.is_contiguous())
      bundle.buffer = at::empty(output.sizes(), output.options().requires_grad(false));
    return bundle;
  }
  static Part with_landing(Part part, const detail::TensorBundle& bundle) {
    if (!bundle.in_place())
      after(part, [output = bundle.tensors[0], buffer = bundle.buffer]() mutable {
        at::NoGradGuard no_grad;
        output.detach().copy_(buffer);
      });
    return part;
  }

  // Runs `finish` on Gloo's thread when the operation has succeeded, before it counts as complete: so a Work
  // that nobody waits for is finished too.
  template <class Finish>
  static void after(const Part& part, Finish finish) {
    part->getFuture()->addCallback([finish = std::move(finish)](c10::ivalue::Future& future) mutable {
      if (!future.hasError()) finish();
    });
  }

  Part reduce_everywhere(const at::Tensor& contiguous, ReduceOp op) {
    c10d::AllreduceOptions options;
    options.reduceOp = detail::native(op, contiguous.scalar_type());
    std::vector<at::Tensor> tensors{contiguous};
    auto part = gloo().allreduce(tensors, options);
    if (op == ReduceOp::average)
      after(part, [contiguous, divisor = size()] { detail::divide(contiguous, divisor); });
    return part;
  }
  void reduce_bundle(Work& work, detail::TensorBundle bundle, ReduceOp op) {
    bundle.pack();
    auto part = reduce_everywhere(bundle.buffer, op);
    if (!bundle.in_place()) after(part, [bundle = std::move(bundle)] { bundle.unpack(); });
    work.add(std::move(part));
  }
  Part spread(const at::Tensor& contiguous, int root) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{contiguous};
    return gloo().broadcast(tensors, options);
  }
  Part collect(const at::Tensor& rows, const at::Tensor& row) {
    std::vector<std::vector<at::Tensor>> outputs{rows.detach().view({size(), -1}).unbind(0)};
    std::vector<at::Tensor> inputs{row.detach().view({-1})};
    return gloo().allgather(outputs, inputs);
  }
  // LibTorch has renamed alltoall_base.
  template <class Gloo>
  static Part exchange(Gloo& gloo, at::Tensor rows, at::Tensor input) {
    std::vector<std::int64_t> even;
    if constexpr (requires { gloo.all_to_all_single(rows, input, even, even); })
      return gloo.all_to_all_single(rows, input, even, even);
    else
      return gloo.alltoall_base(rows, input, even, even);
  }

  std::shared_ptr<detail::GlooGroup> group_;
  int exceptions_ = std::uncaught_exceptions();
};

static_assert(Reducing<GlooComm> && Gathering<GlooComm> && PointToPoint<GlooComm> && Splittable<GlooComm>);

}  // namespace lockstep
