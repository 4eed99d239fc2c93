#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "lockstep/comm/detail/nccl/device.hpp"

namespace lockstep_test {

using lockstep::ReduceOp;
using lockstep::detail::NcclResult;

struct FakeClique;

/// A rank's communicator.
struct FakeRank {
  FakeClique* clique = nullptr;
  int index = 0;          // in the clique
  int machine_rank = -1;  // whose GPU
  int actor = -1;         // its stream in the log, once it has used one
  bool gone = false;
  const char* gone_by = "";
  int delay = 0;                           // polls until what was issued is in the stream
  std::function<void()> launch;            // puts it there
  std::function<void()> job;               // of a split that goes on: puts the child where it belongs
  int outstanding = 0;                     // groups in streams that have not ended
  NcclResult error = NcclResult::success;  // that nobody asked for
  std::string words;
  std::uint64_t collectives = 0;
  std::map<int, std::uint64_t> sends, receives;  // by peer
  int splits = 0;
  bool splitting = false;
  bool finalized = false;

  [[nodiscard]] bool works() const { return !gone && error == NcclResult::success; }
};

/// One call of NCCL's inside a group.
struct FakePart {
  enum class Kind { all_reduce, reduce, reduce_scatter, broadcast, all_gather, send, recv };
  Kind kind;
  FakeRank* rank;
  const void* from = nullptr;
  void* to = nullptr;
  std::size_t bytes_read = 0, bytes_written = 0;
  std::size_t count = 0;
  at::ScalarType type = at::kByte;
  ReduceOp op = ReduceOp::sum;
  int other = -1;  // root or peer
  bool done = false;

  [[nodiscard]] std::string text() const {
    static constexpr const char* names[] = {
        "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "send", "recv"};
    return fmt::format("{} of {} {}{}", names[static_cast<int>(kind)], count, c10::toString(type),
                       other >= 0 ? fmt::format(" with rank {}", other) : "");
  }
  [[nodiscard]] bool message() const { return kind == Kind::send || kind == Kind::recv; }
  [[nodiscard]] bool agrees(const FakePart& part) const {
    return kind == part.kind && count == part.count && type == part.type && op == part.op &&
           other == part.other;
  }
};

/// What a rank issued between group_start and group_end: it is one thing, that ends when all of it has.
struct FakeGroupCall : std::enable_shared_from_this<FakeGroupCall> {
  std::vector<FakePart> parts;
  bool entered = false;

  [[nodiscard]] std::string text() const {
    return parts.empty() ? "nothing" : fmt::format("a group with {}", parts[0].text());
  }
  /// The same, to be done once more.
  [[nodiscard]] std::shared_ptr<FakeGroupCall> again() const {
    auto call = std::make_shared<FakeGroupCall>();
    call->parts = parts;
    for (FakePart& part : call->parts) part.done = false;
    return call;
  }
};

/// A part, which lives as long as anybody may look at it.
using PartPtr = std::shared_ptr<FakePart>;

/// The ranks that one communicator joins, and how far they are with each other.
struct FakeClique {
  int size = 0;
  std::vector<FakeRank*> ranks;                               // by index; null: has not come
  std::map<std::uint64_t, std::vector<PartPtr>> collectives;  // by number: the ranks' parts
  std::map<std::pair<int, int>, std::map<std::uint64_t, std::pair<PartPtr, PartPtr>>> messages;
  std::map<int, std::map<int, std::pair<int, FakeRank*>>> splits;  // by number, index: colour and child

  [[nodiscard]] bool complete() const {
    for (const FakeRank* rank : ranks)
      if (!rank) return false;
    return true;
  }
};

/// The communicators of a machine, and the reductions that they do.
class FakeCliques {
 public:
  explicit FakeCliques(std::function<void(const std::string&)> complain) : complain_(std::move(complain)) {}

  FakeRank* join(const std::string& id, int size, int index, int machine_rank) {
    FakeClique& clique = cliques_[id];
    clique.size = size;
    clique.ranks.resize(static_cast<std::size_t>(size));
    FakeRank* rank = new_rank(machine_rank);
    rank->clique = &clique;
    rank->index = index;
    clique.ranks[static_cast<std::size_t>(index)] = rank;
    return rank;
  }

