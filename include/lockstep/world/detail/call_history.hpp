#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

/// The collectives of the ranks of a communicator, as the store compares them: by a rolling hash, and where hashes
/// differ by the ranks' last calls.
namespace lockstep::detail {

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

  static std::string encode(const std::vector<RecordedCall>& calls) {
    FrameWriter out;
    for (const RecordedCall& one : calls) write_call(out.integer(one.hash).text(one.content), one.call);
    return std::string(out.payload());
  }
  static std::vector<RecordedCall> decode(std::string_view bytes) {
    FrameReader in(bytes);
    std::vector<RecordedCall> calls;
    while (in.more()) {
      RecordedCall& one = calls.emplace_back();
      one.hash = in.integer();
      one.content = printable(std::string(in.text()));
      one.call = read_call(in);
    }
    return calls;
  }
};

/// Two ranks whose collectives up to number `sequence` differ.
struct CallDifference {
  int one = -1, other = -1;
  std::uint64_t sequence = 0;
};

/// Compares what the ranks of one communicator report. It keeps at most 512 hashes.
class CallComparison {
 public:
  explicit CallComparison(std::size_t ranks) : ranks_(ranks) {}

  /// Adds the hash of all collectives of a rank up to number `sequence`.
  std::optional<CallDifference> report(int rank, std::uint64_t sequence, std::uint64_t hash) {
    // All ranks report the numbers of the one kind; of the other they share one only while they wait.
    auto& known = known_[sequence % mark_interval == 0];
    const auto [found, added] = known.try_emplace(sequence, hash, rank);
    const auto [first_hash, first_rank] = found->second;
    if (first_hash != hash) return CallDifference{first_rank, rank, sequence};
    if (known.size() > most_kept) known.erase(known.begin());
    return std::nullopt;
  }
  /// Adds a rank that has left the communicator after the collective `last`. Returns the rank that has left before it
  /// with another number of collectives, and its last one.
  std::optional<std::pair<int, FailedCall>> leave(int rank, const FailedCall& last) {
    if (!left_) left_ = {rank, last};
    ++gone_;
    return left_->second.sequence == last.sequence ? std::nullopt : left_;
  }

  [[nodiscard]] bool all_left() const { return gone_ >= ranks_; }

 private:
  static constexpr std::size_t most_kept = 256;

  std::map<std::uint64_t, std::pair<std::uint64_t, int>> known_[2];  // hash and first rank, by number
  std::size_t ranks_, gone_ = 0;
  std::optional<std::pair<int, FailedCall>> left_;  // the first that has left
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

}  // namespace lockstep::detail
