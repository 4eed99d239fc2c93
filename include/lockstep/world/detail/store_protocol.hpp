#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::inline v0_1::detail {

/// Escapes every control character ("\n", "\x1b"), including those that UTF-8 encodes in two bytes. For text
/// from another process, which could otherwise control the terminal or forge lines.
inline std::string printable(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    const bool in_two = byte == 0xc2 && next >= 0x80 && next < 0xa0;
    if (byte == '\n' || byte == '\t')
      result += byte == '\n' ? "\\n" : "\\t";
    else if (byte < 0x20 || byte == 0x7f || in_two)
      result += formatted("\\x{:02x}", in_two ? next : byte);
    else
      result += text[i];
    if (in_two) ++i;
  }
  return result;
}

/// The wire format of lockstep's key-value store.
///
/// A connection begins with a hello (`store_magic`, the number of restarts in 8 bytes, then the secret of the run). The server
/// answers with its `store_magic` and a StoreStatus byte, which is `refused` for another secret. Then the client sends
/// requests. The server sends one reply to each, in any order, but none to a request without a result or one
/// that the client has cancelled. A client that has subscribed is also sent pushes. Each message is a frame:
/// its length in 4 bytes, then its payload. A request is an id of 8 bytes, a StoreOperation byte and
/// arguments. A reply is the id, a StoreStatus byte and a result. A push is `push_id`, a StorePush byte and a
/// content. Integers are little-endian. A string is its length in 4 bytes and its bytes.
inline constexpr std::string_view store_magic = "lockstep store 11\n";
/// The common beginning of `store_magic` in all versions of the protocol.
inline constexpr std::string_view store_magic_of_any_version = "lockstep store ";

inline constexpr std::size_t max_secret_bytes = 256, max_key_bytes = 4096;
/// The limit for one frame, and so for one value.
inline constexpr std::size_t max_frame_bytes = std::size_t{64} << 20;
/// The limit for all keys and values together.
inline constexpr std::size_t max_store_bytes = std::size_t{1} << 30;

/// `early` and `late`: of a client of a later or an earlier restart than the server.
enum class StoreStatus : std::uint8_t { done, refused, early, late };

/// Returns how a server of restart `server` answers the hello of a client of restart `client`.
inline StoreStatus greeting(std::int64_t client, std::int64_t server) {
  if (client == server) return StoreStatus::done;
  return client > server ? StoreStatus::early : StoreStatus::late;
}

enum class StoreOperation : std::uint8_t {
  set,          ///< keys and values -> nothing
  get,          ///< keys -> values, once all exist
  wait,         ///< keys -> nothing, once all exist
  check,        ///< keys -> whether all exist
  add,          ///< key, integer -> sum
  compare_set,  ///< key, expected, desired -> value
  erase,        ///< key -> whether it existed
  cancel,       ///< id of a request; no reply
  // About the run, see RunState:
  join,       ///< rank, size, RankIdentity, whether it stays -> JoinAnswer
  leave,      ///< nothing: the end of this connection is not that of its rank; no reply
  summary,    ///< name of a meeting, or none -> RunSummary
  members,    ///< ranks, or none for all -> the KnownRank of each
  meet,       ///< name, empty in the run's own; ranks or none for all; whether the coming lasts -> Meeting
  subscribe,  ///< rank -> nothing; this connection is sent the events, past ones first; -1 ends that
  publish,    ///< Event -> whether it is news
  report,     ///< a RankPosition and the CallMarks of each communicator; no reply
  ask         ///< communicator, ranks, flag -> the RankReport of each; with the flag each is asked to report
};

inline constexpr std::uint64_t push_id = ~std::uint64_t{0};
enum class StorePush : std::uint8_t {
  event,     ///< an Event
  question,  ///< nothing: the rank reports
  calls      ///< a group: the rank reports its last calls in it
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

  FrameWriter& raw(std::string_view text) {
    bytes_.append(text);
    return *this;
  }
  FrameWriter& text(std::string_view text) {
    return fixed(static_cast<std::uint32_t>(text.size())).raw(text);
  }

  /// Writes a value: a number, a flag, an enum, a text, a list, an optional value, or a struct with fields_of.
  template <class Value>
  FrameWriter& value(const Value& value) {
    if constexpr (std::is_same_v<Value, bool> || std::is_enum_v<Value>) {
      fixed(static_cast<std::uint8_t>(value));
    } else if constexpr (std::is_integral_v<Value>) {
      fixed(static_cast<std::uint64_t>(value));
    } else if constexpr (std::is_convertible_v<Value, std::string_view>) {
      text(value);
    } else if constexpr (requires { value.has_value(); }) {
      this->value(value.has_value());
      if (value) this->value(*value);
    } else if constexpr (requires { value.begin(); }) {
      fixed(static_cast<std::uint32_t>(value.size()));
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
  template <class Number>
  FrameWriter& fixed(Number value) {
    append_little_endian(bytes_, value);
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
    if (length > rest_.size()) good_ = false;
    const auto result = rest_.substr(0, good_ ? length : 0);
    rest_.remove_prefix(result.size());
    return result;
  }

  /// Reads what FrameWriter::value has written. Escapes the control characters of a std::string, and leaves
  /// the bytes of a std::string_view, which views the payload.
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
      value = printable(text());
    } else if constexpr (std::is_same_v<Value, std::string_view>) {
      value = text();
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

/// A socket that carries frames. No call blocks.
struct FrameSocket {
  Descriptor fd = {};
  std::string in = {}, out = {};            ///< received, and to be sent
  std::size_t in_begin = 0, out_begin = 0;  ///< what comes before is done

  [[nodiscard]] std::string_view received() const { return std::string_view(in).substr(in_begin); }
  [[nodiscard]] std::size_t to_send() const { return out.size() - out_begin; }

  /// Sends as much of `out` as there is room for. Returns false, and drops the rest, if the connection has ended.
  bool send() {
    bool open = true;
    while (open && to_send() > 0) {
      const ssize_t length = ::send(fd.get(), out.data() + out_begin, to_send(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      open = length >= 0 || errno == EINTR;
      out_begin += length < 0 ? 0 : static_cast<std::size_t>(length);
    }
    if (!open) out_begin = out.size();
    if (2 * out_begin >= out.size()) out.erase(0, std::exchange(out_begin, 0));
    return open;
  }

  /// Receives the available bytes, at most 1 MiB. Returns why the connection has ended, empty if it has not.
  std::string receive() {
    char buffer[1 << 16];
    for (int turn = 0; turn < 16; ++turn) {
      const ssize_t length = recv(fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (length > 0) in.append(buffer, static_cast<std::size_t>(length));
      if (length == 0) return "its host has closed the connection";
      if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
      if (length < 0 && errno != EINTR) return std::strerror(errno);
    }
    return {};
  }

  /// Returns the length of the next frame's payload, once its first 4 bytes have arrived.
  [[nodiscard]] std::optional<std::size_t> next_length() const {
    if (received().size() < 4) return std::nullopt;
    return little_endian<std::uint32_t>(received());
  }
  /// Returns the payload of the next frame once it is complete. Valid until `receive`.
  [[nodiscard]] std::optional<std::string_view> next() {
    const auto length = next_length();
    if (!length || received().size() - 4 < *length) {
      in.erase(0, std::exchange(in_begin, 0));
      return std::nullopt;
    }
    const auto payload = received().substr(4, *length);
    in_begin += 4 + *length;
    return payload;
  }
};

}  // namespace lockstep::inline v0_1::detail
