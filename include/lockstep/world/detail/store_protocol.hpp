#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/world/detail/printable.hpp"

namespace lockstep::detail {

/// The wire format of lockstep's key-value store.
///
/// A connection begins with a hello (`store_magic`, then the secret of the run). The server answers with
/// `store_magic` and a StoreGreeting byte. Then the client sends requests. The server sends one reply to each, in any
/// order, but none to a request without a result or one that the client has cancelled. A client that has subscribed is
/// also sent what it has not asked for. Each message is a frame: its length in 4 bytes, then its payload. A request is an
/// id of 8 bytes, a StoreOperation byte and arguments. A reply is the id, a StoreStatus byte and a result; what is pushed
/// has `push_id`, a StorePush byte and a content. Integers are little-endian. A string is its length in 4 bytes and its
/// bytes.
inline constexpr std::string_view store_magic = "lockstep store 4\n";
/// The common beginning of `store_magic` in all versions of the protocol.
inline constexpr std::string_view store_magic_of_any_version = "lockstep store ";

inline constexpr std::size_t max_secret_bytes = 256;
inline constexpr std::size_t max_key_bytes = 4096;
/// The limit for one frame, and so for one value.
inline constexpr std::size_t max_frame_bytes = std::size_t{64} << 20;
/// The limit for all keys and values together.
inline constexpr std::size_t max_store_bytes = std::size_t{1} << 30;

enum class StoreGreeting : std::uint8_t { welcome, wrong_secret, wrong_version };

enum class StoreStatus : std::uint8_t { done, refused };

enum class StoreOperation : std::uint8_t {
  set,          ///< keys and values -> nothing
  get,          ///< keys -> values, once all exist
  wait,         ///< keys -> nothing, once all exist
  check,        ///< keys -> whether all exist
  add,          ///< key, integer -> sum
  compare_set,  ///< key, expected, desired -> value
  erase,        ///< key -> whether it existed
  append,       ///< key, value -> nothing
  cancel,       ///< id of a request; no reply
  // About the run, see RunState:
  join,       ///< rank, size, RankIdentity, whether it stays -> JoinAnswer
  leave,      ///< nothing: the end of this connection is not that of its rank; no reply
  outcome,    ///< nothing -> Outcome, once the rendezvous has ended
  summary,    ///< number of ranks -> RunSummary
  members,    ///< ranks, or none for all -> the KnownRank of each
  meet,       ///< name, rank, ranks or none for all, whether it waits, whether its coming lasts -> Meeting
  subscribe,  ///< rank -> nothing; this connection is sent the events, a past failure first; -1 ends that
  publish,    ///< Event -> whether it is news
  staying,    ///< communicator, ranks -> those that are in it
  report,     ///< a RankPosition and the CallMarks of each communicator; no reply
  ask,        ///< communicator, ranks -> the RankReport of each, which is asked to report
  calls       ///< a group and the last calls of the subscribed rank, see StorePush::calls; no reply
};

inline constexpr std::uint64_t push_id = ~std::uint64_t{0};
enum class StorePush : std::uint8_t {
  event,     ///< an Event
  question,  ///< nothing: the rank reports
  calls      ///< a group: the rank sends its last calls
};

/// The members of a struct that is sent, in their order.
template <class Struct>
inline constexpr auto fields_of = std::tuple{};
/// The last enumerator of an enum that is sent.
template <class Enum>
inline constexpr Enum last_of = Enum{};

/// Builds a frame.
class FrameWriter {
 public:
  FrameWriter() : bytes_(4, '\0') {}

  FrameWriter& byte(std::uint8_t value) {
    bytes_.push_back(static_cast<char>(value));
    return *this;
  }
  FrameWriter& integer(std::uint64_t value) {
    append_little_endian(bytes_, value);
    return *this;
  }
  FrameWriter& raw(std::string_view text) {
    bytes_.append(text);
    return *this;
  }
  FrameWriter& text(std::string_view text) { return length(text.size()).raw(text); }
  FrameWriter& texts(const std::vector<std::string>& list) { return value(list); }

  /// Writes a value: a number, a flag, an enum, a text, a list, an optional value, or a struct with fields_of.
  template <class Value>
  FrameWriter& value(const Value& value) {
    if constexpr (std::is_same_v<Value, bool> || std::is_enum_v<Value>) {
      byte(static_cast<std::uint8_t>(value));
    } else if constexpr (std::is_integral_v<Value>) {
      integer(static_cast<std::uint64_t>(value));
    } else if constexpr (std::is_convertible_v<Value, std::string_view>) {
      text(value);
    } else if constexpr (requires { value.has_value(); }) {
      byte(value.has_value() ? 1 : 0);
      if (value) this->value(*value);
    } else if constexpr (requires { value.begin(); }) {
      length(value.size());
      for (const auto& one : value) this->value(one);
    } else {
      std::apply([&](auto... members) { (this->value(value.*members), ...); }, fields_of<Value>);
    }
    return *this;
  }