  /// The child is put where `made` points to by a job of NCCL's, when somebody next asks for the state, or
  /// aborts.
  void split(FakeRank* parent, int colour, int machine_rank, FakeRank** made) {
    if (parent->outstanding > 0) complain_("a communicator is split while collectives are outstanding");
    if (parent->launch) complain_("a communicator was split while another call was in progress");
    const int number = parent->splits++;
    FakeRank* child = colour < 0 ? nullptr : new_rank(machine_rank);
    auto& votes = parent->clique->splits[number];
    votes[parent->index] = {colour, child};
    parent->splitting = true;
    parent->delay = 1;
    parent->job = [made, child] { *made = child; };
    parent->launch = [parent] { std::exchange(parent->job, nullptr)(); };
    if (static_cast<int>(votes.size()) < parent->clique->size) return;
    for (const auto& [index, vote] : votes) {
      if (vote.first < 0) continue;
      FakeClique& clique =
          cliques_[fmt::format("{}/{}/{}", static_cast<void*>(parent->clique), number, vote.first)];
      vote.second->clique = &clique;
      vote.second->index = clique.size++;
      clique.ranks.push_back(vote.second);
    }
  }

  NcclResult state(FakeRank* rank) {
    if (rank->gone) return misuse(rank, "asked for its state");
    if (rank->error != NcclResult::success) return rank->error;
    if (!rank->clique || !rank->clique->complete()) return NcclResult::in_progress;
    if (rank->splitting &&
        static_cast<int>(rank->clique->splits[rank->splits - 1].size()) < rank->clique->size)
      return NcclResult::in_progress;
    rank->splitting = false;
    if (rank->launch && --rank->delay > 0) return NcclResult::in_progress;
    if (rank->launch) std::exchange(rank->launch, nullptr)();
    return NcclResult::success;
  }

  NcclResult misuse(FakeRank* rank, const std::string& how) {
    complain_(
        fmt::format("the communicator of rank {} was {} after {}", rank->machine_rank, how, rank->gone_by));
    return NcclResult::invalid_usage;
  }

  /// Whether the group is done, after what can be done of it now.
  bool advance(FakeGroupCall& group) {
    if (!std::exchange(group.entered, true))
      for (FakePart& part : group.parts) enter(PartPtr(group.shared_from_this(), &part));
    bool all = true;
    for (FakePart& part : group.parts) {
      if (part.rank->gone) part.done = true;  // aborted: it ends, whatever its memory holds then
      all = all && part.done;
    }
    if (all)
      for (FakeRank* rank : ranks_of(group)) --rank->outstanding;
    return all;
  }
  /// Those that take part here, each once.
  static std::set<FakeRank*> ranks_of(const FakeGroupCall& group) {
    std::set<FakeRank*> ranks;
    for (const FakePart& part : group.parts) ranks.insert(part.rank);
    return ranks;
  }
  /// How many communicators nobody has destroyed or aborted.
  [[nodiscard]] int left() const {
    int count = 0;
    for (const auto& rank : ranks_) count += rank->gone ? 0 : 1;
    return count;
  }

  /// Nothing happens any more.
  void end_all() {
    for (auto& rank : ranks_) {
      rank->gone = true;
      rank->gone_by = "the end of the machine";
    }
  }

  template <class Use>
  void for_each_of(int machine_rank, Use&& use) {
    for (auto& rank : ranks_)
      if (rank->machine_rank == machine_rank) use(*rank);
  }

 private:
  FakeRank* new_rank(int machine_rank) {
    ranks_.push_back(std::make_unique<FakeRank>());
    ranks_.back()->machine_rank = machine_rank;
    return ranks_.back().get();
  }

