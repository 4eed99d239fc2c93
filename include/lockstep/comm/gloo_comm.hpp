#pragma once

#include <atomic>
#include <cstdint>
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
#include "lockstep/comm/tensor_lists.hpp"

namespace lockstep {

/// Collectives of CPU tensors over LibTorch's own Gloo.
///
/// Every rank constructs its communicators in the same order, and calls the same collectives on each in the
/// same order. Tensors may be of any stride (what is not contiguous travels as a copy) and must be equal in
/// shape and dtype over the ranks; Gloo ends the process where they are not, GlooOptions::check_shapes turns
/// that into a MismatchError on every rank.
///
/// Thread safety: one thread at a time may issue collectives, since their order must be that of the other
/// ranks. Works may be waited for on other threads, and abort() may be called from any.
class GlooComm {
 public:
  using Work = GlooWork;

  /// Meets the other ranks. Throws TimeoutError naming those that have not come when the deadline passes.
  explicit GlooComm(const World& world, GlooOptions options = {})
      : group_(std::make_shared<detail::GlooGroup>(world, all_ranks(world.size()), next_name(), options)) {}

  GlooComm(GlooComm&&) noexcept = default;
  GlooComm& operator=(GlooComm&&) noexcept = default;
  ~GlooComm() = default;

  [[nodiscard]] int rank() const { return group_->rank(); }
  [[nodiscard]] int size() const { return group_->size(); }
  [[nodiscard]] const World& world() const { return group_->world(); }