  /// Returns what has been written so far.
  [[nodiscard]] std::string_view payload() const { return std::string_view(bytes_).substr(4); }
  /// Returns the frame, with its length in front.
  [[nodiscard]] std::string take() {
    const auto length = static_cast<std::uint32_t>(payload().size());
    std::memcpy(bytes_.data(), &length, sizeof length);
    return std::move(bytes_);
  }

 private:
  FrameWriter& length(std::size_t value) {
    append_little_endian(bytes_, static_cast<std::uint32_t>(value));
    return *this;
  }

  std::string bytes_;
};

/// Reads a payload. A read past the end returns zero or nothing and makes `whole()` false for good.
class FrameReader {
 public:
  explicit FrameReader(std::string_view payload) : rest_(payload) {}

  std::uint8_t byte() { return fixed<std::uint8_t>(); }
  std::uint64_t integer() { return fixed<std::uint64_t>(); }
  std::string_view text() {
    const std::size_t length = fixed<std::uint32_t>();
    if (length > rest_.size()) {
      good_ = false;
      return {};
    }
    const auto result = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return result;
  }
  std::vector<std::string> texts() {
    const std::size_t count = fixed<std::uint32_t>();
    std::vector<std::string> result;
    if (count > rest_.size() / 4) good_ = false;  // each has a length field
    for (std::size_t i = 0; good_ && i < count; ++i) result.emplace_back(text());
    return result;
  }

  /// Reads what FrameWriter::value has written. Escapes the control characters of texts.
  template <class Value>
  void value(Value& value) {
    if constexpr (std::is_same_v<Value, bool>) {
      value = byte() != 0;
    } else if constexpr (std::is_enum_v<Value>) {
      if (const std::uint8_t read = byte(); read <= static_cast<std::uint8_t>(last_of<Value>))
        value = static_cast<Value>(read);
    } else if constexpr (std::is_integral_v<Value>) {
      value = static_cast<Value>(integer());
    } else if constexpr (std::is_same_v<Value, std::string>) {
      value = printable(std::string(text()));
    } else if constexpr (requires { value.has_value(); }) {
      value.reset();
      if (byte() != 0) this->value(value.emplace());
    } else if constexpr (requires { value.begin(); }) {
      std::size_t count = fixed<std::uint32_t>();
      if (count > rest_.size()) good_ = false;  // each has a byte
      for (; good_ && count > 0; --count) this->value(value.emplace_back());
    } else {
      std::apply([&](auto... members) { (this->value(value.*members), ...); }, fields_of<Value>);
    }
  }
  template <class Value>
  Value value() {
    Value value{};
    this->value(value);
    return value;
  }

  [[nodiscard]] bool more() const { return good_ && !rest_.empty(); }
  [[nodiscard]] std::string_view rest() const { return rest_; }
  /// Returns whether all reads were within the payload and consumed it completely.
  [[nodiscard]] bool whole() const { return good_ && rest_.empty(); }

 private:
  template <class Number>
  Number fixed() {
    if (sizeof(Number) > rest_.size()) {
      good_ = false;
      rest_ = {};
      return 0;
    }
    const auto value = little_endian<Number>(rest_);
    rest_.remove_prefix(sizeof(Number));
    return value;
  }

  std::string_view rest_;
  bool good_ = true;
};

/// Returns the bytes of a value.
template <class Value>
std::string encoded(const Value& value) {
  return std::string(FrameWriter().value(value).payload());
}
template <class Value>
Value decoded(std::string_view bytes) {
  return FrameReader(bytes).value<Value>();
}

/// Splits the bytes of a connection into frames as they arrive.
class FrameBuffer {
 public:
  void append(std::string_view bytes) { bytes_.append(bytes); }

  /// Returns the length of the next frame's payload, once its first 4 bytes have arrived.
  [[nodiscard]] std::optional<std::size_t> next_length() const {
    if (bytes_.size() - begin_ < 4) return std::nullopt;
    return little_endian<std::uint32_t>(bytes_, begin_);
  }
  /// Returns the payload of the next frame once it is complete. Valid until `append`.
  [[nodiscard]] std::optional<std::string_view> next() {
    const auto length = next_length();
    if (!length || bytes_.size() - begin_ - 4 < *length) {
      bytes_.erase(0, begin_);
      begin_ = 0;
      return std::nullopt;
    }
    const auto payload = std::string_view(bytes_).substr(begin_ + 4, *length);
    begin_ += 4 + *length;
    return payload;
  }
  [[nodiscard]] std::size_t size() const { return bytes_.size() - begin_; }

 private:
  std::string bytes_;
  std::size_t begin_ = 0;
};

}  // namespace lockstep::detail
