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

/// The collectives of batch norm, independent of the communicator's type.
struct StatisticsExchange {
  virtual ~StatisticsExchange() = default;
  [[nodiscard]] virtual int size() const = 0;
  /// Returns every rank's `row` [n] as [size, n], by rank.
  [[nodiscard]] virtual at::Tensor gather(const at::Tensor& row) = 0;
  /// Sums `values` over the ranks, in place.
  virtual void sum(const at::Tensor& values) = 0;
};

/// Runs the collectives of batch norm on a communicator that it owns. Stream-ordered.
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

/// A communicator from which batch norm can create its group.
template <class C>
concept StatisticsCommunicator =
    (!std::same_as<C, BatchNormGroup>)&&Reducing<C>&& Gathering<C>&& Splittable<C>;

/// The ranks whose batches form one joined batch for batch norm, and their communicator, which all modules of
/// a model share. Copies share the communicator; it is destroyed with the last copy and the last module that
/// holds it.
///
/// The group has a communicator of its own. DistributedDataParallel reduces its buckets during the same
/// backward in which batch norm sums its gradients, and a rank launches a bucket when its gradients are
/// ready: later than other ranks, if a parameter is unused on that rank. On a shared communicator, the
/// all-reduce of a bucket on one rank would then pair with that of a batch norm on another. The graph alone
/// determines the order of batch norm's own collectives: in forward the order in which the program calls the
/// modules, in backward the order of autograd, which runs the node that was created last first. Both are
/// equal on every rank if every rank calls the same modules in the same order; this is required. The
/// collectives of backward are launched by the thread in which autograd runs the graph (on a CPU, the thread
/// that called backward), and never concurrently.
class BatchNormGroup {
 public:
  /// Constructs a group without ranks, which convert_sync_batchnorm replaces.
  BatchNormGroup() = default;

  /// Constructs a group of all ranks of `comm`, with a sub-group created for it. Collective if there are
  /// several ranks.
  template <StatisticsCommunicator Comm>
  BatchNormGroup(Comm& comm) : size_(comm.size()) {  // NOLINT: a communicator may stand for its group
    if (size_ == 1) return;
    std::vector<int> ranks(static_cast<std::size_t>(size_));
    std::iota(ranks.begin(), ranks.end(), 0);
    exchange_ = std::make_shared<CommunicatorExchange<Comm>>(std::move(*comm.new_group(ranks)));
  }

  /// Constructs a group of all ranks of `comm`, such as `*comm.new_group({0, 2})`, and takes ownership of it.
  template <StatisticsCommunicator Comm>
  BatchNormGroup(Comm&& comm) : size_(comm.size()) {  // NOLINT
    if (size_ > 1) exchange_ = std::make_shared<CommunicatorExchange<Comm>>(std::move(comm));
  }

  /// Constructs a group with a custom exchange.
  explicit BatchNormGroup(std::shared_ptr<StatisticsExchange> exchange)
      : size_(exchange->size()), exchange_(std::move(exchange)) {}

  /// Returns the number of ranks; 0 for a default-constructed group.
  [[nodiscard]] int size() const { return size_; }

  /// Returns the exchange; null if there are no other ranks.
  [[nodiscard]] const std::shared_ptr<StatisticsExchange>& exchange() const { return exchange_; }

 private:
  int size_ = 0;
  std::shared_ptr<StatisticsExchange> exchange_;
};

}  // namespace lockstep::detail
