#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"

namespace lockstep::detail {

/// What batch norm asks of a communicator, whatever its type.
struct StatisticsExchange {
  virtual ~StatisticsExchange() = default;
  [[nodiscard]] virtual int size() const = 0;
  /// Every rank's `row` [n] as [size, n], by rank.
  [[nodiscard]] virtual at::Tensor gather(const at::Tensor& row) = 0;
  /// Sums `values` over the ranks, in place.
  virtual void sum(const at::Tensor& values) = 0;
};

template <class Comm>
struct CommunicatorExchange final : StatisticsExchange {
  explicit CommunicatorExchange(Comm comm) : comm(std::move(comm)) {}
  [[nodiscard]] int size() const override { return comm.size(); }
  [[nodiscard]] at::Tensor gather(const at::Tensor& row) override {
    at::Tensor rows = at::empty({comm.size(), row.numel()}, row.options());
    comm.all_gather(rows, row).wait();
    return rows;
  }
  void sum(const at::Tensor& values) override { comm.all_reduce(values, ReduceOp::sum).wait(); }
  Comm comm;
};

class BatchNormGroup;

/// A communicator that batch norm can take its ranks from.
template <class C>
concept StatisticsCommunicator =
    (!std::same_as<C, BatchNormGroup>)&&Reducing<C>&& Gathering<C>&& Splittable<C>;

/// The ranks whose batches count as one for batch norm, and their communicator: one for all the modules of a
/// model. Copies share it; it goes with the last of them and of the modules that hold it.
///
/// The communicator is one of its own. DistributedDataParallel reduces its buckets during the same backward
/// in which batch norm sums its gradients, and a rank launches a bucket when its gradients are there: where a
/// parameter goes unused on one rank, that is later than on the others. On one communicator the all-reduce of
/// a bucket on one rank would then meet that of a batch norm on another. Among themselves the calls of batch
/// norm come in an order that the graph alone decides: forward's as the program calls the modules, backward's
/// as autograd does, which takes the node that was made last first. That is the same on every rank as long as
/// every rank calls the same modules in the same order, which is the contract. Backward's calls come from the
/// thread in which autograd runs the graph: on a CPU that which called backward, and never two at once.
class BatchNormGroup {
 public:
  /// No ranks yet: convert_sync_batchnorm gives them.
  BatchNormGroup() = default;

  /// All ranks of `comm`, over a sub-group made for this. Collective where there are several ranks.
  template <StatisticsCommunicator Comm>
  BatchNormGroup(Comm& comm) : size_(comm.size()) {  // NOLINT: a communicator may stand for its group
    if (size_ == 1) return;
    std::vector<int> ranks(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    exchange_ = std::make_shared<CommunicatorExchange<Comm>>(std::move(*comm.new_group(ranks)));
  }

  /// All ranks of `comm`, which is used for this alone from now on, such as `*comm.new_group({0, 2})`.
  template <StatisticsCommunicator Comm>
  BatchNormGroup(Comm&& comm) : size_(comm.size()) {  // NOLINT
    if (size_ > 1) exchange_ = std::make_shared<CommunicatorExchange<Comm>>(std::move(comm));
  }

  /// Ranks that meet in another way.
  explicit BatchNormGroup(std::shared_ptr<StatisticsExchange> exchange)
      : size_(exchange->size()), exchange_(std::move(exchange)) {}

  /// The number of ranks; 0 where none were given.
  [[nodiscard]] int size() const { return size_; }

  /// Null where there are no other ranks.
  [[nodiscard]] const std::shared_ptr<StatisticsExchange>& exchange() const { return exchange_; }

 private:
  int size_ = 0;
  std::shared_ptr<StatisticsExchange> exchange_;
};

}  // namespace lockstep::detail
