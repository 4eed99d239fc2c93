#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

/// The collectives of the ranks of a communicator, as the store compares them: by a rolling hash, and where hashes
/// differ by the ranks' last calls.
namespace lockstep::inline v0_1::detail {

/// Returns the hash of a sequence of values, given the hash of all but the last.
constexpr std::uint64_t next_hash(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15;
  return hash ^ (hash >> 29);
}

/// Returns the hash of a text.
inline std::uint64_t hash_of(std::string_view text, std::uint64_t hash) {
  hash = next_hash(hash, text.size());
  for (; text.size() >= 8; text.remove_prefix(8)) hash = next_hash(hash, little_endian<std::uint64_t>(text));
  std::uint64_t rest = 0;
  for (const char character : text) rest = rest << 8 | static_cast<unsigned char>(character);
  return next_hash(hash, rest);
}

/// The interval of the numbers of collectives whose hashes every rank reports.
inline constexpr std::uint64_t mark_interval = 64;

/// A collective as a rank has called it.
struct RecordedCall {
  std::uint64_t hash = 0;  ///< of this collective and all before it
  std::string content;     ///< what must be equal on all ranks: "all_reduce of sum, [25] float32"
  FailedCall call;
};
template <>
inline constexpr auto fields_of<RecordedCall> =
    std::tuple{&RecordedCall::hash, &RecordedCall::content, &RecordedCall::call};

/// The hash of all collectives of a rank up to number `sequence`.
struct CallMark {
  std::uint64_t sequence = 0, hash = 0;
};
template <>
inline constexpr auto fields_of<CallMark> = std::tuple{&CallMark::sequence, &CallMark::hash};
/// What a rank reports of a communicator of `ranks` ranks: first the mark of its last collective.
struct CallMarks {
  std::string group = {};
  std::uint64_t ranks = 0;
  std::vector<CallMark> marks = {};
  std::vector<RecordedCall> calls = {};  // the last ones, of a rank that leaves it or is asked for them
};
template <>
inline constexpr auto fields_of<CallMarks> =
    std::tuple{&CallMarks::group, &CallMarks::ranks, &CallMarks::marks, &CallMarks::calls};

/// The last collective of a rank in a communicator.
struct RankPosition {
  std::string group = {};
  FailedCall position = {};
};
template <>
inline constexpr auto fields_of<RankPosition> = std::tuple{&RankPosition::group, &RankPosition::position};

/// A communicator of this process, as it is reported to the store. Thread-safe.
struct ReportedGroup {
  ReportedGroup(std::string name, std::vector<int> ranks) : name(std::move(name)), ranks(std::move(ranks)) {}
  virtual ~ReportedGroup() = default;
  /// Returns the last collective; without one, a call without a number.
  [[nodiscard]] virtual FailedCall position() const = 0;
  /// Returns the number of the last collective and the hash of all.
  [[nodiscard]] virtual CallMark mark() const = 0;
  /// Returns the marks that the store compares, if there are new ones.
  virtual std::optional<CallMarks> new_marks() = 0;
  /// The next marks come with the last calls.
  virtual void ask_calls() = 0;
  /// No collective follows. The next marks are the last: the store forgets the group once all ranks have left.
  virtual void leave() = 0;

  const std::string name;
  const std::vector<int> ranks;  // global, by rank in the group
  std::atomic<bool> failed{false};
};

/// Two ranks whose collectives up to number `sequence` differ, and the hashes of these.
struct CallDifference {
  int one = -1, other = -1;
  std::uint64_t sequence = 0, one_hash = 0, other_hash = 0;
};

/// Compares what the ranks of one communicator report. Keeps at most 512 hashes, and the last calls of 4 ranks.
class CallComparison {
 public:
  explicit CallComparison(std::size_t ranks) : ranks_(ranks) {}