  void enter(const PartPtr& part) {
    if (!part->rank->works()) return;
    FakeClique& clique = *part->rank->clique;
    if (part->message()) {
      const bool sends = part->kind == FakePart::Kind::send;
      const int own = part->rank->index, other = part->other;
      const auto way = sends ? std::pair(own, other) : std::pair(other, own);
      const auto number = sends ? part->rank->sends[other]++ : part->rank->receives[other]++;
      auto& [send, recv] = clique.messages[way][number];
      (sends ? send : recv) = part;
      if (!send || !recv || !send->rank->works() || !recv->rank->works()) return;
      if (send->count != recv->count || send->type != recv->type)
        return complain_(fmt::format("{} does not fit {}", recv->text(), send->text()));
      std::memcpy(recv->to, send->from, send->bytes_read);
      send->done = recv->done = true;
      return;
    }
    auto& parts = clique.collectives[part->rank->collectives++];
    parts.resize(static_cast<std::size_t>(clique.size));
    parts[static_cast<std::size_t>(part->rank->index)] = part;
    for (const PartPtr& other : parts)
      if (!other || !other->rank->works()) return;  // whose memory may be gone as well: it never happens
    for (const PartPtr& other : parts)
      if (!other->agrees(*parts[0]))
        return complain_(fmt::format("the ranks issue different collectives: rank {} {}, rank {} {}",
                                     parts[0]->rank->machine_rank, parts[0]->text(),
                                     other->rank->machine_rank, other->text()));
    run(parts);
    for (const PartPtr& other : parts) other->done = true;
  }

  static at::Tensor view(const void* memory, std::size_t count, at::ScalarType type) {
    return at::from_blob(const_cast<void*>(memory), {static_cast<std::int64_t>(count)},
                         at::TensorOptions(type));
  }
  static at::Tensor combined(const std::vector<PartPtr>& parts, std::size_t count) {
    const FakePart& first = *parts[0];
    const double scale = first.op == ReduceOp::avg ? 1.0 / static_cast<double>(parts.size()) : 1.0;
    at::Tensor sum;
    for (const PartPtr& part : parts) {
      at::Tensor own = view(part->from, count, part->type).clone();
      if (first.op == ReduceOp::avg) own.mul_(scale);
      if (!sum.defined())
        sum = own;
      else if (first.op == ReduceOp::min)
        sum = at::minimum(sum, own);
      else if (first.op == ReduceOp::max)
        sum = at::maximum(sum, own);
      else if (first.op == ReduceOp::product)
        sum.mul_(own);
      else
        sum.add_(own);
    }
    return sum;
  }
  static void run(const std::vector<PartPtr>& parts) {
    using Kind = FakePart::Kind;
    const FakePart& first = *parts[0];
    const at::NoGradGuard no_grad;
    switch (first.kind) {
      case Kind::all_reduce:
      case Kind::reduce: {
        const at::Tensor sum = combined(parts, first.count);
        for (const PartPtr& part : parts) {
          // Where a reduce is not wanted, NCCL leaves anything behind.
          auto to = view(part->to, part->count, part->type);
          if (first.kind == Kind::all_reduce || part->rank->index == first.other)
            to.copy_(sum);
          else
            to.fill_(7);
        }
        return;
      }
      case Kind::reduce_scatter: {
        const at::Tensor sum = combined(parts, first.count * parts.size());
        for (std::size_t r = 0; r < parts.size(); ++r)
          view(parts[r]->to, first.count, first.type)
              .copy_(sum.narrow(0, static_cast<std::int64_t>(r * first.count),
                                static_cast<std::int64_t>(first.count)));
        return;
      }
      case Kind::broadcast: {
        const at::Tensor sent =
            view(parts[static_cast<std::size_t>(first.other)]->from, first.count, first.type).clone();
        for (const PartPtr& part : parts) view(part->to, part->count, part->type).copy_(sent);
        return;
      }
      case Kind::all_gather: {
        std::vector<at::Tensor> rows;
        for (const PartPtr& part : parts) rows.push_back(view(part->from, part->count, part->type).clone());
        const at::Tensor all = at::cat(rows);
        for (const PartPtr& part : parts) view(part->to, part->count * parts.size(), part->type).copy_(all);
        return;
      }
      default:
        return;
    }
  }

  std::function<void(const std::string&)> complain_;
  std::map<std::string, FakeClique> cliques_;
  std::vector<std::unique_ptr<FakeRank>> ranks_;
};

}  // namespace lockstep_test
