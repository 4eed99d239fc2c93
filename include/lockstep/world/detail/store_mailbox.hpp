#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/store_keys.hpp"

namespace lockstep::detail {

/// A message: its kind, its fields, and free text at the end.
struct Message {
  std::int64_t number = 0;
  std::string kind;
  std::string text;

  /// Returns the n-th word after the kind.
  [[nodiscard]] std::string word(int n) const {
    const std::string tail = rest(n);
    return tail.substr(0, tail.find(' '));
  }
  /// Returns the text from the n-th word on.
  [[nodiscard]] std::string rest(int n) const {
    std::size_t begin = 0;
    for (; n > 0 && begin < text.size(); --n) begin = std::min(text.find(' ', begin), text.size() - 1) + 1;
    return text.substr(begin);
  }
};

/// A mailbox in the store for messages from one rank to all ranks, with one status text per rank. Posting and
/// reading take a number of store operations that does not depend on the number of ranks. Every function
/// throws what the store throws. Only as thread-safe as its store connection.
class StoreMailbox {
 public:
  StoreMailbox(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : rank_(rank), pause_(std::min(size / 16, 20)) {
    reconnect(std::move(store));
  }

  /// Switches to another connection to the same store.
  void reconnect(c10::intrusive_ptr<c10d::Store> store) {
    store_ = c10::make_intrusive<c10d::PrefixStore>(store_keys::mailbox, std::move(store));
  }

  /// Posts a message and returns its number. Wakes every rank that waits in `sleep`.
  std::int64_t post(const std::string& message) {
    const std::int64_t number = store_->add(store_keys::message_count, 1);
    store_->set(store_keys::message(number), message);
    return number;
  }
  /// Wakes every rank to look at the rest of the store.
  void notify_all_ranks() { post(store_keys::look_message); }

  /// Blocks until a message is posted that `news` has not counted, at most `timeout`. Returns whether one was
  /// posted. Throws if the wait ends before its timeout: the connection is closed then.
  bool sleep(std::chrono::milliseconds timeout) {
    const auto start = std::chrono::steady_clock::now();
    try {
      store_->wait({store_keys::message(counted_ + 1)}, timeout);
      return true;
    } catch (const std::exception&) {
      if (std::chrono::steady_clock::now() - start < timeout - timeout / 10) throw;
      return false;
    }
  }

  /// Returns the messages posted since the last call. A later call returns a message that its sender has
  /// counted but not written yet.
  [[nodiscard]] std::vector<Message> news() {
    const std::int64_t count = store_->add(store_keys::message_count, 0);
    if (count - counted_ > most_unread)
      throw CommunicationError(detail::formatted(
          "the store counts {} messages between the ranks, of which this one knows {}: it is "
          "damaged, so start the run again",
          count, counted_));
    while (counted_ < count) unread_.insert(++counted_);
    const std::vector<std::int64_t> numbers(unread_.begin(), unread_.end());
    std::vector<std::string> keys;
    for (const std::int64_t number : numbers) keys.push_back(store_keys::message(number));
    const auto texts = read(keys);
    std::vector<Message> news;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      if (!texts[i]) continue;
      unread_.erase(numbers[i]);
      const auto space = std::min(texts[i]->find(' '), texts[i]->size());
      news.push_back({numbers[i], texts[i]->substr(0, space),
                      space < texts[i]->size() ? texts[i]->substr(space + 1) : ""});
    }
    return news;
  }
  /// Returns whether there are messages that are counted but not written.
  [[nodiscard]] bool incomplete() const { return !unread_.empty(); }

  /// Returns how long a reader should pause between two calls of `news`, so that it reads the simultaneous
  /// posts of many ranks in few operations.
  [[nodiscard]] std::chrono::milliseconds pause() const { return pause_; }

  /// Replaces the status text of this rank.
  void set_status(const std::string& text) { store_->set(store_keys::status(rank_), text); }
  /// Returns the status texts of `ranks`, std::nullopt for a rank that has not set one.
  [[nodiscard]] std::vector<std::optional<std::string>> statuses(const std::vector<int>& ranks) {
    std::vector<std::string> keys;
    for (const int rank : ranks) keys.push_back(store_keys::status(rank));
    return read(keys);
  }

 private:
  // More messages than any run posts before a rank reads them.
  static constexpr std::int64_t most_unread = 1'000'000;

  // The most keys of one store operation.
  static constexpr std::size_t most_keys = 4096;

  // Returns the values of the keys that exist. Takes one or two operations if all exist, else a bisection.
  std::vector<std::optional<std::string>> read(const std::vector<std::string>& keys) {
    std::vector<std::optional<std::string>> values(keys.size());
    for (std::size_t begin = 0; begin < keys.size(); begin += most_keys)
      read(keys, begin, std::min(begin + most_keys, keys.size()), values);
    return values;
  }
  void read(const std::vector<std::string>& keys, std::size_t begin, std::size_t end,
            std::vector<std::optional<std::string>>& values) {
    if (begin == end) return;
    const std::vector<std::string> part(keys.begin() + static_cast<std::ptrdiff_t>(begin),
                                        keys.begin() + static_cast<std::ptrdiff_t>(end));
    if (store_->check(part)) {
      if (part.size() > 1 && store_->hasExtendedApi()) {
        const auto found = store_->multiGet(part);
        for (std::size_t i = 0; i < found.size(); ++i)
          values[begin + i] = std::string(found[i].begin(), found[i].end());
      } else {
        for (std::size_t i = 0; i < part.size(); ++i) values[begin + i] = store_->get_to_str(part[i]);
      }
    } else if (part.size() > 1) {
      const std::size_t middle = begin + part.size() / 2;
      read(keys, begin, middle, values);
      read(keys, middle, end, values);
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::chrono::milliseconds pause_;
  std::int64_t counted_ = 0;
  std::set<std::int64_t> unread_;  // counted but not read, up to counted_
};

}  // namespace lockstep::detail
