#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// The parameters of one rank, by group.
using Shard = std::vector<std::vector<at::Tensor>>;

/// Partitions the parameters over the ranks as Python's ZeroRedundancyOptimizer does: group by group, largest
/// first, each to the rank with the fewest elements so far.
inline std::vector<Shard> deal_out(const std::vector<torch::optim::OptimizerParamGroup>& groups, int ranks) {
  std::vector<Shard> shards(static_cast<std::size_t>(ranks), Shard(groups.size()));
  std::vector<std::int64_t> elements(shards.size(), 0);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::vector<at::Tensor> sorted = groups[g].params();
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const at::Tensor& a, const at::Tensor& b) { return a.numel() > b.numel(); });
    for (at::Tensor& parameter : sorted) {
      const auto least = std::min_element(elements.begin(), elements.end());
      *least += parameter.numel();
      shards[static_cast<std::size_t>(least - elements.begin())][g].push_back(std::move(parameter));
    }
  }
  return shards;
}

/// Lends the groups of `owner` to `borrower` in a scope, with the parameters of `shard` instead of all, or
/// with all if `shard` is null. Swaps the groups, so options are never copied and cannot diverge.
class LentGroups {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  LentGroups(Groups& owner, Groups& borrower, Shard* shard)
      : owner_(owner), borrower_(borrower), shard_(shard) {
    owner_.swap(borrower_);
    swap_parameters();
  }
  LentGroups(const LentGroups&) = delete;
  LentGroups& operator=(const LentGroups&) = delete;
  ~LentGroups() {
    swap_parameters();
    owner_.swap(borrower_);
  }

 private:
  void swap_parameters() {
    if (shard_)
      for (std::size_t g = 0; g < shard_->size(); ++g) borrower_[g].params().swap((*shard_)[g]);
  }

  Groups& owner_;
  Groups& borrower_;
  Shard* shard_;
};

}  // namespace lockstep::detail
