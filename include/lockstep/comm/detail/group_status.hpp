#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/detail/describe.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/served_call.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/call_history.hpp"
#include "lockstep/world/detail/failure_text.hpp"

namespace lockstep::inline v0_1::detail {

/// A call of a collective, of send or of recv, as error messages name it.
struct Call {
  const char* name = "";
  std::uint64_t sequence = 0;  // of a collective, from 1; 0 for other calls
  std::optional<int> peer{};   // of send and recv: the peer's rank in the group
  int tag = 0;
  std::chrono::steady_clock::time_point start{};
  ServedCall served{};
  std::shared_ptr<const std::string> label{};  // such as "bucket 2 of 5, with fc.weight"; may be null

  /// Returns the values of this call for a Failure.
  [[nodiscard]] FailedCall failed() const {
    return {name,
            sequence,
            peer.value_or(-1),
            tag,
            label ? *label : std::string(),
            served.name ? served.name : "",
            served.part ? served.part : ""};
  }
  /// Returns "all_reduce #57 of Trainer::fit" or "recv from rank 2 (tag 5)".
  [[nodiscard]] std::string text() const { return text_of(failed()); }
};

/// What a collective has in common on all ranks, beside its name.
struct CallContent {
  std::optional<ReduceOp> op{};
  std::optional<int> root{};
  std::size_t tensors = 0;
  at::DimVector sizes{};  // of the first tensor, with its dtype
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::uint64_t hash = 0;  // of all that, and of each tensor's number of elements and dtype

  static CallContent of(std::optional<ReduceOp> op, std::optional<int> root, at::TensorList tensors = {}) {
    CallContent content{op, root, tensors.size()};
    content.hash = next_hash(
        op ? static_cast<std::uint64_t>(*op) + 1 : 0,
        static_cast<std::uint64_t>(tensors.size()) << 32 | static_cast<std::uint32_t>(root.value_or(-1)));
    for (const at::Tensor& tensor : tensors)  // a right program may give one rank [6] and another [2, 3]
      content.hash = next_hash(content.hash, static_cast<std::uint64_t>(tensor.numel()) << 8 |
                                                 static_cast<std::uint8_t>(tensor.scalar_type()));
    if (tensors.empty()) return content;
    content.sizes = tensors[0].sizes();
    content.dtype = tensors[0].scalar_type();
    return content;
  }

  /// Returns "all_reduce of sum, [4] float32" or "broadcast with root 2, 3 tensors, the first [4] float32".
  [[nodiscard]] std::string text(const char* name) const {
    static constexpr const char* ops[] = {"sum", "avg", "min", "max", "product"};
    std::string text = name;
    if (op) text += formatted(" of {}", ops[static_cast<int>(*op)]);
    if (root) text += formatted(" with root {}", *root);
    if (tensors > 1) text += formatted(", {} tensors, the first", tensors);
    if (tensors > 0)
      text += formatted("{} {} {}", tensors > 1 ? "" : ",", shape_text(sizes), dtype_name(dtype));
    return text;
  }
};

/// The last collectives that this process has entered in one group, and the hash of all of them.
///
/// Thread safety: one thread at a time may call `enter`; any thread may call the other functions.
class GroupStatus : public ReportedGroup {
 public:
  using ReportedGroup::ReportedGroup;

  /// Enters the next collective. Returns its number, from 1.
  std::uint64_t enter(const char* operation, const ServedCall& served = {}, const CallContent& content = {},
                      std::shared_ptr<const std::string> label = nullptr) {
    const std::uint64_t hash =
        next_hash(hash_of(operation, hash_), label ? hash_of(*label, content.hash) : content.hash);
    const std::lock_guard lock(mutex_);
    if (last_.empty()) last_.resize(most_kept);
    const std::uint64_t sequence = ++sequence_;
    last_[sequence % most_kept] = {
        {operation, sequence, {}, 0, {}, served, std::move(label)}, content, hash_ = hash};
    if (sequence % mark_interval == 0)
      for (int power = std::countr_zero(sequence); power >= 6; --power)
        marks_[static_cast<std::size_t>(power - 6)] = {sequence, hash};
    return sequence;
  }

  [[nodiscard]] CallMark mark() const override {
    const std::lock_guard lock(mutex_);
    return {sequence_, hash_};
  }
  [[nodiscard]] FailedCall position() const override {
    const std::lock_guard lock(mutex_);
    return last_.empty() ? FailedCall{} : call(sequence_).call;
  }
  /// Of the last collective, and of the last multiple of each power of 2 from mark_interval on, one of which all ranks
  /// report whatever their pace is. Where no collective has come since the last report, or will, once of the last mark_interval:
  /// ranks that wait for each other after numbers of collectives that differ by less share one of these.
  std::optional<CallMarks> new_marks() override {
    const std::lock_guard lock(mutex_);
    if (reported_ == sequence_ && waits_) return std::nullopt;
    CallMarks all{name, ranks.size(), {{sequence_, hash_}}};
    const bool news = std::exchange(reported_, sequence_) != sequence_;
    waits_ = !news || left_;
    if (news)
      for (const auto& [sequence, hash] : marks_)
        if (sequence > 0) all.marks.push_back({sequence, hash});
    if (waits_)
      for (std::uint64_t back = 1; back < std::min(sequence_, mark_interval); ++back)
        all.marks.push_back({sequence_ - back, last_[(sequence_ - back) % most_kept].hash});
    // At the end all ranks together 16,384 or so, but each no fewer than between two marks.
    const auto at_end = std::clamp(16 * most_kept / ranks.size(), mark_interval, most_kept);
    const auto most = std::exchange(asked_, false) ? most_kept : left_ ? at_end : 0;
    for (std::uint64_t sequence = sequence_ - std::min(sequence_, most); sequence < sequence_;)
      all.calls.push_back(call(++sequence));
    return all;
  }
  void ask_calls() override {
    const std::lock_guard lock(mutex_);
    asked_ = true;
    waits_ = false;  // reports once more
  }
  void leave() override {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(left_, true)) waits_ = false;
  }

 private:
  static constexpr std::uint64_t most_kept = 1024;

  struct Entry {
    Call call{};
    CallContent content{};
    std::uint64_t hash = 0;
  };

  [[nodiscard]] RecordedCall call(std::uint64_t sequence) const {
    const auto& [call, content, hash] = last_[sequence % most_kept];
    return {hash, content.text(call.name) + (call.label ? " (" + *call.label + ")" : ""), call.failed()};
  }

  mutable std::mutex mutex_;
  std::uint64_t sequence_ = 0, hash_ = 0, reported_ = ~std::uint64_t{0};
  bool waits_ = false, left_ = false;  // no collective had come since the last report, or will come
  bool asked_ = false;                 // for the last calls
  std::vector<Entry> last_;            // by number, modulo its size; empty before the first collective
  std::array<std::pair<std::uint64_t, std::uint64_t>, 40> marks_{};  // by power of 2
};

}  // namespace lockstep::inline v0_1::detail