  /// Adds the hash of all collectives of a rank up to number `sequence`.
  std::optional<CallDifference> report(int rank, const CallMark& mark) {
    const auto [sequence, hash] = mark;
    // All ranks report the numbers of the one kind; of the other they share one only while they wait.
    furthest_ = std::max(furthest_, sequence);
    auto& known = known_[sequence % mark_interval == 0];
    const auto [found, added] = known.try_emplace(sequence, hash, rank);
    const auto [first_hash, first_rank] = found->second;
    if (first_hash != hash) return CallDifference{first_rank, rank, sequence, first_hash, hash};
    if (known.size() > most_kept) known.erase(known.begin());
    return std::nullopt;
  }
  /// Adds a rank that has left the communicator after the collective `last`. Returns a rank that has left before it with
  /// another number of collectives, and its last one.
  std::optional<std::pair<int, FailedCall>> leave(int rank, const FailedCall& last) {
    if (left_.contains(rank)) return std::nullopt;
    auto before = left_before(~std::uint64_t{0});
    left_.emplace(rank, last);
    if (!fewest_ || last.sequence < left_.at(*fewest_).sequence) fewest_ = rank;
    return before && before->second.sequence != last.sequence ? before : std::nullopt;
  }
  /// Returns a rank that has left before the collective `sequence`, and its last one.
  [[nodiscard]] std::optional<std::pair<int, FailedCall>> left_before(std::uint64_t sequence) const {
    if (!fewest_ || left_.at(*fewest_).sequence >= sequence) return std::nullopt;
    return *left_.find(*fewest_);
  }
  /// Keeps the last calls of a rank, which may not be there later to tell them: of ranks with equal calls once.
  void keep(const std::vector<RecordedCall>& calls) {
    if (!calls.empty() && last_calls_.size() < 4) last_calls_.try_emplace(calls.back().hash, calls);
  }
  /// Returns kept calls of which those up to number `sequence` have the hash `hash`.
  [[nodiscard]] std::vector<RecordedCall> kept(std::uint64_t sequence, std::uint64_t hash) const {
    for (const auto& [last, calls] : last_calls_)
      if (const auto back = calls.back().call.sequence - sequence;
          back < calls.size() && calls[calls.size() - 1 - back].hash == hash)
        return calls;
    return {};
  }
  [[nodiscard]] const std::map<int, FailedCall>& left() const { return left_; }
  [[nodiscard]] bool all_left() const { return left_.size() >= ranks_; }
  /// Returns the number of the last collective of any rank.
  [[nodiscard]] std::uint64_t furthest() const { return furthest_; }

 private:
  static constexpr std::size_t most_kept = 256;

  std::map<std::uint64_t, std::pair<std::uint64_t, int>> known_[2];  // hash and first rank, by number
  std::size_t ranks_;
  std::uint64_t furthest_ = 0;
  std::map<int, FailedCall> left_;  // the last collectives of the ranks that have left
  std::optional<int> fewest_;       // of these, one with the fewest
  std::map<std::uint64_t, std::vector<RecordedCall>> last_calls_;  // by the hash of all
};

/// Returns the first calls that differ among the last calls of two ranks; nothing if these do not reach back to them.
inline std::optional<std::pair<RecordedCall, RecordedCall>> first_difference(
    const std::vector<RecordedCall>& one, const std::vector<RecordedCall>& other) {
  if (one.empty() || other.empty()) return std::nullopt;
  const std::uint64_t begin = std::max(one.front().call.sequence, other.front().call.sequence);
  for (std::uint64_t sequence = begin;; ++sequence) {
    const auto here = static_cast<std::size_t>(sequence - one.front().call.sequence);
    const auto there = static_cast<std::size_t>(sequence - other.front().call.sequence);
    if (here >= one.size() || there >= other.size()) return std::nullopt;
    if (one[here].hash == other[there].hash) continue;
    if (sequence == begin && begin > 1) return std::nullopt;
    return std::pair(one[here], other[there]);
  }
}

}  // namespace lockstep::inline v0_1::detail
