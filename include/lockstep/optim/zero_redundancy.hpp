#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "lockstep/comm/agreement.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/detail/broadcast_list.hpp"
#include "lockstep/grad/model.hpp"
#include "lockstep/optim/detail/optimizer_maker.hpp"
#include "lockstep/optim/detail/sharded_state.hpp"
#include "lockstep/precision/precision.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

using Shard = std::vector<std::vector<at::Tensor>>;  // by group

/// Partitions the parameters over the ranks as Python's ZeroRedundancyOptimizer does: group by group, largest
/// first, each to the rank with the fewest elements so far.
inline std::vector<Shard> partition_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                               int ranks) {
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

template <class Made>
inline constexpr bool is_sharded = std::derived_from<Made, ShardedState>;
template <class Made>
inline constexpr bool is_sharded<std::unique_ptr<Made>> = std::derived_from<Made, ShardedState>;

}  // namespace detail

/// Shards the state of an optimizer over the ranks (ZeRO stage 1). Each rank keeps the state of its shard of
/// the parameters and steps them; then each rank sends its shard to the others by one coalesced broadcast.
/// Parameters are bitwise equal to those of the unsharded inner optimizer.
///
/// It is a torch::optim::Optimizer with all parameter groups; zero_grad, learning rates and options work
/// unchanged. Gradients must be equal on all ranks, as they are after `ddp.backward`. The constructor, `step`
/// and `consolidate` are collective. `comm` must outlive the object.
///
/// Counterpart: torch.distributed.optim.ZeroRedundancyOptimizer.
template <class Comm>
class ZeroRedundancyOptimizer : public torch::optim::Optimizer,
                                public ScaledStep,
                                public detail::ShardedState {
  static_assert(Communicator<Comm>,
                "lockstep: the communicator of ZeroRedundancyOptimizer is a type that models "
                "lockstep::Communicator, such as lockstep::CpuComm");

 public:
  /// `make(parameters)` returns the inner optimizer with any groups, or a unique_ptr to one. Collective. Throws
  /// MismatchError if the ranks' parameters differ in more than their values, UsageError if one has gaps.
  template <class Make>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, Comm& comm, Make&& make)
      : ZeroRedundancyOptimizer(made(make, std::move(parameters)), comm) {}

  at::Tensor step(LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode with_gradients(true);
      loss = closure();
    }
    step_own([&] { inner_->step(); });
    return loss;
  }

  [[nodiscard]] bool takes_scale() override {
    auto* inside = dynamic_cast<ScaledStep*>(inner_.get());
    if (inside == nullptr) return false;
    const detail::LentGroups lent(param_groups_, inner_->param_groups(), nullptr);
    return inside->takes_scale();
  }
  /// Steps with a GradScaler's scale. All ranks take the same decision without communicating, since the
  /// scaler checks all gradients.
  void step_scaled(const StepScale& scale) override {
    auto* inside = dynamic_cast<ScaledStep*>(inner_.get());
    if (inside == nullptr)
      throw UsageError(
          "ZeroRedundancyOptimizer: the optimizer inside takes no scale: unscale the gradients first");
    step_own([&] { inside->step_scaled(scale); });
  }

  /// Gathers all states on rank `to`, which may then call `save`. The next step discards the gathered states.
  /// Collective.
  /// Counterpart: consolidate_state_dict.
  void consolidate(int to = 0) override {
    const detail::CallScope scope("ZeroRedundancyOptimizer::consolidate");
    forget_gathered();
    for (int rank = 0; rank < comm_.size(); ++rank) {
      if (rank == to) continue;
      const std::string bytes =
          comm_.broadcast_bytes(rank == comm_.rank() ? own_bytes() : std::string(), rank);
      if (comm_.rank() != to) continue;
      load_shard(rank, bytes);
    }
    move_foreign_states(gathered_);
    consolidated_ = comm_.rank() == to;
  }

  /// Writes the archive that the unsharded inner optimizer would write. Not collective. Throws
  /// CheckpointError unless `consolidate` has gathered the states on this rank since the last step.
  void save(torch::serialize::OutputArchive& archive) const override {
    read_full_state([&](torch::optim::Optimizer& whole) { whole.save(archive); });
  }
  void read_full_state(const Access& read) const override {
    if (!consolidated_)
      throw CheckpointError(
          "ZeroRedundancyOptimizer: the state is spread over the ranks: call consolidate(rank) on every rank "
          "after the last step, and save on that rank");
    std::vector<torch::optim::OptimizerParamGroup> all(param_groups_);
    inner_->param_groups().swap(all);
    for (auto& [parameter, state] : gathered_) inner_->state()[parameter] = std::move(state);
    const auto put_back = [&] {
      inner_->param_groups().swap(all);
      gathered_.clear();
      move_foreign_states(gathered_);
    };
    try {
      read(*inner_);
    } catch (...) {
      put_back();
      throw;
    }
    put_back();
  }

  /// Reads an archive of `save` at any number of ranks, or of the unsharded inner optimizer, on every rank.
  void load(torch::serialize::InputArchive& archive) override {
    write_full_state([&](torch::optim::Optimizer& whole) { whole.load(archive); });
  }
  void write_full_state(const Access& write) override {
    forget_gathered();
    {
      const detail::LentGroups lent(param_groups_, inner_->param_groups(), nullptr);
      write(*inner_);
    }
    States dropped;
    move_foreign_states(dropped);
  }

  std::function<void()> snapshot() override {
    return [this, bytes = own_bytes()] {
      States dropped;
      move_foreign_states(dropped);
      load_shard(comm_.rank(), bytes, /*replaces=*/true);
    };
  }

  /// Returns the inner optimizer. Between steps it has no groups and only the states of this rank's shard.
  [[nodiscard]] torch::optim::Optimizer& inner() { return *inner_; }

 private:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  template <class Make>
  static std::unique_ptr<torch::optim::Optimizer> made(Make& make, std::vector<at::Tensor> parameters) {
    constexpr bool makes = detail::OptimizerMaker<Make>;
    static_assert(makes,
                  "lockstep: the third argument of ZeroRedundancyOptimizer is a function of the parameters "
                  "that returns an optimizer, or a std::unique_ptr to one");
    static_assert(!detail::is_sharded<detail::MadeByOf<Make&>>,
                  "lockstep: the optimizer inside a ZeroRedundancyOptimizer is on one rank each and must not "
                  "meet the others, as another ZeroRedundancyOptimizer would");
    if constexpr (makes)
      return detail::make_optimizer_by(make, std::move(parameters));
    else
      return nullptr;
  }

  ZeroRedundancyOptimizer(std::unique_ptr<torch::optim::Optimizer> inner, Comm& comm)
      : Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, inner->defaults().clone()),
        comm_(comm),
        inner_(std::move(inner)) {
    param_groups_.swap(inner_->param_groups());
    std::vector<NamedTensor> named;
    for (std::size_t g = 0; g < param_groups_.size(); ++g)
      for (const at::Tensor& parameter : param_groups_[g].params()) {
        named.push_back({detail::formatted("{} of group {}", named.size(), g), parameter});
        if (!parameter.is_non_overlapping_and_dense())
          throw UsageError(detail::formatted(
              "ZeroRedundancyOptimizer: parameter {} has gaps in its memory: make it contiguous",
              named.back().name));
      }
    const detail::CallScope scope("the constructor of ZeroRedundancyOptimizer");
    check_same_model(comm_, named, {});
    shards_ = detail::partition_parameters(param_groups_, comm_.size());
    for (const auto& group : own())
      for (const at::Tensor& parameter : group) own_keys_.insert(parameter.unsafeGetTensorImpl());
    // Some optimizers create states in their constructor.
    States dropped;
    move_foreign_states(dropped);
  }

  template <class Step>
  void step_own(Step&& step_inside) {
    if (param_groups_.size() != own().size())
      throw UsageError(
          "ZeroRedundancyOptimizer: a group was added after construction: make it with all of its groups");
    forget_gathered();
    {
      const detail::LentGroups lent(param_groups_, inner_->param_groups(), &own());
      // The other ranks wait for this rank's parameters, even if another communicator failed.
      try {
        step_inside();
      } catch (...) {
        detail::abort_for_others(comm_, "the step of the optimizer inside a ZeroRedundancyOptimizer threw: ");
        throw;
      }
    }
    broadcast_shards();
  }

  [[nodiscard]] detail::Shard& own() { return shards_[static_cast<std::size_t>(comm_.rank())]; }

  std::string own_bytes() {
    const detail::LentGroups lent(param_groups_, inner_->param_groups(), &own());
    torch::serialize::OutputArchive archive;
    inner_->save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    return stream.str();
  }

  // `replaces`: an archive that has all states of the shard replaces those that the shard has.
  void load_shard(int rank, const std::string& bytes, bool replaces = false) {
    std::istringstream stream(bytes);
    torch::serialize::InputArchive archive, states;
    archive.load_from(stream);
    if (replaces && archive.try_read("state", states)) inner_->state().clear();
    const detail::LentGroups lent(param_groups_, inner_->param_groups(),
                                  &shards_[static_cast<std::size_t>(rank)]);
    inner_->load(archive);
  }

  void move_foreign_states(States& to) const {
    auto& states = inner_->state();
    std::vector<void*> foreign;
    for (const auto& item : states)
      if (!own_keys_.contains(item.first)) foreign.push_back(item.first);
    for (void* key : foreign) {
      to[key] = std::move(states[key]);
      states.erase(key);
    }
  }

  void forget_gathered() {
    gathered_.clear();
    consolidated_ = false;
  }

  void broadcast_shards() {
    if (comm_.size() == 1) return;
    const detail::CallScope scope("ZeroRedundancyOptimizer::step");
    const at::NoGradGuard no_grad;
    refresh_flats();
    std::vector<typename Comm::Work> works;
    works.reserve(flats_.size());
    for (std::size_t rank = 0; rank < flats_.size(); ++rank)
      works.push_back(comm_.broadcast(flats_[rank], static_cast<int>(rank)));
    for (auto& work : works) work.wait();
    for (std::size_t rank = 0; rank < shards_.size(); ++rank)
      if (static_cast<int>(rank) != comm_.rank())
        for (const auto& group : shards_[rank])
          for (const at::Tensor& parameter : group)
            if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
  }

  void refresh_flats() {
    flats_.resize(shards_.size());
    for (std::size_t rank = 0; rank < shards_.size(); ++rank) {
      std::size_t i = 0;
      for (const auto& group : shards_[rank])
        for (const at::Tensor& parameter : group) {
          if (i == flats_[rank].size()) flats_[rank].emplace_back();
          at::Tensor& flat = flats_[rank][i++];
          if (!flat.defined() || flat.const_data_ptr() != parameter.const_data_ptr() ||
              flat.nbytes() != parameter.nbytes())
            flat = detail::bytes_alias(parameter);
        }
    }
  }

  Comm& comm_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::vector<detail::Shard> shards_;  // indexed by rank
  std::unordered_set<const void*> own_keys_;
  std::vector<std::vector<at::Tensor>> flats_;  // indexed by rank
  mutable States gathered_;                     // of the other ranks, after consolidate
  bool consolidated_ = false;
};

template <class Comm, class Make>
ZeroRedundancyOptimizer(std::vector<at::Tensor>, Comm&, Make&&) -> ZeroRedundancyOptimizer<Comm>;

}  // namespace lockstep::inline v0_1