  /// Combines `tensor` over the ranks, in place on every one. `average` needs a floating dtype; on bool,
  /// `sum` is "any" and `product` "all".
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) {
    detail::check_tensor("all_reduce", tensor);
    detail::check_reducible("all_reduce", tensor, op);
    Work work = begin("all_reduce");
    if (tensor.numel() == 0) return work;
    if (tensor.is_contiguous())
      work.add(reduce_everywhere(tensor, op));
    else
      reduce_bundle(work, detail::TensorBundle{{tensor}, {}}, op);
    return work;
  }
  /// The same for a list of any dtypes: one buffer travels for each dtype.
  Work all_reduce(const std::vector<at::Tensor>& list, ReduceOp op = ReduceOp::sum) {
    for (const at::Tensor& tensor : list) {
      detail::check_tensor("all_reduce", tensor);
      detail::check_reducible("all_reduce", tensor, op);
    }
    Work work = begin("all_reduce");
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) reduce_bundle(work, std::move(bundle), op);
    return work;
  }

  /// Combines `tensor` over the ranks, in place on `root`; on the others it holds anything afterwards.
  Work reduce(const at::Tensor& tensor, int root = 0, ReduceOp op = ReduceOp::sum) {
    detail::check_tensor("reduce", tensor);
    detail::check_reducible("reduce", tensor, op);
    check_rank("reduce", root);
    Work work = begin("reduce");
    if (tensor.numel() == 0) return work;
    detail::TensorBundle bundle{{tensor}, {}};
    bundle.pack();
    c10d::ReduceOptions options;
    options.reduceOp = native(op, tensor);
    options.rootRank = root;
    std::vector<at::Tensor> tensors{bundle.buffer};
    auto part = pg().reduce(tensors, options);
    after(part, [bundle = std::move(bundle), divisor = op == ReduceOp::average ? size() : 1] {
      divide(bundle.buffer, divisor);
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
    Work work = begin("broadcast");
    for (detail::TensorBundle& bundle : detail::bundles_of(list)) {
      bundle.pack();
      c10d::BroadcastOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> tensors{detail::movable(bundle.buffer)};
      auto part = pg().broadcast(tensors, options);
      if (rank() != root && !bundle.in_place())
        after(part, [bundle = std::move(bundle)] { bundle.unpack(); });
      work.add(std::move(part));
    }
    return work;
  }

  /// Blocks until every rank has come.
  void barrier() {
    Work work = begin("barrier");
    work.add(pg().barrier());
    work.wait_host();
  }

  /// Every rank's bytes, by rank.
  [[nodiscard]] std::vector<std::string> all_gather_bytes(const std::string& bytes) {
    auto lengths = at::empty({size()}, at::kLong);
    auto length = at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong);
    all_gather(lengths, length).wait_host();
    std::vector<std::string> result(static_cast<std::size_t>(size()));
    for (int r = 0; r < size(); ++r) {
      std::string& item = result[static_cast<std::size_t>(r)];
      if (r == rank())
        item = bytes;
      else
        item.resize(static_cast<std::size_t>(lengths.data_ptr<std::int64_t>()[r]));
      if (!item.empty())
        broadcast(at::from_blob(item.data(), {static_cast<std::int64_t>(item.size())}, at::kByte), r)
            .wait_host();
    }
    return result;
  }
  /// `root`'s bytes.
  [[nodiscard]] std::string broadcast_bytes(const std::string& bytes, int root = 0) {
    auto length = at::full({1}, static_cast<std::int64_t>(bytes.size()), at::kLong);
    broadcast(length, root).wait_host();
    std::string result = rank() == root ? bytes : std::string();
    result.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
    if (!result.empty())
      broadcast(at::from_blob(result.data(), {static_cast<std::int64_t>(result.size())}, at::kByte), root)
          .wait_host();
    return result;
  }

  /// output: [size, ...], input: [...]; any dtype.
  Work all_gather(const at::Tensor& output, const at::Tensor& input) {
    detail::check_tensor("all_gather", output);
    detail::check_tensor("all_gather", input);
    Work work = begin("all_gather");
    auto flat = detail::movable(output.detach()).view({size(), -1});
    std::vector<std::vector<at::Tensor>> outputs{flat.unbind(0)};
    std::vector<at::Tensor> inputs{detail::movable(input.detach().contiguous()).view({-1})};
    work.add(pg().allgather(outputs, inputs));
    return work;
  }

  void abort(const std::string& reason) { group_->abort(reason); }
  void shutdown() { group_->shutdown(); }

 private:
  static std::vector<int> all_ranks(int size) {
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  static std::string next_name() {
    static std::atomic<int> count{0};
    return fmt::format("lockstep/comm/{}", count++);
  }

  [[nodiscard]] c10d::ProcessGroupGloo& pg() { return group_->process_group(); }
  Work begin(const char* name) { return Work(group_, group_->begin(name)); }

  void check_rank(const char* name, int rank) const {
    if (rank < 0 || rank >= size())
      throw CommunicationError(fmt::format("{}: there is no rank {} in a group of {}", name, rank, size()));
  }

  [[nodiscard]] static c10d::ReduceOp native(ReduceOp op, const at::Tensor& tensor) {
    switch (op) {
      case ReduceOp::sum:
        // One byte that holds 0 or 1 must not become 2.
        return tensor.scalar_type() == at::kBool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
      case ReduceOp::average:
        return c10d::ReduceOp::SUM;
      case ReduceOp::min:
        return c10d::ReduceOp::MIN;
      case ReduceOp::max:
        return c10d::ReduceOp::MAX;
      case ReduceOp::product:
        return c10d::ReduceOp::PRODUCT;
    }
    return c10d::ReduceOp::SUM;
  }

  static void divide(at::Tensor tensor, int divisor) {
    if (divisor == 1) return;
    at::NoGradGuard no_grad;
    tensor.detach().div_(divisor);
  }

  // Runs `finish` on Gloo's thread when the operation has succeeded, before it counts as complete: so that a
  // Work that nobody waits for is finished too.
  template <class Finish>
  static void after(const c10::intrusive_ptr<c10d::Work>& part, Finish finish) {
    part->getFuture()->addCallback([finish = std::move(finish)](c10::ivalue::Future& future) {
      if (!future.hasError()) finish();
    });
  }

  c10::intrusive_ptr<c10d::Work> reduce_everywhere(const at::Tensor& contiguous, ReduceOp op) {
    c10d::AllreduceOptions options;
    options.reduceOp = native(op, contiguous);
    std::vector<at::Tensor> tensors{contiguous};
    auto part = pg().allreduce(tensors, options);
    if (op == ReduceOp::average) after(part, [contiguous, divisor = size()] { divide(contiguous, divisor); });
    return part;
  }
  void reduce_bundle(Work& work, detail::TensorBundle bundle, ReduceOp op) {
    bundle.pack();
    auto part = reduce_everywhere(bundle.buffer, op);
    if (!bundle.in_place()) after(part, [bundle = std::move(bundle)] { bundle.unpack(); });
    work.add(std::move(part));
  }

  std::shared_ptr<detail::GlooGroup> group_;
};

}  // namespace lockstep
