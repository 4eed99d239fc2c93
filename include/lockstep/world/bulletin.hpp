#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace lockstep::detail {

/// One message on the bulletin board: a kind, words, and free text at the end.
struct Notice {
  std::int64_t number = 0;
  std::string kind;
  std::string text;

  /// The n-th word behind the kind.
  [[nodiscard]] std::string word(int n) const {
    const std::string tail = rest(n);
    return tail.substr(0, tail.find(' '));
  }
  /// Everything from the n-th word on.
  [[nodiscard]] std::string rest(int n) const {
    std::size_t begin = 0;
    for (; n > 0 && begin < text.size(); --n) begin = std::min(text.find(' ', begin), text.size() - 1) + 1;
    return text.substr(begin);
  }
};

/// Messages from one rank to all, in the order in which they were posted, kept in the store; and a bell for
/// each rank, so that it need not poll for them. Not thread-safe beyond the store connection it is given.
class Bulletin {
 public:
  Bulletin(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(c10::make_intrusive<c10d::PrefixStore>("lockstep/bulletin", std::move(store))),
        rank_(rank),
        size_(size) {}

  /// Posts a message and returns its number.
  std::int64_t post(const std::string& message) {
    const std::int64_t number = store_->add("count", 1);
    store_->set(fmt::format("notice/{}", number), message);
    return number;
  }

  void ring(int rank) { store_->set(bell(rank), std::string("1")); }
  void ring_all() {
    for (int rank = 0; rank < size_; ++rank) ring(rank);
  }

  /// Sleeps until this rank's bell is rung, a day at most (LibTorch logs a wait that ends by its time).
  /// Throws when the store is gone.
  void sleep() {
    const auto start = std::chrono::steady_clock::now();
    try {
      store_->wait({bell(rank_)}, std::chrono::hours(24));
      store_->deleteKey(bell(rank_));
    } catch (const c10::DistStoreError&) {
      // A store that fails at once must not make the caller spin.
      if (std::chrono::steady_clock::now() - start < std::chrono::seconds(1)) throw;
    }
  }

  /// The messages posted since the last call.
  [[nodiscard]] std::vector<Notice> news() {
    std::vector<Notice> news;
    const std::int64_t count = store_->add("count", 0);
    while (read_ < count) {
      const std::string key = fmt::format("notice/{}", ++read_);
      if (!appears({key}, std::chrono::seconds(1))) continue;  // its sender died between counting and writing
      const std::string text = store_->get_to_str(key);
      const auto space = std::min(text.find(' '), text.size());
      news.push_back({read_, text.substr(0, space), space < text.size() ? text.substr(space + 1) : ""});
    }
    return news;
  }

  /// Waits for all of these keys, `patience` at most and no longer than there is a point; true if they are
  /// there.
  bool appears(
      const std::vector<std::string>& keys, std::chrono::milliseconds patience,
      const std::function<bool()>& pointless = [] { return false; }) {
    const auto end = std::chrono::steady_clock::now() + patience;
    for (auto pause = std::chrono::microseconds(500); !keys.empty() && !store_->check(keys);
         pause = std::min(2 * pause, std::chrono::microseconds(20000))) {
      if (std::chrono::steady_clock::now() >= end || pointless()) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  void answer(std::int64_t question, const std::string& text) {
    store_->set(answer_key(question, rank_), text);
  }

  /// The answers of `ranks` to a message, of those that gave one in time.
  [[nodiscard]] std::map<int, std::string> answers(std::int64_t question, const std::vector<int>& ranks,
                                                   std::chrono::milliseconds patience,
                                                   const std::function<bool()>& pointless) {
    std::vector<std::string> keys;
    for (int rank : ranks) keys.push_back(answer_key(question, rank));
    appears(keys, patience, pointless);
    std::map<int, std::string> answers;
    for (std::size_t i = 0; i < ranks.size(); ++i)
      if (store_->check({keys[i]})) answers[ranks[i]] = store_->get_to_str(keys[i]);
    return answers;
  }

 private:
  static std::string bell(int rank) { return fmt::format("bell/{}", rank); }
  static std::string answer_key(std::int64_t question, int rank) {
    return fmt::format("answer/{}/{}", question, rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::int64_t read_ = 0;
};

}  // namespace lockstep::detail
